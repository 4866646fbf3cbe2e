"""Blocks of queries with longer spans than most blocks of their head, computed separately, so a few cost little.

Dynamic spans differ from token to token. A head computes as many keys as most of its blocks need. Blocks that need more
are computed again, together with blocks of other heads and examples that need about as many. This is done on CPUs only,
because on other devices the host would have to wait for a copy of the spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.attention.layer import dense_attention
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.models.spans.config import CHEAP_KEYS, CHUNK_TOKENS, SpanGroup, SpanWindow
from hf_efficient_attn.models.spans.module import SpanBounds, log_soft_mask

BLOCK_TOKENS = 64
# attention of one block to this many keys takes as long as another call
CALL_KEYS = 1024
# relative cost of a key in a separate call, because keys are copied, and the block has been computed before
COPY_FACTOR = 1.5


@dataclass(frozen=True)
class Block:
    """A block of queries of one head.

    Attributes:
        row: index of the block over examples, heads and blocks.
        shortest: the shortest span of its queries.
        num_keys: how many of the nearest keys a query needs, at most.
        num_existing: number of keys before its first query.
        call: (number of nearest keys, number of keys before the first query) of the separate call for this block.
    """

    row: int
    shortest: float
    num_keys: int
    num_existing: int
    call: tuple[int, int]


@dataclass(frozen=True)
class LongBlocks:
    """Blocks that are computed in one separate call, each as an example with a single head.

    Attributes:
        group: the keys of the call.
        num_before: number of keys that are passed before the first query of each block.
        rows: indices of the blocks (`Block.row`).
    """

    group: SpanGroup
    num_before: int
    rows: tuple[int, ...]


def apart(spans: Tensor, window: SpanWindow, num_past: int) -> tuple[SpanBounds, list[LongBlocks]] | None:
    """Return the bounds for the common call, and the blocks for separate calls; None if these would save nothing.

    Args:
        spans: [B, H, T] in tokens.
        num_past: number of keys before the first query.
    """
    calls: dict[tuple[int, int], list[Block]] = {}
    lowest, highest, saved = [], [], 0.0
    for blocks in blocks_of_heads(spans, window, num_past):
        costs = {most: cost(blocks, most) for most in {block.num_keys for block in blocks}}
        most = min(costs, key=lambda most: (costs[most], -most))
        saved += costs[max(costs)] - costs[most]
        lowest.append(min(block.shortest for block in blocks))
        highest.append(float(most if most == window.limit else max(0, most - window.ramp)))
        for block in blocks:
            if block.num_keys > most:
                calls.setdefault(block.call, []).append(block)
    if not calls or saved < CALL_KEYS * len(calls):
        return None
    return SpanBounds(tuple(lowest), tuple(highest)), [
        LongBlocks(
            SpanGroup((0,), inner_keys(blocks, num_keys), num_keys), num_before, tuple(block.row for block in blocks)
        )
        for (num_keys, num_before), blocks in sorted(calls.items())
    ]


def blocks_of_heads(spans: Tensor, window: SpanWindow, num_past: int) -> list[list[Block]]:
    """Return the blocks of each head, over all examples."""
    spans = spans.detach()
    blocks = in_blocks(spans)
    batch_size, num_heads, num_blocks, _ = blocks.shape
    shortest = in_blocks(spans, inf).amin(-1).flatten().tolist()
    ends = ((blocks.amax(-1).ceil() + window.ramp) / CHUNK_TOKENS).ceil() * CHUNK_TOKENS
    num_keys = ends.clamp(max=window.limit).int().flatten().tolist()
    heads: list[list[Block]] = [[] for _ in range(num_heads)]
    for row in range(batch_size * num_heads * num_blocks):
        num_existing = num_past + row % num_blocks * BLOCK_TOKENS
        call = call_of(num_keys[row], num_existing, window)
        heads[row // num_blocks % num_heads].append(Block(row, shortest[row], num_keys[row], num_existing, call))
    return heads


def call_of(num_keys: int, num_existing: int, window: SpanWindow) -> tuple[int, int]:
    """Return the number of nearest keys in a block's separate call, and the number of keys before its first query.

    The number of nearest keys is rounded up to a power of two times `CHUNK_TOKENS`, so that similar blocks share a
    call. At the start of a text, there are fewer keys.

    Args:
        num_keys: number of nearest keys that the block needs.
        num_existing: number of keys before its first query.
    """
    size = 2 * CHUNK_TOKENS
    while size < num_keys:
        size *= 2
    size = min(size, window.limit)
    reach = size - 1 + window.shift
    if num_existing >= reach:
        return size, reach
    return min(size, num_existing + BLOCK_TOKENS), num_existing


def cost(blocks: Sequence[Block], most: int) -> float:
    """Return the cost of a head's blocks, in keys of a block, if all compute `most` keys and longer ones once more."""
    longer = [block.call[1] + BLOCK_TOKENS for block in blocks if block.num_keys > most]
    return sum(min(most, block.num_existing) for block in blocks) + COPY_FACTOR * sum(longer)


