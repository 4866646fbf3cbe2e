"""Attention of a shard's queries over its own keys and those that it gets from other processes: its halo."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_efficient_attn.attention.call import build_call, compute
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.key_plan import Text, document_patterns, shifted
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import NO_MASK, Document
from hf_efficient_attn.patterns.gathered_keys import GatheredKeys
from hf_efficient_attn.patterns.intervals import Intervals, intersect
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.per_head import PerHead


@dataclass(frozen=True)
class Scores:
    """How scores are made, besides their pattern: the arguments of `build_call` of the same names, and the backend."""

    scale: float
    terms: tuple[Term, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0
    backend: str = "auto"


@dataclass(frozen=True)
class HeldKeys:
    """The keys and values at hand, [B, Hkv, K, ·], and the intervals of positions that they have, in this order."""

    key: Tensor
    value: Tensor
    positions: Intervals

    def at(self, wanted: Intervals) -> "HeldKeys":
        """Return those of some positions, all of which are at hand."""
        slices, place = [], 0
        for start, stop in self.positions:
            for first, last in intersect(wanted, ((start, stop),)):
                slices.append((first - start + place, last - start + place))
            place += stop - start
        key, value = (cut_tokens(each, slices) for each in (self.key, self.value))
        return HeldKeys(key, value, intersect(wanted, self.positions))


def cut_tokens(states: Tensor, slices: Sequence[tuple[int, int]]) -> Tensor:
    """Return neighbouring slices of tokens of [B, H, N, ·]; a view if there is only one."""
    if len(slices) == 1:
        return states[:, :, slice(*slices[0])]
    return torch.cat([states[:, :, :0], *(states[:, :, start:stop] for start, stop in slices)], 2)


@dataclass(frozen=True)
class PlacedPattern:
    """A pattern over keys at hand: which the queries count from `query_offset` on."""

    pattern: Pattern
    query_offset: int
    is_cross: bool = False


def attend_text(query: Tensor, held: HeldKeys, first: int, layout: Layout, text: Text, scores: Scores) -> Tensor:
    """Return the output [B, H, n, Dv] of queries that are neighbours in a text, over the keys at hand.

    Args:
        query: [B, H, n, D], of examples that are the same text; their positions begin at `first`.
        layout: of the whole text.
    """
    num_queries = query.shape[2]
    empty = query.new_zeros(*query.shape[:2], 1, held.value.shape[3])
    pieces, done = [], 0
    for document in text.documents:
        start, stop = max(document.start, first) - first, min(document.stop, first + num_queries) - first
        if start >= stop:
            continue
        pieces.append(empty.expand(-1, -1, start - done, -1))
        rows = slice(start, stop)
        pieces.append(attend_document(query[:, :, rows], held, first, rows, layout, text, document, scores))
        done = stop
    pieces.append(empty.expand(-1, -1, num_queries - done, -1))
    out = pieces[1] if len(pieces) == 3 and pieces[1].shape[2] == num_queries else torch.cat(pieces, 2)
    gaps = masked_gaps(text, first, num_queries)
    return out if not gaps else out.masked_fill(positions_mask(gaps, num_queries, out.device)[:, None], 0.0)


def masked_gaps(text: Text, first: int, num_queries: int) -> Intervals:
    """Return the intervals of queries that are masked, counted from the first one."""
    edges = [(first, first), *intersect(text.tokens, ((first, first + num_queries),))]
    edges.append((first + num_queries, first + num_queries))
    gaps = ((before - first, after - first) for (_, before), (after, _) in zip(edges, edges[1:], strict=False))
    return tuple((start, stop) for start, stop in gaps if start < stop)


def positions_mask(intervals: Intervals, num_tokens: int, device: torch.device) -> Tensor:
    """Return a mask [num_tokens] that is True within the intervals."""
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    for start, stop in intervals:
        mask[start:stop] = True
    return mask.to(device)


def attend_document(
    query: Tensor,
    held: HeldKeys,
    first: int,
    rows: slice,
    layout: Layout,
    text: Text,
    document: Document,
    scores: Scores,
) -> Tensor:
    """Return the output of queries of one document; `rows`: their places among those of the shard."""
    patterns = document_patterns(layout, document)
    pattern = patterns[0] if all(one == patterns[0] for one in patterns) else PerHead(patterns)
    keys = held.at(intersect(held.positions, intersect(text.tokens, ((document.start, document.stop),))))
    start = first + rows.start - document.start
    placed = place_pattern(pattern, shifted(keys.positions, -document.start), start, query.shape[2])
    terms = terms_at(scores.terms, placed, rows)
    followed = LayerPattern(placed.pattern, is_own=False, is_cross=placed.is_cross)
    call = build_call(
        query,
        keys.key,
        keys.value,
        followed,
        placed.query_offset,
        NO_MASK,
        terms,
        scores.sinks,
        scores.softcap,
        scores.scale,
        scores.dropout,
    )
    return compute(query, keys.key, keys.value, call, scores.backend)[0]


def place_pattern(pattern: Pattern, keys: Intervals, first: int, num_queries: int) -> PlacedPattern:
    """Return the pattern of queries from position `first` on over the keys of some intervals, one after the other.

    Where the keys are one interval, and the pattern looks the same from its start, it is the pattern itself, for which
    every backend is fastest; likewise where a causal pattern reads the first keys and the nearest ones.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> place_pattern(Band(2, 0), ((6, 12),), 8, 4)
    PlacedPattern(pattern=Band(left=2, right=0), query_offset=2, is_cross=False)
    """
    stop = first + num_queries
    if len(keys) == 1 and keys[0][0] <= first and stop <= keys[0][1]:
        start, period = keys[0][0], pattern.period
        if start == 0 or (period is not None and start % period == 0):
            return PlacedPattern(pattern, first - start)
    reach = pattern.decoding_reach() if pattern.is_causal else None
    if reach is not None and reach.left is not None and len(keys) == 2 and keys[1][1] >= stop:
        (begin, num_first), (start, _) = keys
        if begin == 0 and num_first >= reach.num_first and start <= first - reach.left:
            return PlacedPattern(pattern, first - start + num_first)
    # a process may hold no key of a document whose only tokens there are masked
    return PlacedPattern(GatheredKeys(pattern, keys or ((0, 1),)), first, is_cross=True)


def terms_at(terms: Sequence[Term], placed: PlacedPattern, rows: slice) -> tuple[Term, ...]:
    """Return the terms of some queries.

    Raises:
        UnsupportedBackendError: the label of a term depends on more than the distance of query and key, or these are
            not as far from each other as in the text.
    """
    if terms and (placed.is_cross or not all(term.label.is_invariant for term in terms)):
        raise UnsupportedBackendError(
            "Learned parts of the scores (relative positions, spans) are known by the distance of query and key, and "
            "in a text over several processes only patterns that read neighbours keep it. Use a band, or one process."
        )
    return tuple(term if term.values.shape[2] == 1 else replace(term, values=term.values[:, :, rows]) for term in terms)
