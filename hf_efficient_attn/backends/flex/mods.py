"""The functions that a kernel of flex calls for every pair: whether it is allowed, and what its score is."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from operator import index
from threading import Lock
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from hf_efficient_attn.backends.flex.captured import (
    SelectedBlocks,
    by_pair,
    captured,
    captured_locations,
    in_memory,
    kind_of,
    selected_blocks_of,
)
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, cap
from hf_efficient_attn.layout.dense_mask import is_idle
from hf_efficient_attn.layout.layout import Heads, Layout
from hf_efficient_attn.layout.operator_args import read_call_text, read_layout, write_call_text
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.token_locations import TokenLocations, axis_locations
from hf_efficient_attn.layout.transfer import tables_on
from hf_efficient_attn.patterns.pattern import Pattern

# The patterns of the heads in the form that kernels take: drawn, and with tensors as lookup tables.


# (first head, pattern) of each run of heads with equal patterns
Groups = tuple[tuple[int, Pattern], ...]
# a program whose groups were evicted is recompiled
MAX_KEPT = 1024
_for_programs = SimpleNamespace()
_lock = Lock()


def head_groups(layout: Layout, device: torch.device) -> Groups:
    """Return the patterns of the heads with tensors on the device as lookup tables."""
    if torch.compiler.is_compiling():
        return getattr(_for_programs, _keep(*_known(layout), device))  # type: ignore[no-any-return]
    return _groups(layout, device)


def is_traceable(layout: Layout) -> bool:
    """Return whether a compiler can expand the patterns in reasonable time."""
    if torch.compiler.is_compiling():
        return _is_constant_traceable(*_known(layout))
    return all(drawn.is_traceable for _, _, drawn in layout.head_groups())


def is_causal(layout: Layout) -> bool:
    """Return whether the pattern is known to allow no key after its query."""
    return _is_constant_causal(layout_text(layout)) if torch.compiler.is_compiling() else layout.pattern.is_causal


def is_drawn(pattern: Pattern) -> bool:
    """Return whether the pattern depends on the length or is random."""
    return pattern.depends_on_length or pattern.is_random


def is_length_known(layout: Layout) -> bool:
    """Return whether the lengths are numbers, not symbols of a program that is being compiled."""
    lengths = layout.num_keys, layout.num_positions or 0
    return not torch.compiler.is_compiling() or all(has_static_value(length) for length in lengths)


def layout_text(layout: Layout) -> str:
    """Return pattern, layer and heads as text, whose fields guard a program that is being compiled."""
    heads = layout.first_head, layout.num_model_heads
    return write_call_text(layout.pattern, layout.layer, (), *heads, layout.is_cross)


def _known(layout: Layout) -> tuple[str, int, int | None]:
    """Return the parts of a layout that are never symbols: text, number of heads, length to draw for."""
    # while compiling, a number may be a symbol; `index` returns its value
    drawn_tokens = index(layout.drawn_tokens) if is_drawn(layout.pattern) else None
    return layout_text(layout), index(layout.num_heads), drawn_tokens


# a compiler runs this while tracing, and takes the result as a constant; it cannot do so with methods
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keep(text: str, num_heads: int, drawn_tokens: int | None, device: torch.device) -> str:
    """Store the groups where traced code can read them, and return their name there."""
    values = repr((text, num_heads, drawn_tokens, str(device)))
    name = f"groups_{sha256(values.encode()).hexdigest()}"
    with _lock:
        kept = vars(_for_programs)
        if name not in kept and len(kept) >= MAX_KEPT:
            del kept[next(iter(kept))]
        kept[name] = _groups_of_text(text, num_heads, drawn_tokens, device)
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_constant_traceable(text: str, num_heads: int, drawn_tokens: int | None) -> bool:
    groups = _groups_of_text(text, num_heads, drawn_tokens, torch.device("cpu"))
    return all(pattern.is_traceable for _, pattern in groups)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_constant_causal(text: str) -> bool:
    return read_call_text(text)[0].is_causal


def _groups_of_text(text: str, num_heads: int, drawn_tokens: int | None, device: torch.device) -> Groups:
    if drawn_tokens is not None:
        return _groups(read_layout(text, num_heads, drawn_tokens, drawn_tokens, 0), device)
    pattern, _, _, first_head, num_model_heads, _ = read_call_text(text)
    return _undrawn_groups(pattern, (first_head, num_heads, num_model_heads or num_heads), device)


@cached()
def _groups(layout: Layout, device: torch.device) -> Groups:
    return _with_tensors(tuple((first, drawn) for first, _, drawn in layout.head_groups()), device)


@cached()
def _undrawn_groups(pattern: Pattern, heads: Heads, device: torch.device) -> Groups:
    first, count, total = heads
    own = pattern.heads(total)[first : first + count]
    starts = [head for head in range(count) if head == 0 or own[head] != own[head - 1]]
    return _with_tensors(tuple((head, own[head]) for head in starts), device)


def _with_tensors(groups: Groups, device: torch.device) -> Groups:
    for _, pattern in groups:
        # fills caches of the pattern, which the compiler could not trace
        pattern.allowed(0, 0)
    tabled = tables_on([pattern for _, pattern in groups], device)
    return tuple((first, pattern) for (first, _), pattern in zip(groups, tabled, strict=True))


# A hash of a weight's place decides whether it is dropped: a kernel does not keep the decisions, and its backward pass
# computes them again.


# of a hash that decide
BITS = 24
# a factor that spreads neighbouring keys
GOLDEN = -1640531527


@dataclass(frozen=True)
class Dropout:
    """Dropout of one call.

    Attributes:
        probability: the probability with which each weight is dropped.
        seed: an int32 scalar tensor on the device; the same seed drops the same weights.
    """

    probability: float
    seed: Tensor

    def is_kept(self, example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the weight at these indices is kept; they are int tensors that broadcast."""
        row = self.seed
        for part in (example, head, query):
            row = mixed(row ^ part.to(torch.int32))
        drawn = (mixed(row ^ (key.to(torch.int32) * GOLDEN)) >> (32 - BITS)) & (2**BITS - 1)
        return drawn >= round(self.probability * 2**BITS)