def inner_keys(blocks: Sequence[Block], num_keys: int) -> int:
    """Return how many of the nearest keys have soft mask 1 in all of these blocks, rounded down to chunks."""
    shortest = min(block.shortest for block in blocks)
    return min(int(shortest) // CHUNK_TOKENS * CHUNK_TOKENS + 1, num_keys)


def in_blocks(tensor: Tensor, behind: float = 0.0) -> Tensor:
    """Return a tensor [B, H, T, ...] as [B, H, blocks, BLOCK_TOKENS, ...], padded with `behind` on the right."""
    missing = -tensor.shape[2] % BLOCK_TOKENS
    sides = (0, 0) * (tensor.dim() - 3) + (0, missing)
    return (pad(tensor, sides, value=behind) if missing else tensor).unflatten(2, (-1, BLOCK_TOKENS))


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return these blocks of a tensor [B, H, T, ...], each as an example: [rows, 1, BLOCK_TOKENS, ...]."""
    return in_blocks(tensor).flatten(0, 2).index_select(0, rows)[:, None]


def keys_before(states: Tensor, rows: Tensor, num_before: int, num_queries: int) -> Tensor:
    """Return the keys or values for these blocks, [B, H, K, D] → [rows, 1, num_before + BLOCK_TOKENS, D]."""
    num_past = states.shape[2] - num_queries
    missing = -num_queries % BLOCK_TOKENS
    states = pad(states, (0, 0, 0, missing)) if missing else states
    num_keys, num_blocks = states.shape[2], (num_queries + missing) // BLOCK_TOKENS
    first = rows // num_blocks * num_keys + num_past + rows % num_blocks * BLOCK_TOKENS - num_before
    places = first[:, None] + torch.arange(num_before + BLOCK_TOKENS, device=states.device)
    found = states.flatten(0, 2).index_select(0, places.flatten())
    return found.view(len(rows), 1, -1, states.shape[3])


def put_rows(out: Tensor, found: Tensor, rows: Tensor) -> Tensor:
    """Return an output [B, T, H, D] with these blocks replaced by `found`, [rows, BLOCK_TOKENS, 1, D]."""
    blocks = in_blocks(out.transpose(1, 2))
    replaced = blocks.flatten(0, 2).index_copy(0, rows, found[:, :, 0].to(out.dtype)).view(blocks.shape)
    return replaced.flatten(2, 3)[:, :, : out.shape[1]].transpose(1, 2)


# A decoding step with spans: a single query needs no pattern, and the masks of constant spans are cached.


@dataclass(frozen=True)
class HeadRange:
    """Consecutive heads that are computed together, so that their keys are views.

    Attributes:
        first, stop: the range of heads.
        num_inner, num_keys: as in `SpanGroup`, for the heads whose output is taken from this range.
    """

    first: int
    stop: int
    num_inner: int
    num_keys: int


@dataclass(frozen=True)
class StepPlan:
    """How the heads of a layer are computed.

    Attributes:
        ranges: the ranges of heads that are computed.
        taken: tuples (range, first, stop) in the order of the heads: the range whose output these heads take.
    """

    ranges: tuple[HeadRange, ...]
    taken: tuple[tuple[int, int, int], ...]


def attend_nearest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    bounds: SpanBounds | None,
    window: SpanWindow,
    groups: Sequence[SpanGroup],
    scale: float,
    dropout: float,
    position_table: Tensor | None,
) -> Tensor:
    """Return the output [B, 1, H, D] of a single query at the last position.

    The arguments are those of `attend_spans`, and the groups of heads.
    """
    plan = step_plan(tuple(groups))
    end = key.shape[2] - window.shift
    needs_gradient = spans is not None and torch.is_grad_enabled() and spans.requires_grad
    constant = None if bounds is None or not bounds.are_constant or needs_gradient else bounds.lowest
    outputs = []
    for each in plan.ranges:
        heads, num_keys = slice(each.first, each.stop), min(each.num_keys, end)
        own, bias = query[:, heads], None
        if spans is not None and each.num_inner < each.num_keys:
            if constant is None:
                bias = nearest_mask(spans[:, heads], window, each.num_inner, num_keys)
            else:
                bias = kept_mask(constant[heads], window, each.num_keys, spans.dtype, spans.device)[..., -num_keys:]
        if position_table is not None:
            scores = (own @ position_table[:num_keys].to(own.dtype).T * scale).flip(-1)
            bias = scores if bias is None else scores + bias
        read = (states[:, heads, end - num_keys : end] for states in (key, value))
        outputs.append(dense_attention(own, *read, None, bias, scale, dropout, False)[0])
    taken = [
        outputs[index][:, first - plan.ranges[index].first : stop - plan.ranges[index].first]
        for index, first, stop in plan.taken
    ]
    return (taken[0] if len(taken) == 1 else torch.cat(taken, 1)).transpose(1, 2)


def nearest_mask(spans: Tensor, window: SpanWindow, num_inner: int, num_keys: int) -> Tensor:
    """Return log m_z for the nearest keys, [..., num_keys], the nearest key last."""
    # before the ramp, log m_z is 0
    num_free = min(max(0, num_inner - 1), num_keys)
    return pad(log_soft_mask(spans, num_free, num_keys - num_free, window.ramp), (num_free, 0)).flip(-1)


@cached()
def kept_mask(
    spans: tuple[float, ...], window: SpanWindow, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return `nearest_mask` for constant spans, [1, H, 1, num_keys]."""
    return nearest_mask(torch.tensor(spans, dtype=dtype, device=device)[None, :, None], window, 0, num_keys)


@cached()
def step_plan(groups: tuple[SpanGroup, ...]) -> StepPlan:
    """Return a plan that computes the heads of these groups in few calls, without copying keys.

    If a group has up to `CHEAP_KEYS` keys, its range also computes the heads of other groups in between. Their outputs
    are taken from their own ranges.

    >>> step_plan((SpanGroup((0, 2, 3), 1, 64), SpanGroup((1,), 481, 544)))
    StepPlan(ranges=(HeadRange(first=0, stop=4, num_inner=1, num_keys=64), \
HeadRange(first=1, stop=2, num_inner=481, num_keys=544)), taken=((0, 0, 1), (1, 1, 2), (0, 2, 4)))
    """
    ranges: list[HeadRange] = []
    owners: dict[int, int] = {}
    for group in groups:
        last = None
        for head in group.heads:
            if last is None or (head > last + 1 and group.num_keys > CHEAP_KEYS):
                ranges.append(HeadRange(head, head + 1, group.num_inner, group.num_keys))
            else:
                ranges[-1] = HeadRange(ranges[-1].first, head + 1, group.num_inner, group.num_keys)
            owners[head], last = len(ranges) - 1, head
    taken: list[tuple[int, int, int]] = []
    for head in sorted(owners):
        if taken and taken[-1][0] == owners[head]:
            taken[-1] = (*taken[-1][:2], head + 1)
        else:
            taken.append((owners[head], head, head + 1))
    return StepPlan(tuple(ranges), tuple(taken))
