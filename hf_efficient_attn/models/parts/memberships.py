"""The clusters or buckets that layers chose for tokens in a forward pass, collected by `memberships`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# the number of a token in no cluster or bucket
NONE = -1


@dataclass(frozen=True)
class Membership:
    """The clusters or buckets of tokens in the first heads of a layer; the other heads have none.

    Attributes:
        kind: what a group of tokens is called, "cluster" or "bucket".
        count: the number of groups; with several rounds of hashing, in each round.
        queries, keys: int [B, heads, tokens, n], the numbers of the groups that hold a token as a query, and as a key;
            bucket b of round r has the number r · count + b. -1: no group. The same tensor if both are equal.
    """

    kind: str
    count: int
    queries: Tensor
    keys: Tensor


# one dict for each open `memberships()`, the innermost last
_listening: list[dict[int, Membership]] = []


@contextmanager
def memberships() -> Iterator[dict[int, Membership]]:
    """Collect what layers choose in forward passes, by layer index; a later pass replaces an earlier one."""
    found: dict[int, Membership] = {}
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.pop()


def record_membership(layer: int, membership: Callable[[], Membership]) -> None:
    """Record the choice of a layer in the innermost `memberships()`, if one is open; not while compiling."""
    if not torch.compiler.is_compiling() and len(_listening) > 0:
        _listening[-1][layer] = membership()