def mixed(number: Tensor) -> Tensor:
    """Return a one-to-one hash of int32 numbers; each bit of the result depends on all bits of a number.

    Two rounds of multiplication and xor-shift, with the factors of C. Wellons' "lowbias32", as products of int32 that
    overflow.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


def draw_seed(device: torch.device) -> Tensor:
    """Return a seed, drawn from torch's generator of the device, so that the host need not wait."""
    return torch.randint(-(2**31), 2**31 - 1, (), dtype=torch.int32, device=device)


# (batch, head, query, key) -> allowed, and (score, batch, head, query, key) -> score; indices are integer tensors
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mods:
    """The functions of one call.

    Attributes:
        mask_mod: which pairs are allowed.
        score_mod: soft cap and terms; None: there are none.
        kind: everything about them that a compiled kernel depends on, hashable; None while a caller's program is being
            compiled.
    """

    mask_mod: MaskMod
    score_mod: ScoreMod | None
    kind: object

    def with_dropout(self, dropout: Dropout) -> "Mods":
        """Return functions with which the scores of dropped weights are -inf."""

        def score_mod(score: Tensor, *place: Tensor) -> Tensor:
            score = score if self.score_mod is None else self.score_mod(score, *place)
            return torch.where(dropout.is_kept(*place), score, -torch.inf)

        return Mods(self.mask_mod, score_mod, None if self.kind is None else (self.kind, dropout.probability))


def mods_of(call: AttentionCall, device: torch.device, order: Tensor | None = None) -> Mods:
    """Return the functions of a call, without its dropout, for tensors on a device.

    order: the position of the token at each place, of queries and keys alike; None: they are in order.
    """
    layout, locations = call.layout, None
    if not is_idle(call.tokens):
        of_queries, of_keys = axis_locations(layout, call.tokens, device)
        keys = captured_locations(of_keys if order is None else of_keys.in_order(order))
        locations = (keys if of_queries is of_keys else captured_locations(of_queries), keys)
    terms = [dataclasses.replace(term, values=captured(by_pair(term.values), (0, 2))) for term in call.terms]
    lookup = PositionLookup(offset_of(layout.query_offset, device), locations, order)
    score_mod = _score_mod(terms, lookup, call.softcap) if terms or call.softcap is not None else None
    mask_mod = _mask_mod(layout, lookup, device)
    selected = None if call.chosen is None else selected_blocks_of(call)
    if selected is not None:
        mask_mod = _of_selected(mask_mod, selected, lookup)
    kind = None
    if not torch.compiler.is_compiling():
        of_terms = tuple((term.label, kind_of(term.values)) for term in terms)
        kind = (structure_of(layout), lookup.kind, call.softcap, of_terms, None if selected is None else selected.kind)
    return Mods(mask_mod, score_mod, kind)


