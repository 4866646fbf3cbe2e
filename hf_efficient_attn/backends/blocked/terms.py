"""The learned terms of one run: looked up by label, and their gradients added up by label."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast
from weakref import ref

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked.call_slices import CallSlice, in_order, put_back, query_blocks
from hf_efficient_attn.backends.kernels import wide
from hf_efficient_attn.layout.block_layout import Run
from hf_efficient_attn.layout.cache import MEBIBYTE, BoundedCache
from hf_efficient_attn.layout.score_terms import Label, Term, look_up

# of the cached labels of all runs together
CACHE_BYTES = 256 * MEBIBYTE
_labels: BoundedCache[Tensor] = BoundedCache(CACHE_BYTES)


@dataclass(frozen=True)
class TermLookup:
    """The part of one term that a run uses.

    Attributes:
        term: values [batch or 1, heads or 1, queries or 1, values of a query].
        labels: the labels of the run's pairs, [blocks or 1, queries, keys].
    """

    term: Term
    call_slice: CallSlice
    run: Run
    labels: Tensor

    @cached_property
    def scores(self) -> Tensor:
        """What the term adds to the scores of the run; broadcasts to [heads, blocks, queries, keys]."""
        return self.term.label.score(look_up(self.values, self.labels), self.labels)

    def add_gradient(self, gradient: Tensor, d_scores: Tensor) -> None:
        """Add the gradient of the run to `gradient`, which has the shape of the values, from that of its scores."""
        labels, values, target = self.labels, self.values, self.select(gradient)
        # first add up pairs that have the same value and the same label
        d_scores = d_scores.sum_to_size(torch.broadcast_shapes(values[..., :1].shape, labels.shape))
        if values.shape[-1] == 1:
            d_values = self.term.label.gradient(values, labels, d_scores).sum_to_size(values.shape)
        else:
            d_values = self.by_label(labels, d_scores, values.shape[-1])
        if self.is_per_query:
            rows = in_order(target, self.call_slice.partition.queries)
            query_blocks([rows], self.run)[0].add_(d_values)
            put_back(target, self.call_slice.partition.queries, rows)
        else:
            target[:, None].add_(d_values)

    def by_label(self, labels: Tensor, d_scores: Tensor, num_values: int) -> Tensor:
        """Return the gradients of scores, added up by label: [heads, blocks or 1, queries or 1, values]."""
        labels = labels.expand_as(d_scores)
        if not self.is_per_query:
            labels, d_scores = (each.flatten(1)[:, None, None] for each in (labels, d_scores))
        sums = d_scores.new_zeros(*d_scores.shape[:-1], num_values)
        return sums.scatter_add_(-1, labels, d_scores)

    @cached_property
    def values(self) -> Tensor:
        """The values of the run, [heads or 1, blocks or 1, queries or 1, values of a query]."""
        values = self.select(wide(self.term.values))
        if self.is_per_query:
            return query_blocks([in_order(values, self.call_slice.partition.queries)], self.run)[0]
        return values[:, None]

    @property
    def is_per_query(self) -> bool:
        """Whether every query has values of its own."""
        return self.term.values.shape[2] > 1

    def select(self, values: Tensor) -> Tensor:
        """Return the values of the slice, [heads or 1, queries or 1, values of a query], a view."""
        values = values[self.call_slice.example if values.shape[0] > 1 else 0]
        values = values[self.call_slice.heads] if values.shape[0] > 1 else values
        return values[:, self.call_slice.queries] if self.is_per_query else values


@dataclass
class SharedRows:
    """The scores of a term by distance, which the chunks of a run of one block share, moved from chunk to chunk.

    Attributes:
        lookup: the lookup for the last query of the first chunk, over the distances of all queries: a query's scores
            are those of the next query, moved by one key.
        num_queries: number of queries of the first chunk.
        moved: how many more keys the lookup has before those of the first chunk, for later chunks.
        sums: gradients of scores, added up over chunks, in the rows of `as_pairs`; None: there are none so far.
    """

    lookup: TermLookup
    num_queries: int
    moved: int
    sums: Tensor | None = None

    def scores(self, run: Run, chunk: Run) -> Tensor:
        """Return what the term adds to the scores of a chunk."""
        return self.of_chunk(self.rows, run, chunk)

    @cached_property
    def rows(self) -> Tensor:
        """The scores by distance, repeated for each query: [heads or 1, 1, queries, distances]."""
        scores = self.lookup.scores
        return scores.expand(*scores.shape[:2], self.num_queries, self.lookup.labels.shape[-1]).contiguous()

    def add_scores(self, d_scores: Tensor, run: Run, chunk: Run) -> None:
        """Add the gradient of the scores of a chunk."""
        if self.sums is None:
            self.sums = torch.zeros_like(self.rows)
        self.of_chunk(self.sums, run, chunk).add_(d_scores.sum_to_size(len(self.sums), *d_scores.shape[1:]))

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the gradient of the term to `gradient`, which has the shape of the values."""
        if self.sums is not None:
            self.lookup.add_gradient(gradient, self.sums.sum(-2, keepdim=True))

    def of_chunk(self, rows: Tensor, run: Run, chunk: Run) -> Tensor:
        """Return the part [heads or 1, 1, queries, keys] of `as_pairs` for a chunk, a view."""
        first = self.moved - (chunk.first_query - run.first_query)
        return self.as_pairs(rows)[:, :, : chunk.block_tokens, first : first + chunk.key_tokens]

    def as_pairs(self, rows: Tensor) -> Tensor:
        """Return rows by distance as rows by key: a view with rows one entry shorter, so each starts one earlier."""
        num_queries, num_distances = rows.shape[2:]
        read = rows.flatten(2)[..., : num_queries * (num_distances - 1)]
        return read.unflatten(-1, (num_queries, num_distances - 1))[..., num_queries - 1 :]


