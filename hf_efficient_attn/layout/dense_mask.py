"""All pairs of queries and keys: which are allowed, and what masks and terms add to their scores.

This takes memory for all pairs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from typing import cast

import torch
from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.layout.cache import MEBIBYTE, BoundedCache, cached
from hf_efficient_attn.layout.call import AttentionCall, cap
from hf_efficient_attn.layout.layout import HeadGroups, Layout, first_query, query_rows
from hf_efficient_attn.layout.onnx import is_written, written_groups
from hf_efficient_attn.layout.operator_args import read_layout, write_call_text
from hf_efficient_attn.layout.score_terms import Label, Term, look_up
from hf_efficient_attn.layout.selected_keys import ChosenKeys, of_heads
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, TokenLocations, axis_locations, token_locations
from hf_efficient_attn.layout.token_mask import NO_MASK, Document, TokenMask
from hf_efficient_attn.layout.transfer import tables_on
from hf_efficient_attn.patterns.algebra import allowed_by
from hf_efficient_attn.patterns.intervals import charge
from hf_efficient_attn.patterns.pattern import Pattern

# The key under which masks over all pairs are cached.


CACHE_BYTES = 512 * MEBIBYTE


def mask_key(layout: Layout, is_whole: bool = True) -> object:
    """Return everything that the mask of a layout depends on; layers with equal drawn patterns share it.

    is_whole: whether each row is one document; otherwise patterns may be drawn for the lengths of its documents.
    """
    if not is_whole and layout.is_drawn_by_document:
        return layout
    return layout.head_groups(), layout.num_heads, layout.num_queries, layout.num_keys, layout.query_offset


# Which of many pairs a pattern allows: the result of `Pattern.allowed`, in a few operations per pair.


# steps of work that are charged for each evaluation, however few pairs it has
STEPS_PER_TENSORS = 64
# the results of at most this many repeated parts are kept
MAX_KEPT = 8
# row intervals are used if a query has at most this many more intervals than there are keys
FEW_INTERVALS = 64
# the maximum number of entries in a table of the intervals of all queries
MAX_TABLE = 1 << 22
# rows of a periodic pattern are copied only if there are this many pairs and periods; for fewer, it is not faster
MIN_COPIED_PAIRS = 1 << 14
MIN_COPIES = 4


class RowTables:
    """The row intervals of the parts of a pattern for many queries, which are computed once and then looked up.

    queries: positions, int64 [1, queries, 1].
    """

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.known: dict[int, tuple[Pattern, tuple[Tensor, ...] | None]] = {}

    def at(self, pattern: Pattern, places: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """Return the row intervals of the queries at some places, [rows, queries]; None if they are not known."""
        if id(pattern) not in self.known:
            found = pattern.row_intervals(self.queries, MAX_TABLE // self.queries.numel())
            ends = None if found is None else tuple(torch.cat(each, 2)[0] for each in zip(*found, strict=True))
            self.known[id(pattern)] = pattern, ends
        ends = self.known[id(pattern)][1]
        return None if ends is None else [(ends[0][places], ends[1][places])]


def relation(
    pattern: Pattern, queries: Tensor, keys: Tensor, tables: RowTables | None = None, places: Tensor | None = None
) -> Tensor:
    """Return `pattern.allowed(queries, keys)` on the CPU, bool [rows, queries, keys].

    Args:
        pattern: with lookup tables as tensors; see `Pattern.with_tables`.
        queries, keys: positions, int64 [rows, queries, 1] and [rows, 1, keys].
        tables, places: tables of row intervals, and the places of the queries in them, int64 [rows, queries].
    """
    shape = (len(keys), queries.shape[1], keys.shape[2])
    period = pattern.period
    if (
        period is not None
        and period * MIN_COPIES <= shape[1]
        and shape[1] * shape[2] >= MIN_COPIED_PAIRS
        and is_contiguous(queries[:, :, 0])
        and is_contiguous(keys[:, 0])
    ):
        return _copied(pattern, period, queries, keys)
    is_sorted = bool((keys[..., 1:] >= keys[..., :-1]).all())
    look = Relation(queries, is_sorted, repeated(pattern), tables, places)
    return look.of(pattern, queries, keys).expand(shape)


def is_contiguous(positions: Tensor) -> bool:
    """Return whether the positions in each row, [rows, positions], are consecutive."""
    return bool((positions[:, 1:] - positions[:, :-1] == 1).all())


def _copied(pattern: Pattern, period: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Return `relation` of consecutive positions: the last row of each class of queries is computed, others copied."""
    num_keys = keys.shape[2]
    found = torch.empty(len(keys), queries.shape[1], num_keys, dtype=torch.bool)
    for first in range(period):
        rows = found[:, first::period]
        # the keys of the last query, relative to its position, include those of all other queries of the class
        room = period * (rows.shape[1] - 1)
        wide = keys[:, :, :1] + torch.arange(room + num_keys)
        moved = relation(pattern, queries[:, first : first + 1] + room, wide)
        rows.copy_(moved[:, 0].unfold(1, num_keys, period).flip(1))
    return found