@dataclass(frozen=True)
class PositionLookup:
    """Turns the indices of a kernel into positions.

    Attributes:
        offset: position of the first query, an integer scalar tensor; None: 0.
        locations: those on the axis of queries and on that of keys; None: all examples are alike.
        order: the position at each index, if all examples are alike; None: the index itself.
    """

    offset: Tensor | None
    locations: tuple[TokenLocations, TokenLocations] | None
    order: Tensor | None = None

    @property
    def kind(self) -> object:
        """Everything about the lookup that a compiled kernel depends on."""
        if self.locations is None:
            return self.offset is None, self.order is None
        of_queries, of_keys = self.locations
        kinds = kind_of(of_queries.positions), kind_of(of_keys.positions)
        return self.offset is None, of_keys.is_global is None, of_queries is of_keys, *kinds

    def query(self, index: Tensor) -> Tensor:
        """Return the position of a query on its axis."""
        return index if self.offset is None else index + self.offset

    def positions(self, example: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of a query and a key within their documents."""
        if self.locations is None and self.order is not None:
            return self.order[query], self.order[key]
        if self.locations is None:
            return self.query(query), key
        of_queries, of_keys = self.locations
        return of_queries.positions[example, self.query(query)], of_keys.positions[example, key]


def offset_of(query_offset: int, device: torch.device) -> Tensor | None:
    """Return a number as a kernel captures it; None for 0."""
    if query_offset == 0:
        return None
    if torch.compiler.is_compiling():
        # the number may be a symbol
        return in_memory(torch.full((), query_offset, device=device))
    return _offset(query_offset, device)


@cached()
def _offset(query_offset: int, device: torch.device) -> Tensor:
    return torch.tensor(query_offset, device=device)


def _mask_mod(layout: Layout, lookup: PositionLookup, device: torch.device) -> MaskMod:
    groups = head_groups(layout, device)

    def of_pattern(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        positions = lookup.positions(example, query, key)
        allowed = groups[0][1].allowed(*positions)
        for first, pattern in groups[1:]:
            allowed = torch.where(head >= first, pattern.allowed(*positions), allowed)
        return allowed

    if lookup.locations is None:
        return of_pattern
    of_queries, of_keys = lookup.locations
    reads_no_later_keys = is_causal(layout)

    def of_tokens(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = of_pattern(example, head, query, key)
        row = lookup.query(query)
        if of_keys.is_global is not None:
            chosen = of_keys.is_global[example, row] | of_keys.is_global[example, key]
            if reads_no_later_keys:
                query_position, key_position = lookup.positions(example, query, key)
                chosen = chosen & (key_position <= query_position)
            allowed = allowed | chosen
        document = of_keys.documents[example, key]
        return allowed & (of_queries.documents[example, row] == document) & (document >= 0)

    return of_tokens


def _of_selected(mask_mod: MaskMod, selected: SelectedBlocks, lookup: PositionLookup) -> MaskMod:
    """Return a function that allows only those pairs whose key lies in a block that the query has selected."""

    def of_selected(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key if selected.counts_axis else lookup.positions(example, query, key)[1]
        return mask_mod(example, head, query, key) & selected.holds(example, head, query, place)

    return of_selected


def _score_mod(terms: Sequence[Term], lookup: PositionLookup, softcap: float | None) -> ScoreMod:
    def with_terms(score: Tensor, example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = cap(score, softcap)
        positions = lookup.positions(example, query, key)
        for term in terms:
            label = term.label.of(*positions)
            indices = (example, head, query, label.clamp(0, term.label.num_values - 1))
            # a dimension of size 1 is read at 0; flex needs tensors as indices
            sizes = zip(indices, term.values.shape, strict=True)
            value = term.values[tuple(index if size > 1 else index * 0 for index, size in sizes)]
            score = score + term.label.score(value, label)
        return score

    return with_terms


@cached()
def structure_of(layout: Layout) -> object:
    """Return everything about a layout that the functions of a kernel depend on, except the entries of lookup tables.

    The lengths of tables are included, because torch 2.13 generates wrong code for CPUs if they vary.
    """
    return layout.pattern.is_causal, tuple((first, _structure(pattern)) for first, _, pattern in layout.head_groups())


def _structure(pattern: Pattern) -> object:
    if pattern.parts:
        fields = (getattr(pattern, field.name) for field in dataclasses.fields(pattern))  # type: ignore[arg-type]
        # the shape of a grid is a tuple of integers
        numbers = tuple(value for value in fields if not isinstance(value, Pattern) and value != pattern.parts)
        return pattern.kind, numbers, tuple(_structure(part) for part in pattern.parts)
    return (pattern.kind, *pattern.table_sizes) if pattern.table_sizes else pattern
