"""Attention as a dense formula of its own, in any dtype: what `tests/fuzz_engine.py` holds the engine against.

Every pattern is read here once more, from its documentation; nothing of the engine is called but the random draws, and
the line of the span tree.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from fuzz_grids import read_grid
from torch import Tensor

from hf_efficient_attn.layout.score_terms import Distance, Label, SoftSpan
from hf_efficient_attn.patterns import Pattern


@dataclass(frozen=True)
class Head:
    """Which head of which layer reads: random patterns and `PerHead` depend on it."""

    layer: int
    head: int
    num_heads: int


def readable(pattern: Pattern, num_tokens: int, head: Head) -> Tensor:
    """Return which query may read which key of a sequence, bool [num_tokens, num_tokens]."""
    return READ[pattern.kind](pattern, num_tokens, head)


def grid(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, a column, and of keys, a row."""
    return torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]


def read_distances(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """Full, causal, band, dilated, strided: every step-th key, `left` before and `right` after the query at most."""
    left, right = (num_tokens if limit is None else limit for limit in (pattern.left, pattern.right))
    ahead = -torch.sub(*grid(num_tokens))
    return (ahead.remainder(pattern.step) == 0) & (ahead >= -left) & (ahead <= right)


def read_global_tokens(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """Tokens that read all, are read by all, or both; negative positions count from the end."""
    reads = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for position in pattern.positions:
        if -num_tokens <= position < num_tokens:
            reads[position, :] |= pattern.attends_to_all
            reads[:, position] |= pattern.attended_by_all
    return reads


def read_key_table(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """Query q reads the keys of row q."""
    reads = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for row, keys in enumerate(pattern.rows[:num_tokens]):
        reads[row, [each for each in keys if each < num_tokens]] = True
    return reads


def read_blocks(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """All keys of the blocks that the query's own block reads."""
    query, key = (positions // pattern.block_tokens for positions in grid(num_tokens))
    return readable(pattern.pattern, math.ceil(num_tokens / pattern.block_tokens), head)[query, key]


def read_block_local(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """The keys of the query's own block."""
    query, key = (positions // pattern.block_tokens for positions in grid(num_tokens))
    return query == key


def read_compressed_keys(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """Keys of blocks that begin every `step` tokens, from the last token of their block on."""
    query, key = grid(num_tokens)
    return query >= key * pattern.step + (pattern.block_tokens - 1)


def read_gathered_keys(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """The columns of the intervals, one after the other; keys beyond them are not read."""
    num_tokens_before = max(num_tokens, pattern.intervals[-1][1])
    whole = readable(pattern.pattern, num_tokens_before, head)[:num_tokens]
    columns = torch.cat([whole[:, start:stop] for start, stop in pattern.intervals], 1)
    return torch.nn.functional.pad(columns, (0, max(0, num_tokens - columns.shape[1])))[:, :num_tokens]


def read_union(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """What any of the patterns reads."""
    return torch.stack([readable(part, num_tokens, head) for part in pattern.patterns]).any(0)


def read_intersection(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """What all of the patterns read."""
    return torch.stack([readable(part, num_tokens, head) for part in pattern.patterns]).all(0)


def read_complement(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """What the pattern does not read."""
    return ~readable(pattern.pattern, num_tokens, head)


def read_per_head(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """The heads share the patterns in equal runs."""
    return readable(pattern.patterns[head.head * len(pattern.patterns) // head.num_heads], num_tokens, head)


def read_drawn(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """Blocks as they are drawn for this layer, head and length."""
    return readable(pattern.resolve(num_tokens, head.layer, head.head, head.num_heads), num_tokens, head)


def read_tree(pattern: Any, num_tokens: int, head: Head) -> Tensor:
    """The span tree's own line, which tests/patterns holds against the paper."""
    return torch.as_tensor(pattern.resolve(num_tokens).allowed(*grid(num_tokens)))


READ: dict[str, Callable[[Any, int, Head], Tensor]] = {
    **dict.fromkeys(("full", "causal", "band", "dilated", "strided"), read_distances),
    "global_tokens": read_global_tokens,
    "key_table": read_key_table,
    "blocks": read_blocks,
    "block_local": read_block_local,
    "compressed_keys": read_compressed_keys,
    "gathered_keys": read_gathered_keys,
    "union": read_union,
    "intersection": read_intersection,
    "complement": read_complement,
    "per_head": read_per_head,
    **dict.fromkeys(("grid", "sized_grid"), lambda *about: read_grid(*about, readable)),
    **dict.fromkeys(("random_blocks", "bigbird_blocks"), read_drawn),
    **dict.fromkeys(("span_tree", "sized_span_tree", "interleaved_span_tree"), read_tree),
}


@dataclass
class Masks:
    """As the engine takes them, [batch, keys] each."""

    key_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    global_mask: Tensor | None = None

    def documents(self, example: int, num_keys: int) -> list[list[int]]:
        """Return the positions from the first to the last token of each document of an example."""
        found: list[list[int]] = []
        for position in range(num_keys):
            ids = None if self.segment_ids is None else self.segment_ids[example].tolist()
            is_new = position == 0 or (ids is not None and ids[position] != ids[position - 1])
            found += [[position]] if is_new else []
            found[-1] += [] if is_new else [position]
        if self.key_mask is not None:
            kept = [[each for each in document if self.key_mask[example, each]] for document in found]
            found = [list(range(document[0], document[-1] + 1)) for document in kept if document]
        return found


def pairs_and_distances(
    pattern: Pattern, masks: Masks, batch_size: int, num_keys: int, heads: Sequence[Head]
) -> tuple[Tensor, Tensor]:
    """Return the allowed pairs [batch, heads, keys, keys], and query − key where both are of one document."""
    allowed = torch.zeros(batch_size, len(heads), num_keys, num_keys, dtype=torch.bool)
    known: dict[tuple[int, Head], Tensor] = {}
    for example in range(batch_size):
        for document in masks.documents(example, num_keys):
            place = slice(document[0], document[-1] + 1)
            size = len(document)
            chosen = torch.zeros(size, dtype=torch.bool)
            if masks.global_mask is not None:
                chosen = masks.global_mask[example, place]
            more = chosen[:, None] | chosen[None]
            more &= torch.ones(size, size, dtype=torch.bool).tril() if pattern.is_causal else more
            for number, head in enumerate(heads):
                if (size, head) not in known:
                    known[size, head] = readable(pattern, size, head)
                allowed[example, number, place, place] = known[size, head] | more
        if masks.key_mask is not None:
            allowed[example] &= masks.key_mask[example][None, :, None] & masks.key_mask[example][None, None, :]
    index = torch.arange(num_keys)
    return allowed, index[:, None] - index[None]


def cross_pairs_and_distances(
    pattern: Pattern, masks: tuple[Masks, Masks], extent: tuple[int, int, int], heads: Sequence[Head]
) -> tuple[Tensor, Tensor]:
    """Return the same of queries of another sequence than the keys', [batch, heads, positions, keys].

    masks: of the queries and of the keys; extent: batch size, positions of the queries, keys.
    """
    batch_size, *lengths = extent
    allowed = torch.zeros(batch_size, len(heads), *lengths, dtype=torch.bool)
    for example in range(batch_size):
        of_queries, of_keys = (mask.documents(example, size) for mask, size in zip(masks, lengths, strict=True))
        for queries, keys in product(of_queries, of_keys):
            ids = [
                None if mask.segment_ids is None else int(mask.segment_ids[example, document[0]])
                for mask, document in zip(masks, (queries, keys), strict=True)
            ]
            if ids[0] != ids[1]:
                continue
            for number, head in enumerate(heads):
                reads = readable(pattern, max(len(queries), len(keys)), head)[: len(queries), : len(keys)]
                allowed[example, number, queries[0] : queries[-1] + 1, keys[0] : keys[-1] + 1] = reads
    for mask, shape in zip(masks, ((batch_size, 1, -1, 1), (batch_size, 1, 1, -1)), strict=True):
        allowed &= True if mask.key_mask is None else mask.key_mask.view(shape)
    return allowed, torch.arange(lengths[0])[:, None] - torch.arange(lengths[1])[None]


def bias_of(values: Tensor, label: Label, distances: Tensor) -> Tensor:
    """Return what a term adds to the scores of pairs with these distances [queries, keys]."""
    if isinstance(label, Distance):
        index = distances.clamp(label.first, label.last) - label.first
        spread = values.expand(*values.shape[:2], len(distances), -1)
        return spread.gather(-1, index.expand(*values.shape[:2], -1, -1))
    assert isinstance(label, SoftSpan)
    inside = (label.ramp + values - (distances.abs() - label.shift)) / label.ramp
    # the logarithm of 0 has no gradient
    return inside.masked_fill(inside <= 0, 1.0).clamp(max=1).log().masked_fill(inside <= 0, -torch.inf)


@dataclass
class Scores:
    """What becomes of the products of queries and keys, in this order.

    Attributes:
        scale: their factor.
        softcap: bound of their absolute values, by a hyperbolic tangent.
        bias: added to them, broadcasts to [batch, heads, queries, keys].
        sinks: logits beside them that have no value, broadcast to [batch, heads, queries].
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass
class Answer:
    """What the formula gives.

    Attributes:
        weights: [batch, heads, queries, keys].
        sink_weights: [batch, heads, queries].
        largest: the largest score of an allowed pair or logit of a sink, by absolute value.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor
    sink_weights: Tensor
    largest: float


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, part: Scores) -> Answer:
    """Return attention of q, k and v, in their dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * part.scale
    if part.softcap is not None:
        scores = part.softcap * (scores / part.softcap).tanh()
    if part.bias is not None:
        allowed = allowed & (part.bias > -torch.inf)
        scores = scores + part.bias.masked_fill(~allowed, 0.0)
    has_keys = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, 0.0)
    no_sink = scores.new_full((1, 1, 1), -torch.inf)
    sinks = (no_sink if part.sinks is None else part.sinks).expand(scores.shape[:3])[..., None]
    # a row without keys takes the softmax of zeros, and is cut afterwards
    closed = torch.cat([scores.masked_fill(~allowed & has_keys, -torch.inf), sinks], -1)
    weights = torch.softmax(closed, -1)
    kept = weights[..., :-1].masked_fill(~allowed, 0.0)
    lse = closed.logsumexp(-1).where(has_keys[..., 0], sinks[..., 0])
    largest = max(scores.detach().abs().amax(), sinks.detach().nan_to_num(neginf=0.0).abs().amax())
    return Answer(kept @ v, lse, kept, weights[..., -1], float(largest))


def magnitudes(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, answer: Answer, scale: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums of absolute values behind the output and the gradients of q, k and v, and behind the scores'.

    Rounding shows relative to these, also where the sums themselves cancel.
    """
    group = q.shape[1] // k.shape[1]
    weights, grad = answer.weights.detach(), grad.abs()
    keys, values = (each.detach().abs().repeat_interleave(group, 1) for each in (k, v))
    d_scores = weights * (grad @ values.transpose(-1, -2) + (grad * (weights @ values)).sum(-1, keepdim=True))
    of_keys = d_scores.transpose(-1, -2) @ q.detach().abs() * abs(scale)
    of_values = weights.transpose(-1, -2) @ grad
    return {
        "out": weights @ values,
        "q": d_scores @ keys * abs(scale),
        "k": of_keys.unflatten(1, (-1, group)).sum(2),
        "v": of_values.unflatten(1, (-1, group)).sum(2),
        "sinks": (answer.sink_weights.detach() * (grad * (weights @ values)).sum(-1)).sum((0, 2)),
    }, d_scores