def repeated(pattern: Pattern) -> set[Pattern]:
    """Return at most MAX_KEPT parts that occur more than once, the most frequent ones."""
    counts: Counter[Pattern] = Counter()
    left = list(pattern.parts)
    while left:
        part = left.pop()
        counts[part] += 1
        left += part.parts
    return {part for part, count in counts.most_common(MAX_KEPT) if count > 1}


class Relation:
    """Evaluates the parts of one pattern, and those of `kept` only once."""

    def __init__(
        self, queries: Tensor, is_sorted: bool, kept: set[Pattern], tables: RowTables | None, places: Tensor | None
    ) -> None:
        self.queries, self.is_sorted, self.kept = queries, is_sorted, kept
        self.tables, self.places = tables, places
        self.found: dict[Pattern, Tensor] = {}

    def of(self, pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which pairs a part allows, for positions of tokens or of blocks."""
        is_kept = queries is self.queries and pattern in self.kept
        if is_kept and pattern in self.found:
            return self.found[pattern]
        found = self._look(pattern, queries, keys)
        if is_kept:
            self.found[pattern] = found
        return found

    def _look(self, pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
        charge(STEPS_PER_TENSORS)
        intervals = self._intervals(pattern, queries, keys.shape[2]) if self.is_sorted else None
        if intervals is not None:
            return filled(intervals, queries, keys)
        composed = pattern.composed(self.of, queries, keys)
        if composed is not None:
            return composed
        try:
            return pattern.allowed(queries, keys)
        except RuntimeError as error:
            if "Boolean value of Tensor" not in str(error):
                raise
            raise ConfigurationError(
                f"{type(pattern).__name__}.allowed is called with integers and with tensors of positions, and fails "
                "with tensors. Write & for `and`, | for `or` and ~ for `not`, and do not use `if`."
            ) from error

    def _intervals(self, pattern: Pattern, queries: Tensor, num_keys: int) -> list[tuple[Tensor, Tensor]] | None:
        found = None
        if self.tables is not None and self.places is not None and queries is self.queries:
            found = self.tables.at(pattern, self.places)
        return pattern.row_intervals(queries, FEW_INTERVALS + num_keys) if found is None else found


def filled(intervals: list[tuple[Tensor, Tensor]], queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys lie in one of the intervals of each query, bool [rows, queries, keys].

    For every key, the intervals that have begun are counted, minus those that have ended, in 16 bits per pair.
    """
    starts, stops = (torch.cat(ends, 2) for ends in zip(*intervals, strict=True))
    order = keys[:, 0].contiguous()
    places = [torch.searchsorted(order, ends.reshape(len(ends), -1)).view(ends.shape) for ends in (starts, stops)]
    dtype = torch.int16 if starts.shape[2] < 1 << 15 else torch.int32
    changes = torch.zeros(*queries.shape[:2], keys.shape[2] + 1, dtype=dtype)
    one = torch.ones((), dtype=dtype).expand(starts.shape)
    changes.scatter_add_(2, places[0], one)
    changes.scatter_add_(2, torch.maximum(*places), -one)
    return changes[..., :-1].cumsum(2, dtype=dtype) > 0


# the number of pairs that are looked at together
MAX_LOOKED_AT = 1 << 22
# limit for one mask; on CPUs the operating system would kill the process before torch could raise an error
MAX_MASK_BYTES = 16 * 1024 * MEBIBYTE

_pairs: BoundedCache[Tensor] = BoundedCache(CACHE_BYTES)


def allowed_pairs(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, query_start: Tensor | None = None
) -> Tensor | None:
    """Return which pairs are allowed, bool [batch or 1, heads or 1, queries, keys]; None if all of them are.

    query_start: while compiling, the position of the first query if the layout's is a guess; see `AttentionCall`.
    """
    if torch.compiler.is_compiling():
        traced = _written_pairs if is_written() else _traced_pairs
        return traced(layout, tokens, batch_size, device, query_start)
    if is_idle(tokens):
        if attends_to_everything(layout):
            return None
        check_size(layout, 1)
        return _pairs.get((mask_key(layout), device), lambda: _of_pattern(layout, device))
    check_size(layout, batch_size)
    if layout.is_drawn_by_document:
        return _of_documents(layout, tokens, batch_size, device)
    return _of_locations(layout, tokens, device)


def uncached_pairs(layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device) -> Tensor:
    """Return `allowed_pairs`, or a single True for None, without caching them: for masks made in parts."""
    if is_idle(tokens) and not torch.compiler.is_compiling():
        return _of_pattern(layout, device)
    allowed = allowed_pairs(layout, tokens, batch_size, device)
    return torch.ones((), dtype=torch.bool, device=device) if allowed is None else allowed


def check_size(layout: Layout, batch_size: int) -> None:
    """Raise InputError for a mask over all pairs that is too large for any machine."""
    num_bytes, heads = num_mask_bytes(layout, batch_size), num_mask_heads(layout)
    if num_bytes > MAX_MASK_BYTES:
        raise InputError(
            f"A mask over all pairs of {layout.num_queries:,} queries and {layout.num_keys:,} keys (examples: "
            f"{batch_size}, heads that differ: {heads}) takes {num_bytes / 2**30:,.0f} GiB; the limit is "
            f"{MAX_MASK_BYTES / 2**30:,.0f} GiB. Use backend='blocked' or 'flex', or shorter inputs."
        )


def num_mask_bytes(layout: Layout, batch_size: int, width: int = 4) -> int:
    """Return the size in bytes of a mask over all pairs, with `width` bytes per number."""
    return width * batch_size * num_mask_heads(layout) * layout.num_queries * layout.num_keys


def num_mask_heads(layout: Layout) -> int:
    """Return how many heads a mask over all pairs has: 1 if all heads are alike."""
    return 1 if len(layout.fitted.head_groups()) == 1 else layout.num_heads


def _written_pairs(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, query_start: Tensor | None
) -> Tensor:
    """Return `allowed_pairs` for lengths that may be symbols, in operators that ONNX has."""
    groups = _with_tables(written_groups(layout, tokens), device)
    of_queries, of_keys = axis_locations(layout, tokens, device)
    rows = query_rows(layout, query_start)
    queries, keys = of_queries.positions[:, rows, None], of_keys.positions[:, None, :]
    parts = [pattern.allowed(queries, keys)[:, None].expand(-1, count, -1, -1) for _, count, pattern in groups]
    allowed = parts[0][:, :1] if len(parts) == 1 else torch.cat(parts, 1)
    if tokens.is_empty:
        return allowed
    return _in_documents(allowed, of_queries, of_keys, rows, layout.pattern.is_causal)


def _traced_pairs(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, query_start: Tensor | None
) -> Tensor:
    return pairs_operator(
        list(tokens.tensors),
        write_call_text(layout.pattern, layout.layer, (), layout.first_head, layout.num_model_heads, layout.is_cross),
        [1 if tokens.is_empty else batch_size, layout.num_heads, layout.num_queries, layout.num_keys],
        layout.query_offset,
        device,
        query_start,
    )


# the operator may read masks on the host, which a CUDA graph cannot replay
@torch.library.custom_op("hf_efficient_attn::allowed_pairs", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def pairs_operator(
    masks: list[Tensor | None],
    call_text: str,
    shape: Sequence[int],
    query_offset: int,
    device: torch.device,
    query_start: Tensor | None = None,
) -> Tensor:
    """Return `allowed_pairs` as bool of the whole shape; opaque to a compiler, which cannot trace patterns.

    query_start: int64 scalar that replaces `query_offset`.
    """
    batch_size, num_heads, num_queries, num_keys = shape
    query_offset = query_offset if query_start is None else int(query_start)
    layout = read_layout(call_text, num_heads, num_queries, num_keys, query_offset)
    allowed = allowed_pairs(layout, TokenMask(*masks), batch_size, device)
    if allowed is None:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    return allowed.expand(*shape).clone(memory_format=torch.contiguous_format)


@pairs_operator.register_fake
def _(
    masks: list[Tensor | None],
    call_text: str,
    shape: Sequence[int],
    query_offset: int,
    device: torch.device,
    query_start: Tensor | None = None,
) -> Tensor:
    return torch.empty(*shape, dtype=torch.bool, device=device)


def is_idle(tokens: TokenMask) -> bool:
    """Return whether the mask changes nothing; False may also mean that finding out would cost too much."""
    if tokens.is_empty:
        return True
    if torch.compiler.is_compiling() or any(
        mask is not None for mask in (tokens.segment_ids, tokens.global_mask, tokens.query_segment_ids)
    ):
        return False
    masks = [mask for mask in (tokens.key_mask, tokens.query_mask) if mask is not None]
    return all(mask.device.type == "cpu" and bool(mask.all()) for mask in masks)


def documents_of(call: AttentionCall) -> tuple[tuple[Document, ...], ...] | None:
    """Return the documents of each example; None if every example is one whole document."""
    layout, tokens = call.layout, call.tokens
    return None if is_idle(tokens) else tokens.documents(call.inputs.batch_size, layout.num_keys, layout.num_positions)


def attends_to_everything(layout: Layout) -> bool:
    """Return whether every query of every head may attend to every key."""
    first, last = layout.query_offset, layout.query_offset + layout.num_queries - 1
    everything = ((0, layout.num_keys),)
    return all(
        pattern.full_key_intervals(first, last, layout.num_keys) == everything for _, _, pattern in layout.head_groups()
    )


def _of_pattern(layout: Layout, device: torch.device) -> Tensor:
    groups, offset = groups_on(layout, device), layout.query_offset

    def of_rows(rows: slice) -> Tensor:
        return _of_extent(
            groups, range(offset + rows.start, offset + min(rows.stop, layout.num_queries)), layout.num_keys, device
        )

    return _by_queries(layout, 1, device, of_rows)


def _of_extent(groups: HeadGroups, queries: range, num_keys: int, device: torch.device) -> Tensor:
    """Return [1, heads or 1, queries, keys] for these queries and the keys 0 … num_keys - 1."""
    positions = torch.arange(queries.start, queries.stop, device=device)
    return _of_heads(groups, positions[None], torch.arange(num_keys, device=device)[None])


def _by_queries(layout: Layout, batch_size: int, device: torch.device, of_rows: Callable[[slice], Tensor]) -> Tensor:
    """Return `of_rows` of all queries, [batch, heads or 1, queries, keys], computed for some queries at a time.

    The intermediates of a pattern take many times the memory of its result.
    """
    step = max(1, MAX_LOOKED_AT // (max(1, batch_size) * layout.num_keys))
    if step >= layout.num_queries:
        return of_rows(slice(0, layout.num_queries))
    shape = (batch_size, num_mask_heads(layout), layout.num_queries, layout.num_keys)
    allowed = torch.empty(shape, dtype=torch.bool, device=device)
    for first in range(0, layout.num_queries, step):
        rows = slice(first, first + step)
        allowed[:, :, rows] = of_rows(rows)
    return allowed


@cached()
def groups_on(layout: Layout, device: torch.device) -> HeadGroups:
    """Return the groups of heads, with the lookup tables of their patterns as tensors."""
    return _with_tables(layout.head_groups(), device)


def _with_tables(groups: HeadGroups, device: torch.device) -> HeadGroups:
    tabled = tables_on([pattern for _, _, pattern in groups], device)
    return tuple((first, count, pattern) for (first, count, _), pattern in zip(groups, tabled, strict=True))


def _of_heads(groups: HeadGroups, queries: Tensor, keys: Tensor) -> Tensor:
    """Return [batch, heads or 1, queries, keys] for positions [batch, queries] and [batch, keys]."""
    # on other devices `relation` would wait for the number of intervals
    look = relation if keys.device.type == "cpu" else allowed_by
    if len(queries) != len(keys):
        batch_size = max(len(queries), len(keys))
        queries, keys = queries.expand(batch_size, -1), keys.expand(batch_size, -1)
    parts = [look(pattern, queries[:, :, None], keys[:, None, :])[:, None] for _, _, pattern in groups]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.expand(-1, count, -1, -1) for part, (_, count, _) in zip(parts, groups, strict=True)], 1)


def _of_locations(layout: Layout, tokens: TokenMask, device: torch.device) -> Tensor:
    """Return the pairs of all documents at once, for patterns that are the same at every length."""
    of_queries, locations = axis_locations(layout, tokens, device)
    batch_size = max(len(of_queries.positions), len(locations.positions))
    groups, offset = groups_on(layout, device), layout.query_offset

    def of_rows(some: slice) -> Tensor:
        rows = slice(offset + some.start, min(offset + some.stop, layout.queries.stop))
        allowed = _at_positions(groups, of_queries.positions[:, rows], locations.positions)
        return _in_documents(allowed, of_queries, locations, rows, layout.pattern.is_causal)

    return _by_queries(layout, batch_size, device, of_rows)


def _in_documents(
    allowed: Tensor, of_queries: TokenLocations, of_keys: TokenLocations, rows: slice | Tensor, is_causal: bool
) -> Tensor:
    """Return the allowed pairs and those of chosen global tokens, without pairs of different documents."""
    if of_keys.is_global is not None:
        chosen = of_keys.is_global[:, rows, None] | of_keys.is_global[:, None, :]
        if is_causal:
            chosen = chosen & (of_keys.positions[:, None, :] <= of_queries.positions[:, rows, None])
        allowed = allowed | chosen[:, None]
    return allowed & _same_document(of_queries, of_keys, rows)


def _at_positions(groups: HeadGroups, queries: Tensor, keys: Tensor) -> Tensor:
    """Return [batch, heads or 1, queries, keys] for positions [batch, queries] and [batch, keys], in any order."""
    if keys.device.type != "cpu" or queries.numel() == 0:
        return _of_heads(groups, queries, keys)
    first, stop, num_keys = int(queries.min()), int(queries.max()) + 1, int(keys.max()) + 1
    is_dense = stop - first <= 2 * queries.shape[1] and num_keys <= 2 * keys.shape[1]
    if not is_dense or min(first, int(keys.min())) < 0:
        return _of_heads(groups, queries, keys)
    # examples have positions in common, so the pattern is evaluated once for all of them
    (extent,) = _of_extent(groups, range(first, stop), num_keys, keys.device)
    batch = torch.broadcast_shapes(queries.shape[:1], keys.shape[:1])
    rows, columns = (queries - first).expand(*batch, -1), keys.expand(*batch, -1)
    return torch.stack([extent[:, row][:, :, column] for row, column in zip(rows, columns, strict=True)])


def _same_document(of_queries: TokenLocations, of_keys: TokenLocations, rows: slice | Tensor) -> Tensor:
    queries, keys = of_queries.documents[:, None, rows, None], of_keys.documents[:, None, None, :]
    return (queries == keys) & (keys != NO_DOCUMENT)


def _of_documents(layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device) -> Tensor:
    """Return the pairs document by document, each with the pattern drawn for its own length."""
    allowed = torch.zeros(
        batch_size, layout.num_heads, layout.num_queries, layout.num_keys, dtype=torch.bool, device=device
    )
    for row, documents in enumerate(tokens.documents(batch_size, layout.num_keys)):
        for document in documents:
            own = layout.of_document(document)
            first = document.start + own.query_offset - layout.query_offset
            if own.num_queries:
                allowed[row, :, first : first + own.num_queries, document.start : document.stop] = _of_pattern(
                    own, device
                )[0]
    locations = token_locations(tokens, layout.num_keys, device)
    return allowed & _same_document(locations, locations, layout.queries)


# What is added to the scores of all pairs: a mask of 0 and -inf, and learned terms. This takes memory for all pairs.


AdditiveMask = tuple[Tensor | None, Tensor | None]

_masks: BoundedCache[AdditiveMask] = BoundedCache(CACHE_BYTES)
_labels: BoundedCache[Tensor] = BoundedCache(CACHE_BYTES)


def additive_mask(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, dtype: torch.dtype
) -> AdditiveMask:
    """Return (mask, keyless): 0 for allowed pairs and -inf for others, and which queries have no keys.

    The mask is [batch or 1, heads or 1, queries, keys], or None if all pairs are allowed. Rows of queries without keys
    are 0, so that no kernel takes a softmax over no keys. `keyless` is bool [batch or 1, heads or 1, queries, 1], or
    None if every query has keys.
    """

    def build() -> AdditiveMask:
        allowed = allowed_pairs(layout, tokens, batch_size, device)
        return (None, None) if allowed is None else additive(allowed, dtype)

    if torch.compiler.is_compiling():
        return build()
    is_whole = is_idle(tokens)
    key = (mask_key(layout, is_whole), device, dtype)
    if is_whole:
        return _masks.get(key, build)
    # the layers of one forward pass share the masks of its examples; the next pass has others
    return _masks.get_of(vars(tokens).values(), key, build)


def additive(allowed: Tensor, dtype: torch.dtype) -> AdditiveMask:
    """Return `additive_mask` of pairs, bool [batch or 1, heads or 1, queries, keys]."""
    keyless = ~allowed.any(-1, keepdim=True)
    # not in place: a compiler does not know that the operator that returns `allowed` without masks allocates memory
    closed = ~(allowed | keyless)
    mask = torch.zeros(closed.shape, dtype=dtype, device=closed.device).masked_fill_(closed, -torch.inf)
    # `any` would have to wait for a GPU, and cannot be evaluated while tracing
    has_keyless = torch.compiler.is_compiling() or keyless.device.type != "cpu" or bool(keyless.any())
    return mask, keyless if has_keyless else None


def term_bias(
    terms: Sequence[Term], layout: Layout, tokens: TokenMask, device: torch.device, query_start: Tensor | None = None
) -> Tensor | None:
    """Return the sum of the terms for every pair, [batch or 1, heads or 1, queries, keys]; None if there is no term.

    query_start: as for `allowed_pairs`.
    """
    if not terms:
        return None
    where = (layout, tokens, device, query_start)
    return reduce(add, (_scores(term, _labels_of(term.label, *where)) for term in terms))


def close_pairs(bias: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the bias of the terms with 0 instead of -inf, and the allowed pairs (None: all) without those of -inf.

    A row in which no pair is left then counts as a row without keys, and its softmax is taken over finite scores.
    """
    is_open = bias != -torch.inf
    return bias.masked_fill(~is_open, 0.0), is_open if allowed is None else allowed & is_open


def _scores(term: Term, labels: Tensor) -> Tensor:
    scores = term.label.score(look_up(term.values, labels), labels)
    return scores.expand(torch.broadcast_shapes(scores.shape, labels.shape))


def _labels_of(
    label: Label, layout: Layout, tokens: TokenMask, device: torch.device, query_start: Tensor | None
) -> Tensor:
    """Return the label of every pair, [batch or 1, 1, queries, keys]; the result is shared and must not be changed."""
    tokens = NO_MASK if not torch.compiler.is_compiling() and is_idle(tokens) else tokens

    def build() -> Tensor:
        of_queries, of_keys = axis_locations(layout, tokens, device)
        queries = of_queries.positions[:, query_rows(layout, query_start), None]
        keys = of_keys.positions[:, None, :]
        return label.of(queries, keys)[:, None]

    if torch.compiler.is_compiling():
        return build()
    key = (label, layout.num_queries, layout.num_keys, layout.query_offset, layout.is_cross, device)
    if tokens.is_empty:
        return _labels.get(key, build)
    # like masks, labels are shared by the layers of one forward pass
    return _labels.get_of(vars(tokens).values(), key, build)


# Chosen keys as pairs: which are selected, and how often each counts. This takes memory for all pairs.


def selected_pairs(
    chosen: ChosenKeys,
    allowed: Tensor | None,
    layout: Layout,
    tokens: TokenMask,
    num_key_heads: int,
    query_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which pairs are both selected and allowed, bool, and how often each counts, int32 of at least 1.

    Args:
        allowed: which pairs the pattern and the masks allow, bool [batch or 1, heads or 1, queries, keys]; None: all.
        query_start: as for `allowed_pairs`.
    """
    counts = of_heads(chosen.counts(layout, tokens, num_key_heads, query_start), layout.num_heads)
    read = counts > 0 if allowed is None else allowed & (counts > 0)
    if chosen.attends_to_self_last:
        read = with_self_last(read, first_query(layout, query_start))
    return read, counts.clamp(min=1)


def num_counted(chosen: ChosenKeys | None, layout: Layout) -> int:
    """Return how many pairs of one example are counted to find the selected ones; 0 without a choice of keys."""
    if chosen is None:
        return 0
    num_heads = 1 if chosen.num_choosing_heads == 1 else layout.num_heads
    return num_heads * layout.num_queries * layout.num_keys


def with_self_last(read: Tensor, query_offset: int | Tensor) -> Tensor:
    """Return the pairs [..., queries, keys] without those of a token with itself if it also attends to another key."""
    num_queries, num_keys = read.shape[-2:]
    queries = query_offset + torch.arange(num_queries, device=read.device)
    is_self = torch.arange(num_keys, device=read.device) == queries[:, None]
    attends_to_others = (read & ~is_self).any(-1, keepdim=True)
    return read & ~(is_self & attends_to_others)


# Which of the allowed pairs terms and a choice of keys leave, and what is added to their scores. This takes memory for
# all pairs.


def read_pairs(
    allowed: Tensor | None,
    terms: Sequence[Term],
    chosen: ChosenKeys | None,
    layout: Layout,
    tokens: TokenMask,
    num_key_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    query_start: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return (pairs, added): the pairs that terms and a choice leave, and finite numbers to add to their scores.

    Terms close pairs by -inf before keys are chosen, so that `attends_to_self_last` knows which keys a query can attend
    to. A key that is chosen n times adds log n.

    Args:
        allowed: which pairs the pattern and the masks allow, bool [batch or 1, heads or 1, queries, keys]; None: all.
        dtype: the dtype of log n.
        query_start: as for `allowed_pairs`.
    """
    pairs, added = allowed, term_bias(terms, layout, tokens, device, query_start)
    if added is not None:
        added, pairs = close_pairs(added, pairs)
    if chosen is None:
        return pairs, added
    pairs, counts = selected_pairs(chosen, pairs, layout, tokens, num_key_heads, query_start)
    repeats = counts.to(dtype).log()
    return pairs, repeats if added is None else added + repeats


# The log-sum-exp of the scores of every query, for kernels that do not return it.


CHUNK_QUERIES = 256


def row_lse(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Return the log-sum-exp of each query's scores without sinks, [batch, heads, queries]; -inf without keys.

    This takes memory for CHUNK_QUERIES queries at a time, or for all of them if a gradient is needed. The gradient of
    queries without keys is 0.
    """
    with nullcontext() if call.differentiates_lse else torch.no_grad():
        return _row_lse(q, k, call)


def _row_lse(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    layout, tokens = call.layout, call.tokens
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).to(lse_dtype(q))
    chunks = []
    # chosen keys are found for all queries at once, and a program for dynamic lengths cannot loop over chunks
    is_whole = call.chosen is not None or not isinstance(layout.num_queries, int)
    for start in (0,) if is_whole else range(0, layout.num_queries, CHUNK_QUERIES):
        count = layout.num_queries if is_whole else min(CHUNK_QUERIES, layout.num_queries - start)
        part = replace(layout, num_queries=count, query_offset=layout.query_offset + start)
        scores = cap(q[:, :, start : start + count].to(k.dtype) @ k.transpose(-1, -2) * call.scale, call.softcap)
        allowed = uncached_pairs(part, tokens, q.shape[0], q.device)
        terms = [_rows(term, start, count) for term in call.terms]
        num_key_heads = call.inputs.num_key_heads
        pairs, added = read_pairs(allowed, terms, call.chosen, part, tokens, num_key_heads, k.dtype, q.device)
        scores = scores if added is None else scores + added
        chunks.append(torch.logsumexp(scores.masked_fill(~cast(Tensor, pairs), -torch.inf), -1))
    return torch.cat(chunks, -1)


def _rows(term: Term, start: int, count: int) -> Term:
    return term if term.values.shape[2] == 1 else replace(term, values=term.values[:, :, start : start + count])


def lse_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which scores are summed: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
