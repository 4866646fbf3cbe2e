"""Attention of a shard's queries over its own keys and over its halo, the keys that it gets from other processes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.dispatch import attend
from hf_efficient_attn.attention.sharded.collectives import Exchange, Tie, route_of
from hf_efficient_attn.attention.sharded.plan import (
    HeldKeys,
    ReindexedPattern,
    RowPart,
    cut_tokens,
    keys_at,
    reindex_pattern,
    row_parts,
    split_received,
)
from hf_efficient_attn.attention.sharded.shards import ShardedCall, TokenSequence, document_patterns, shifted, without
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.intervals import Intervals, intersect


def attend_halo(query: Tensor, key: Tensor, value: Tensor, call: ShardedCall) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens; rows of wide queries do not cover the whole sequence.

    Queries that attend only to the process's own keys and to global tokens are computed while other keys travel.
    """
    wanted, first = call.exchange.wanted[call.rank], call.exchange.first[call.rank]
    parts = {sequence: row_parts(call.layout, sequence, call.own, wanted, first) for sequence in call.sequences}
    journeys = depart_keys(key, value, call)
    received = [exchange.arrive(departed) for exchange, departed in journeys[:-1]]
    held = held_keys(key, value, received[0], first, call) if received else [HeldKeys(key, value, (call.own,))]
    found = {
        (sequence, part): attend_part(query, held, part, sequence, call)
        for sequence in call.sequences
        for part in parts[sequence]
        if part.is_inner
    }
    exchange, departed = journeys[-1]
    received.append(exchange.arrive(departed))
    rows = received[0] if len(received) == 1 else torch.cat(received)[order_of(wanted, first).to(key.device)]
    held = held_keys(key, value, rows, wanted, call)
    empty = query.new_zeros(1, query.shape[1], 1, value.shape[3])
    outputs = []
    for sequence in call.sequences:
        pieces = {
            part: found[sequence, part] if part.is_inner else attend_part(query, held, part, sequence, call)
            for part in parts[sequence]
        }
        outputs.append(joined(pieces, call.own, sequence, empty.expand(call.examples.count(sequence), -1, -1, -1)))
    # the others wait for the gradients of what this process received, even if it did not use it
    return Tie.apply(in_order(outputs, call), rows)  # type: ignore[no-any-return]


def depart_keys(key: Tensor, value: Tensor, call: ShardedCall) -> list[tuple[Exchange, Tensor]]:
    """Send the keys and values that other processes want, concatenated, [tokens, B, Hkv, D + Dv].

    Those of `first` are sent before the others. In the backward pass the gradients of the others travel first, while
    the gradients of queries in the middle are computed.
    """
    wanted, first = call.exchange.wanted, call.exchange.first
    others = tuple(without(*each) for each in zip(wanted, first, strict=True))
    journeys = []
    for positions in (first, others) if any(first) else (wanted,):
        route = route_of(call.rank, call.bounds, positions)
        exchange = Exchange(route.num_sent, route.num_received, call.shards.group)
        states = torch.cat([cut_tokens(each, route.slices) for each in (key, value)], -1)
        journeys.append((exchange, exchange.depart(states.permute(2, 0, 1, 3))))
    return journeys


def held_keys(key: Tensor, value: Tensor, rows: Tensor, positions: Intervals, call: ShardedCall) -> list[HeldKeys]:
    """Return the keys of a process and those that it received, in the order of positions."""
    before, after = split_received(rows, positions, call.own, key.shape[3])
    return [before, HeldKeys(key, value, (call.own,)), after]


def order_of(wanted: Intervals, first: Intervals) -> Tensor:
    """Return the place of each wanted position in the received rows: those that travelled first, then the others.

    >>> order_of(((0, 2), (5, 7)), ((1, 2),))
    tensor([1, 0, 2, 3])
    """
    sent = [position for interval in (*first, *without(wanted, first)) for position in range(*interval)]
    return torch.tensor(sent, dtype=torch.int64).argsort()


