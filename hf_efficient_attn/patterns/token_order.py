"""Token orders in which a pattern is easy to compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hf_efficient_attn.patterns.pattern import Pattern


class Extent(NamedTuple):
    """How many queries and keys there are, and the position of the first query."""

    num_queries: int
    num_keys: int
    query_offset: int = 0


@dataclass(frozen=True)
class TokenOrder:
    """An order of some tokens in which a pattern is easy to compute, most often because it is a band there.

    queries, keys: absolute positions, in this order.
    local: the pattern on places in this order; None: every query reads every key. It may allow more than the
        pattern itself.
    local_query_offset: the a-th query is at the local position a + local_query_offset, the b-th key at b.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    local: "Pattern | None"
    local_query_offset: int = 0

    @property
    def step(self) -> int:
        """The distance between neighbours if queries and keys are one residue class each; 0 otherwise."""
        if isinstance(self.queries, range) and isinstance(self.keys, range) and self.queries.step == self.keys.step:
            return self.keys.step
        return 0
