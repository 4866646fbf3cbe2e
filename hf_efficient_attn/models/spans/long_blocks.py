"""Blocks of queries with longer spans than most of their head, computed apart: a few long ones then cost little.

Dynamic spans differ from token to token. A head computes as far as most of its blocks read, and those that read further
once more, together with the blocks of other heads and examples that read about as far. On CPUs alone: elsewhere the
host would wait for their numbers to be copied.
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
# how many keys, each read by a block, take as long as another call
CALL_KEYS = 1024
# by how much a key of these blocks costs more: it is copied, and its block was computed before
COPY_FACTOR = 1.5


@dataclass(frozen=True)
class Block:
    """A block of queries of one head.

    Attributes:
        row: its number, counted over examples, heads and blocks.
        shortest: the shortest span in it.
        num_keys: how many of the nearest keys it reads.
        num_existing: keys before its first query.
        call: (keys read, keys before its first query) of the call that computes it, if it is computed apart.
    """

    row: int
    shortest: float
    num_keys: int
    num_existing: int
    call: tuple[int, int]


@dataclass(frozen=True)
class LongBlocks:
    """Blocks that one call computes.

    Attributes:
        group: how far they read; each of them is an example with a single head.
        num_before: how many keys they are given before their first query.
        rows: their numbers.
    """

    group: SpanGroup
    num_before: int
    rows: tuple[int, ...]


def apart(spans: Tensor, window: SpanWindow, num_past: int) -> tuple[SpanBounds, list[LongBlocks]] | None:
    """Return the bounds of what is not computed apart, and what is; None if that would save nothing.

    Args:
        spans: [B, H, T] in tokens.
        num_past: keys before the first query.
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
    """Return the blocks of each head, of all examples."""
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
    """Return how many of the nearest keys are read in the call of a block, and how many it is given before its queries.

    Blocks that read further than another by less than twice share a call, and so do those at the start of texts.

    Args:
        num_keys: how many the block reads.
        num_existing: keys before its first query.
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
    """Return what the blocks of a head cost, in keys of a block, if all read `most` keys, and longer ones once more."""
    longer = [block.call[1] + BLOCK_TOKENS for block in blocks if block.num_keys > most]
    return sum(min(most, block.num_existing) for block in blocks) + COPY_FACTOR * sum(longer)


def inner_keys(blocks: Sequence[Block], num_keys: int) -> int:
    """Return how many of the nearest keys have weight 1 in all of these blocks, in chunks."""
    shortest = min(block.shortest for block in blocks)
    return min(int(shortest) // CHUNK_TOKENS * CHUNK_TOKENS + 1, num_keys)


def in_blocks(tensor: Tensor, behind: float = 0.0) -> Tensor:
    """Return a tensor [B, H, T, ...] as [B, H, blocks, BLOCK_TOKENS, ...], with this number behind the last token."""
    missing = -tensor.shape[2] % BLOCK_TOKENS
    sides = (0, 0) * (tensor.dim() - 3) + (0, missing)
    return (pad(tensor, sides, value=behind) if missing else tensor).unflatten(2, (-1, BLOCK_TOKENS))


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return these blocks of queries of a tensor [B, H, T, ...], each as an example: [rows, 1, BLOCK_TOKENS, ...]."""
    return in_blocks(tensor).flatten(0, 2).index_select(0, rows)[:, None]


def keys_before(states: Tensor, rows: Tensor, num_before: int, num_queries: int) -> Tensor:
    """Return the keys or values of these blocks, [rows, 1, num_before + BLOCK_TOKENS, D], of all [B, H, K, D]."""
    num_past = states.shape[2] - num_queries
    missing = -num_queries % BLOCK_TOKENS
    states = pad(states, (0, 0, 0, missing)) if missing else states
    num_keys, num_blocks = states.shape[2], (num_queries + missing) // BLOCK_TOKENS
    first = rows // num_blocks * num_keys + num_past + rows % num_blocks * BLOCK_TOKENS - num_before
    places = first[:, None] + torch.arange(num_before + BLOCK_TOKENS, device=states.device)
    found = states.flatten(0, 2).index_select(0, places.flatten())
    return found.view(len(rows), 1, -1, states.shape[3])


def put_rows(out: Tensor, found: Tensor, rows: Tensor) -> Tensor:
    """Return an output [B, T, H, D] in which blocks are replaced by those found, [rows, BLOCK_TOKENS, 1, D]."""
    blocks = in_blocks(out.transpose(1, 2))
    replaced = blocks.flatten(0, 2).index_copy(0, rows, found[:, :, 0].to(out.dtype)).view(blocks.shape)
    return replaced.flatten(2, 3)[:, :, : out.shape[1]].transpose(1, 2)


# A step of decoding within spans: a row of scores needs no pattern, and spans that stay have their masks kept.


@dataclass(frozen=True)
class HeadRange:
    """Neighbouring heads that are computed at once, so that their keys are views.

    Attributes:
        first, stop: the heads.
        num_inner, num_keys: as of a `SpanGroup`, for those of the heads whose output is taken.
    """

    first: int
    stop: int
    num_inner: int
    num_keys: int


@dataclass(frozen=True)
class StepPlan:
    """How the heads of a layer are computed.

    Attributes:
        ranges: what is computed.
        taken: (range, first, stop), in the order of the heads: whose outputs are those of which range.
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
    """Return the output [B, 1, H, D] of a single query, the last position.

    The arguments are those of `attend_spans`, and the groups of its heads.
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
    """Return log m_z of the nearest keys, [..., num_keys], the nearest one last."""
    # before the ramp the mask changes nothing
    num_free = min(max(0, num_inner - 1), num_keys)
    return pad(log_soft_mask(spans, num_free, num_keys - num_free, window.ramp), (num_free, 0)).flip(-1)


@cached()
def kept_mask(
    spans: tuple[float, ...], window: SpanWindow, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return `nearest_mask` of spans that are numbers, [1, H, 1, num_keys]."""
    return nearest_mask(torch.tensor(spans, dtype=dtype, device=device)[None, :, None], window, 0, num_keys)


@cached()
def step_plan(groups: tuple[SpanGroup, ...]) -> StepPlan:
    """Return how few calls compute the heads of these groups, without copies of their keys.

    A few keys are read by all heads between those that need them, whose own outputs come from other ranges.

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
