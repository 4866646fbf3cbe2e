"""How much memory a value takes."""

from collections.abc import Mapping

from torch import Tensor

# about what Python needs for an object
OBJECT_BYTES = 48
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
        elif not isinstance(each, type) and (known := getattr(each, "num_held_bytes", None)) is not None:
            total += known
        elif not callable(each):
            # classes and functions take memory anyway
            left += getattr(each, "__dict__", {}).values()
    return total
