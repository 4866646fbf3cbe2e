"""How much memory a value takes."""

from collections.abc import Mapping

from torch import Tensor

from hf_efficient_attn.patterns.pattern import Pattern

# about what Python needs for an object
OBJECT_BYTES = 48
# the attribute in which patterns, which nobody changes, and many keys hold, keep what they take
KEPT = "_size_in_bytes"
NUMBERS = frozenset((int, float, bool, type(None)))


def size_in_bytes(value: object) -> int:
    """Return about how much memory a value takes: each storage of tensors once, and what Python objects hold.

    >>> import torch
    >>> size_in_bytes(torch.zeros(1000)[:10]) - OBJECT_BYTES
    4000
    """
    total, left = 0, [value]
    seen: set[object] = set()
    while left:
        each = left.pop()
        is_new = id(each) not in seen
        seen.add(id(each))
        total += OBJECT_BYTES * is_new
        # most are numbers, which hold nothing else
        if not is_new or type(each) in NUMBERS:
            continue
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            place = ("storage", storage.data_ptr(), storage.device)
            total += 0 if place in seen else storage.nbytes()
            seen.add(place)
        elif isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, tuple | list | set | frozenset):
            total += 8 * len(each)
            if set(map(type, each)) == {int}:
                # rows of long tables: all at once
                new = set(map(id, each)) - seen
                total += OBJECT_BYTES * len(new)
                seen |= new
            else:
                left += each
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif (known := _known_size(each)) is not None:
            total += known
        elif not callable(each):
            # classes and functions take memory anyway
            left += getattr(each, "__dict__", {}).values()
    return total


def _known_size(value: object) -> int | None:
    """Return what a value says that it takes, or what was found before; None: neither."""
    if isinstance(value, type):
        return None
    known: int | None = getattr(value, "num_held_bytes", None)
    if known is not None or not isinstance(value, Pattern):
        return known
    own = vars(value)
    if KEPT not in own:
        own[KEPT] = size_in_bytes(tuple(own.values()))
    return int(own[KEPT])