def joined(pieces: dict[RowPart, Tensor], own: tuple[int, int], sequence: TokenSequence, empty: Tensor) -> Tensor:
    """Return the output of all queries of a process; zero for queries that are in no part or masked."""
    rows, done = [], own[0]
    for part, out in pieces.items():
        rows += [empty.expand(-1, -1, part.first - done, -1), out]
        done = part.stop
    rows.append(empty.expand(-1, -1, own[1] - done, -1))
    rows = [each for each in rows if each.shape[2]]
    out = rows[0] if len(rows) == 1 else torch.cat(rows, 2)
    gaps = masked_gaps(sequence, *own)
    return out if not gaps else out.masked_fill(positions_mask(gaps, own[1] - own[0], out.device)[:, None], 0.0)


def in_order(outputs: Sequence[Tensor], call: ShardedCall) -> Tensor:
    """Return the outputs of the examples in the order of the batch; `outputs` has those of every sequence."""
    if len(outputs) == 1:
        return outputs[0]
    out = torch.cat(list(outputs))
    order = torch.cat([call.members(sequence, out.device) for sequence in call.sequences])
    return out[order.argsort()]


def masked_gaps(sequence: TokenSequence, first: int, stop: int) -> Intervals:
    """Return the intervals of queries that are masked, counted from the first one."""
    edges = [(first, first), *intersect(sequence.tokens, ((first, stop),)), (stop, stop)]
    gaps = ((before - first, after - first) for (_, before), (after, _) in zip(edges, edges[1:], strict=False))
    return tuple((start, stop) for start, stop in gaps if start < stop)


def positions_mask(intervals: Intervals, num_tokens: int, device: torch.device) -> Tensor:
    """Return a mask [num_tokens] that is True within the intervals."""
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    for start, stop in intervals:
        mask[start:stop] = True
    return mask.to(device)


def attend_part(
    query: Tensor, held: Sequence[HeldKeys], part: RowPart, sequence: TokenSequence, call: ShardedCall
) -> Tensor:
    """Return the output of some queries of one document, for the examples that are this sequence."""
    scores, start = call.scores, part.document.start
    chosen = slice(None) if len(call.sequences) == 1 else call.members(sequence, query.device)
    rows = slice(part.first - call.own[0], part.stop - call.own[0])
    keys = keys_at(held, part.keys)
    q, k, v = query[:, :, rows][chosen], keys.key[chosen], keys.value[chosen]
    patterns = document_patterns(call.layout, part.document)
    pattern = patterns[0] if all(one == patterns[0] for one in patterns) else PerHead(patterns)
    reindexed = reindex_pattern(pattern, shifted(keys.positions, -start), part.first - start, q.shape[2])
    terms = terms_at([of_examples(term, chosen) for term in scores.terms], reindexed, rows)
    layer_spec = LayerPattern(reindexed.pattern, is_own=False, is_cross=reindexed.is_cross)
    settings = (scores.sinks, scores.softcap, scores.scale, scores.dropout)
    return attend(q, k, v, layer_spec, reindexed.query_offset, NO_MASK, terms, *settings, backend=scores.backend)[0]


def terms_at(terms: Sequence[Term], reindexed: ReindexedPattern, rows: slice) -> tuple[Term, ...]:
    """Return the terms of some queries.

    Raises:
        UnsupportedBackendError: the label of a term depends on more than the distance of query and key, or distances
            are not those in the sequence.
    """
    if terms and not (reindexed.keeps_distances and all(term.label.is_invariant for term in terms)):
        raise UnsupportedBackendError(
            "Learned parts of the scores (relative positions, spans) depend on the distance between query and key. If "
            "processes share a sequence, only local patterns preserve it. Use a band, or one process."
        )
    return tuple(term if term.values.shape[2] == 1 else replace(term, values=term.values[:, :, rows]) for term in terms)


def of_examples(term: Term, chosen: slice | Tensor) -> Term:
    """Return a term for some examples."""
    return term if term.values.shape[0] == 1 else replace(term, values=term.values[chosen])
