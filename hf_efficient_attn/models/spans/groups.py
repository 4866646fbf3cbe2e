"""The keys that heads with spans choose from, and which heads are computed together."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.sequence_shards import HEADS, SequenceShards
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.spans.bounds import SpanBounds
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.pattern import Pattern

# spans are rounded up to a multiple of this, so that few layouts are compiled while they change
GRANULE = 32
# up to this number of queries, as in decoding, another call costs more than the keys that it saves
FEW_QUERIES = 8
# such a query reads this many keys of all heads in less time than another call takes
CHEAP_KEYS = 256


@dataclass(frozen=True)
class SpanWindow:
    """The keys that a head chooses from: `limit` of them, counted from the nearest.

    Attributes:
        limit, ramp: S and R, in tokens.
        include_self: whether the nearest key is the query itself, or the one before it.
        is_causal: whether there are only keys before the query, or as many after it.
    """

    limit: int
    ramp: int
    include_self: bool
    is_causal: bool

    @property
    def shift(self) -> int:
        """The distance of the nearest key."""
        return 0 if self.include_self else 1

    def num_keys(self, span: float) -> int:
        """Return to how many keys on one side a head of this span gives weight."""
        return min(self.limit, ceil(span) + self.ramp)

    def band(self, num_keys: int) -> Pattern:
        """Return the band of the nearest `num_keys` keys."""
        left = num_keys - 1 + self.shift
        return Band(left, -self.shift if self.is_causal else left)


@dataclass(frozen=True)
class SpanGroup:
    """Heads that are computed together.

    Attributes:
        heads: their indices.
        num_inner: how many of the nearest keys have weight 1 in all of these heads.
        num_keys: how many of the nearest keys may have any weight.
    """

    heads: tuple[int, ...]
    num_inner: int
    num_keys: int


def span_groups(
    lowest: Sequence[float], highest: Sequence[float], window: SpanWindow, num_queries: int
) -> list[SpanGroup]:
    """Return the heads, whose spans lie between `lowest` and `highest`, grouped by how far they read in granules.

    >>> window = SpanWindow(limit=1024, ramp=32, include_self=False, is_causal=True)
    >>> span_groups([0.0, 500.0, 3.0], [0.0, 500.0, 3.0], window, 1024)
    [SpanGroup(heads=(0,), num_inner=1, num_keys=32), SpanGroup(heads=(2,), num_inner=1, num_keys=64), \
SpanGroup(heads=(1,), num_inner=481, num_keys=544)]
    """

    def reach(head: int) -> tuple[int, int]:
        first = floor(max(lowest[head], 0.0)) // GRANULE * GRANULE
        num_keys = min(window.limit, ceil(window.num_keys(highest[head]) / GRANULE) * GRANULE)
        # at the limit the ramp lies beyond all keys
        return (num_keys, num_keys) if lowest[head] >= window.limit else (num_keys, min(first + 1, num_keys))

    members: dict[tuple[int, int], list[int]] = {}
    for head in range(len(lowest)):
        members.setdefault(reach(head), []).append(head)
    groups = [SpanGroup(tuple(members[key]), key[1], key[0]) for key in sorted(members)]
    return groups if num_queries > FEW_QUERIES else merge_groups(groups)


_kept_groups = cached()(span_groups)


def merge_groups(groups: list[SpanGroup]) -> list[SpanGroup]:
    """Return fewer groups, in each of which no head reads more than twice what it needs, or than `CHEAP_KEYS`.

    >>> merge_groups([SpanGroup((0,), 1, 64), SpanGroup((2,), 33, 96), SpanGroup((1,), 481, 544)])
    [SpanGroup(heads=(0, 2), num_inner=1, num_keys=96), SpanGroup(heads=(1,), num_inner=481, num_keys=544)]
    >>> chain = merge_groups([SpanGroup((head,), 1, 256 * 2**head) for head in range(5)])
    >>> [(group.heads, group.num_keys) for group in chain]
    [((0, 1), 512), ((2, 3), 2048), ((4,), 4096)]
    """
    merged: list[SpanGroup] = []
    least = 0
    for group in groups:
        if not merged or group.num_keys > max(2 * least, CHEAP_KEYS):
            # what the head with the fewest keys in the next group needs
            least = group.num_keys
        else:
            last = merged.pop()
            group = together((last, group))
        merged.append(group)
    return merged


def together(groups: Sequence[SpanGroup]) -> SpanGroup:
    """Return all heads in one group."""
    heads = tuple(sorted(head for group in groups for head in group.heads))
    return SpanGroup(heads, min(group.num_inner for group in groups), max(group.num_keys for group in groups))


def groups_of(
    spans: Tensor | None,
    bounds: SpanBounds | None,
    window: SpanWindow,
    query: Tensor,
    tokens: TokenMask = NO_MASK,
    shards: SequenceShards | None = None,
) -> list[SpanGroup]:
    """Return the groups of a call; without bounds, as while compiling, one group of all heads and all keys."""
    heads = tuple(range(query.shape[1]))
    if spans is None:
        return [SpanGroup(heads, window.limit, window.limit)]
    if bounds is None:
        return [SpanGroup(heads, 1, window.limit)]
    is_compiling = torch.compiler.is_compiling()
    num_queries = FEW_QUERIES + 1 if is_compiling else query.shape[2]
    if shards is not None and tokens.shape is not None:
        # processes must make the same groups
        num_queries = tokens.shape[1]
    # a compiler cannot trace what counts the work of a cached function
    find = _kept_groups if bounds.are_lasting and not is_compiling else span_groups
    groups = find(bounds.lowest, bounds.highest, window, min(num_queries, FEW_QUERIES + 1))
    return [together(groups)] if shards is not None and shards.mode == HEADS else groups