class TermLookups:
    """The terms of a call, run by run; what runs have in common is computed once."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        self.labels: dict[object, Tensor] = {}
        self.shared: dict[object, TermLookup] = {}
        # for each term, the shared rows of the last run that had any
        self.rows: dict[int, tuple[object, SharedRows]] = {}

    def scores(self, call_slice: CallSlice, run: Run, chunk: Run) -> list[Tensor]:
        """Return what each term adds to the scores of a chunk of a run."""
        return [
            self.shared_rows(number, call_slice, run, chunk).scores(run, chunk)
            if is_of_rows(term, call_slice, run)
            else self.lookup(number, call_slice, chunk).scores
            for number, term in enumerate(self.terms)
        ]

    def add_gradients(self, d_scores: Tensor, call_slice: CallSlice, run: Run, chunk: Run) -> None:
        """Add the gradients of the values of all terms, given that of the scores of a chunk."""
        for number, term in enumerate(self.terms):
            if is_of_rows(term, call_slice, run):
                self.shared_rows(number, call_slice, run, chunk).add_scores(d_scores, run, chunk)
            else:
                self.lookup(number, call_slice, chunk).add_gradient(self.gradients[number], d_scores)

    def finish(self) -> list[Tensor]:
        """Return the gradients of the values of all terms, in float32 or float64."""
        for number in list(self.rows):
            self.drop_rows(number)
        return self.gradients

    @cached_property
    def gradients(self) -> list[Tensor]:
        """The gradients so far, without those of the shared rows that are kept."""
        return [torch.zeros_like(wide(term.values)) for term in self.terms]

    def shared_rows(self, number: int, call_slice: CallSlice, run: Run, chunk: Run) -> SharedRows:
        """Return the rows that a chunk shares with others; rows of an earlier run are dropped."""
        term = self.terms[number]
        example = call_slice.example if len(term.values) > 1 else 0
        key = (example, call_slice.heads, first_distance(call_slice, run), run.block_tokens, run.key_tokens)
        kept = self.rows.get(number)
        if kept is None or kept[0] != key:
            self.drop_rows(number)
            num_queries = chunk.block_tokens
            moved = 0 if num_queries == run.block_tokens else run.block_tokens
            last = replace(
                chunk,
                first_query=chunk.first_query + num_queries - 1,
                block_tokens=1,
                first_key=run.first_key - moved,
                key_tokens=moved + run.key_tokens + num_queries,
            )
            labels = labels_of(term.label, call_slice, last, term.values.device)
            kept = self.rows[number] = (key, SharedRows(TermLookup(term, call_slice, last, labels), num_queries, moved))
        return kept[1]

    def drop_rows(self, number: int) -> None:
        """Forget the rows of a term, and add their gradient to that of the term."""
        _, rows = self.rows.pop(number, (None, None))
        if rows is not None:
            rows.add_gradient(self.gradients[number])

    def lookup(self, number: int, call_slice: CallSlice, run: Run) -> TermLookup:
        """Return the part of one term that a run uses; it may be shared with an earlier run."""
        term = self.terms[number]
        device = term.values.device
        are_alike = has_equal_steps(call_slice, run) and run.key_step == run.block_tokens
        if not (are_alike and term.label.is_invariant):
            return TermLookup(term, call_slice, run, kept_labels(term.label, call_slice, run, device))
        # all blocks have the same labels, which depend on nothing else
        place = (number, *first_distance(call_slice, run), run.block_tokens, run.key_tokens)
        if place not in self.labels:
            self.labels[place] = labels_of(term.label, call_slice, replace(run, num_blocks=1), device)
        lookup = TermLookup(term, call_slice, run, self.labels[place])
        if lookup.is_per_query or len(term.values) > 1:
            return lookup
        return self.shared.setdefault((call_slice.heads.start, place), lookup)


def is_of_rows(term: Term, call_slice: CallSlice, run: Run) -> bool:
    """Return whether the chunks of a run share the rows of a term: values per distance and head, a run of one block."""
    is_by_distance = term.label.is_invariant and term.values.shape[2] == 1
    return is_by_distance and run.num_blocks == 1 and has_equal_steps(call_slice, run)


def kept_labels(label: Label, call_slice: CallSlice, run: Run, device: torch.device) -> Tensor:
    """Return `labels_of`, computed once: labels may take many operations, and are the same at every call."""
    where = (run.first_query, run.num_blocks, run.block_tokens, run.first_key, run.key_tokens, run.key_step)
    # two runs of a partition may differ only in the keys that they gather
    gathered = None if run.gathered is None else run.gathered.data_ptr()
    # weak, because the cache counts the memory of its keys: every run would count the masks of its partition
    key = (label, ref(call_slice.partition), call_slice.query_offset, where, gathered, device)
    return _labels.get(key, lambda: labels_of(label, call_slice, run, device))


def labels_of(label: Label, call_slice: CallSlice, run: Run, device: torch.device) -> Tensor:
    """Return the labels of a run's pairs, [blocks, queries, keys]."""
    blocks = torch.arange(run.num_blocks, device=device)[:, None]
    queries = run.first_query + blocks * run.block_tokens + torch.arange(run.block_tokens, device=device)
    if run.gathered is None:
        keys = run.first_key + blocks * run.key_step + torch.arange(run.key_tokens, device=device)
    else:
        keys = run.gathered[..., None] * run.gather_block + torch.arange(run.gather_block, device=device)
        keys = keys.flatten(1)
    query_positions = position_at(call_slice.partition.queries, queries) + call_slice.query_offset
    key_positions = position_at(call_slice.partition.keys, keys)
    return label.of(query_positions[:, :, None], key_positions[:, None, :])


def first_distance(call_slice: CallSlice, run: Run) -> tuple[int, int]:
    """Return how far the first query of a run of equal steps lies after its first key, and the step between tokens."""
    queries, keys = cast(range, call_slice.partition.queries), cast(range, call_slice.partition.keys)
    query = queries.start + run.first_query * queries.step + call_slice.query_offset
    return query - keys.start - run.first_key * keys.step, queries.step


def has_equal_steps(call_slice: CallSlice, run: Run) -> bool:
    """Return whether neighbouring queries of a run are as far apart as its neighbouring keys."""
    queries, keys = call_slice.partition.queries, call_slice.partition.keys
    if not isinstance(queries, range) or not isinstance(keys, range):
        return False
    return queries.step == keys.step and run.gathered is None


def position_at(order: range | Tensor, places: Tensor) -> Tensor:
    """Return the positions at the given places of an order."""
    if isinstance(order, range):
        return places * order.step + order.start
    return order[places]
