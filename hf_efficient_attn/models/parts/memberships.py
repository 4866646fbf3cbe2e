"""Which clusters or buckets tokens are in: what layers chose in a forward pass, told to who listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# in no cluster or bucket
NONE = -1


@dataclass(frozen=True)
class Membership:
    """The clusters or buckets of tokens in the first heads of a layer; in the others no token is in any.

    Attributes:
        kind: what a group of tokens is called, "cluster" or "bucket".
        count: how many there are, of several rounds of hashing in each.
        queries, keys: int [B, heads, tokens, n], the numbers of the groups that hold a token as a query, and as a key;
            bucket b of round r has the number r · count + b. -1: none. One tensor, if they are the same.
    """

    kind: str
    count: int
    queries: Tensor
    keys: Tensor


# the innermost block comes last
_listening: list[dict[int, Membership]] = []


@contextmanager
def memberships() -> Iterator[dict[int, Membership]]:
    """Collect what layers choose in forward passes, by the index of the layer; of several passes, those of the last."""
    found: dict[int, Membership] = {}
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.pop()


def record_membership(layer: int, membership: Callable[[], Membership]) -> None:
    """Tell who listens, if anyone does, what the layer of this index has chosen; not while compiling."""
    if not torch.compiler.is_compiling() and len(_listening) > 0:
        _listening[-1][layer] = membership()
