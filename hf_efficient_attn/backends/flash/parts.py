"""Divide a call among kernels: a window, other keys with a mask or gathered, queries that attend to everything.

The parts hold every allowed pair once, so that their outputs can be joined by log-sum-exp. Queries that attend to
(almost) all keys are computed separately, and their rows in other parts are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hf_efficient_attn.layout.block_table import Documents, block_table
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import send
from hf_efficient_attn.patterns.bands import Causal, Full
from hf_efficient_attn.patterns.intervals import complement, intersect, union
from hf_efficient_attn.patterns.pattern import Pattern, own_classes

# (tokens before, tokens after) the query, if the last query is at the last key; None: no limit
Window = tuple[int | None, int | None]
# if heads have more patterns than this, they share one kernel, which looks up blocks
MAX_GROUPS = 4
# largest share of all tokens that is gathered
MOST_GATHERED = 1 / 8
# of blocks that are looked up: fewest tokens of a block, and most blocks for a block of queries
MIN_BLOCK_TOKENS, MOST_BLOCKS = 16, 16
# queries and keys of the tiles by which work is estimated
TILE = 128
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Part:
    """The pairs of one kernel call; without window and mask all of its queries attend to all of its keys.

    Attributes:
        window: limits of a window, which the kernel has as an option.
        queries, keys: the indices of the tokens that are gathered for it; None: all, in order.
        order: the indices of all tokens, queries and keys alike, in the order in which they are packed; None: in order.
        bounds: the starts of sequences and the end of the last one: within an example if there is an order, otherwise
            in the tokens of all examples; None: every example is one sequence.
        mask: pairs that are allowed, computed from positions.
        blocks: further pairs that are allowed, looked up by blocks of tokens, for each head.
        excluded: pairs of mask and blocks that another part holds.
        is_whole_row: whether it holds all keys of its queries, whose rows in other parts are then not used.
    """

    window: Window | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    bounds: tuple[int, ...] | None = None
    mask: Pattern | None = None
    blocks: Pattern | None = None
    excluded: Pattern | None = None
    is_whole_row: bool = False

    @property
    def has_mask(self) -> bool:
        """Whether a function says which pairs are allowed."""
        return self.mask is not None or self.blocks is not None

    @property
    def has_tables(self) -> bool:
        """Whether tables list the blocks that are computed: it has a mask over all tokens."""
        return self.has_mask and self.queries is None and self.keys is None

    def masked_layout(self, layout: Layout) -> Layout:
        """Return the layout of the pairs of mask and blocks, of one head if all have the same."""
        found: Pattern = reduce(or_, [each for each in (self.mask, self.blocks) if each is not None])
        return layout_with(found if self.excluded is None else found & ~self.excluded, layout)


@dataclass(frozen=True, eq=False)
class HeadParts:
    """The parts of neighbouring heads: the first head, the number of heads, and the parts."""

    first: int
    count: int
    parts: tuple[Part, ...]

    @property
    def heads(self) -> slice:
        """The query heads."""
        return slice(self.first, self.first + self.count)

    def key_heads(self, group: int) -> slice:
        """Return the key heads; `group` query heads share one."""
        return slice(self.first // group, (self.first + self.count) // group)


@cached()
def parts_of(layout: Layout, documents: Documents | None) -> tuple[HeadParts, ...]:
    """Return the parts of all heads.

    documents: those of each example; None: every example is one whole document.
    """
    groups = layout.head_groups()
    if len(groups) > MAX_GROUPS:
        members = [each if is_drawn(each) else each.resolve(layout.drawn_tokens) for each in layout.pattern.members()]
        return (HeadParts(0, layout.num_heads, whole_parts(members, None, layout)),)
    if documents is not None:
        return tuple(HeadParts(first, count, document_parts(own, layout, documents)) for first, count, own in groups)
    return tuple(HeadParts(first, count, whole_parts(own.members(), own, layout)) for first, count, own in groups)


@cached()
def selected_parts(layout: Layout) -> tuple[HeadParts, ...]:
    """Return the part of selected blocks: all pairs of the pattern; the mask allows only the selected ones."""
    ((_, _, pattern),) = layout.head_groups()
    return (HeadParts(0, layout.num_heads, (Part(mask=pattern),)),)


def whole_parts(members: Sequence[Pattern], drawn: Pattern | None, layout: Layout) -> tuple[Part, ...]:
    """Return the parts of the union of some members over one whole document.

    drawn: that union; None: each head draws its own members.
    """
    rows, columns, others = divided(members, layout)
    if drawn is None and not all(has_all_keys(each, layout) for each in rows):
        rows, others = [], [*rows, *others]
    parts, core = [], next((each for each in others if core_part(each, layout) is not None), None)
    if core is not None:
        parts.append(cast(Part, core_part(core, layout)))
        others.remove(core)
    if core is not None and not others and columns:
        keys = tokens_of(columns, layout, of_keys=True)
        parts.append(Part(keys=keys, mask=simplest(columns, keys, layout), excluded=core))
    elif others or columns:
        rest = [*others, *columns]
        computed, looked_up = ([each for each in rest if is_expression(each) == wanted] for wanted in (True, False))
        mask, blocks = (reduce(or_, each) if each else None for each in (computed, looked_up))
        parts.append(Part(mask=mask, blocks=blocks, excluded=core))
    if drawn is not None:
        held = [each for each in members if each not in rows]
        rows = [each for each in rows if not is_held(each, held, layout)]
    if rows:
        indices = tokens_of(rows, layout, of_keys=False)
        mask = None if all(has_all_keys(each, layout) for each in rows) else drawn
        parts.append(Part(queries=indices, mask=mask, is_whole_row=True))
    return tuple(parts)


def tokens_of(members: Sequence[Pattern], layout: Layout, of_keys: bool) -> tuple[int, ...]:
    """Return the indices of the keys, or of the queries, that members gather."""
    orders = [each.token_orders(*layout.extent)[0] for each in members]
    if of_keys:
        return tuple(sorted({key for order in orders for key in order.keys}))
    return tuple(sorted({query - layout.query_offset for order in orders for query in order.queries}))


def simplest(columns: Sequence[Pattern], keys: tuple[int, ...], layout: Layout) -> Pattern:
    """Return a pattern that equals the columns on their keys, if possible one without the positions of the keys.

    Kernels need not be compiled again when only these positions change.
    """
    joined: Pattern = reduce(or_, columns)
    num_queries, num_keys, offset = layout.extent
    found = joined.num_pairs(num_queries, num_keys, offset)
    if found == num_queries * len(keys):
        return Full()
    # pairs if every query attends to the keys that are not after it
    after = sum(max(0, num_queries - max(0, key - offset)) for key in keys)
    return Causal() if joined.is_causal and found == after else joined


def is_held(row: Pattern, others: Sequence[Pattern], layout: Layout) -> bool:
    """Return whether other members let the queries of a row attend to all of its keys."""
    for query in row.token_orders(*layout.extent)[0].queries:
        bounds = (query, query, layout.num_keys)
        held = union(*(each.key_intervals(*bounds) for each in others if not is_drawn(each)))
        if intersect(row.key_intervals(*bounds), complement(held, layout.num_keys)):
            return False
    return True


def document_parts(pattern: Pattern, layout: Layout, documents: Documents) -> tuple[Part, ...]:
    """Return the part of documents: packed sequences with a window, or a mask that compares documents."""
    bounds = sequence_bounds(documents, layout)
    limits = pattern.band_limits
    window = None if limits is None or bounds is None else window_of(limits, 0, layout)
    return (Part(mask=pattern),) if window is None else (Part(window=window, bounds=bounds),)


def sequence_bounds(documents: Documents, layout: Layout) -> tuple[int, ...] | None:
    """Return the starts of the sequences of all examples and of masked tokens between them, and the end of the last.

    None: a document contains masked tokens or has its own global tokens, or the queries are not the same tokens as the
    keys.
    """
    num_tokens = layout.num_keys
    if layout.is_cross or layout.num_queries != num_tokens:
        return None
    found = {0}
    for example, listed in enumerate(documents):
        for document in listed:
            if document.has_holes or document.global_positions:
                return None
            found |= {example * num_tokens + document.start, example * num_tokens + document.stop}
        found.add((example + 1) * num_tokens)
    return tuple(sorted(found))


def divided(members: Sequence[Pattern], layout: Layout) -> tuple[list[Pattern], list[Pattern], list[Pattern]]:
    """Return rows (few queries, all keys), columns (all queries, few keys), and all other members."""
    rows, columns, others = [], [], []
    for member in members:
        orders = () if is_drawn(member) else member.token_orders(*layout.extent)
        is_gathered = len(orders) == 1 and orders[0].local is None
        if is_gathered and is_few(orders[0].queries, layout.num_queries) and len(orders[0].keys) == layout.num_keys:
            rows.append(member)
        elif is_gathered and is_few(orders[0].keys, layout.num_keys) and len(orders[0].queries) == layout.num_queries:
            columns.append(member)
        else:
            others.append(member)
    return rows, columns, others


def is_few(tokens: Sequence[int], num_tokens: int) -> bool:
    """Return whether tokens are few enough to be gathered."""
    return len(tokens) <= MOST_GATHERED * num_tokens


def is_drawn(member: Pattern) -> bool:
    """Return whether heads draw their patterns, or have different ones."""
    return member.is_random or member.num_head_patterns > 1


def has_all_keys(row: Pattern, layout: Layout) -> bool:
    """Return whether the queries of a member attend to all keys."""
    everything = ((0, layout.num_keys),)
    queries = row.token_orders(*layout.extent)[0].queries
    return all(row.full_key_intervals(query, query, layout.num_keys) == everything for query in queries)


def core_part(member: Pattern, layout: Layout) -> Part | None:
    """Return the part of a member that is a window for a kernel: a band, or a band of every n-th token."""
    if is_drawn(member):
        return None
    if member.band_limits is not None:
        window = window_of(member.band_limits, layout.num_keys - layout.num_queries - layout.query_offset, layout)
        return None if window is None else Part(window=window)
    orders = member.token_orders(*layout.extent)
    if member.spaced_limits is None or layout.num_queries != layout.num_keys or len(orders) < 2:
        return None
    limits = [None if order.local is None else order.local.band_limits for order in orders]
    window = None if limits[0] is None or len(set(limits)) > 1 else window_of(limits[0], 0, layout)
    order = tuple(token for each in orders for token in each.queries)
    if window is None or len(order) != layout.num_keys or any(each.queries != each.keys for each in orders):
        return None
    bounds = [0]
    for each in orders:
        bounds.append(bounds[-1] + len(each.queries))
    return Part(window=window, order=order, bounds=tuple(bounds))


def window_of(limits: Window, shift: int, layout: Layout) -> Window | None:
    """Return the limits as the kernels count them; None: kernels do not support them.

    limits: tokens before and after the query, itself not counted.
    shift: how far the position that a kernel assumes for a query lies after the query's own.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> layout = Layout(Causal(), 1, 4096, 4096)
    >>> window_of((1023, 0), 0, layout), window_of((2**31 - 1, 0), 0, layout), window_of((9, -1), 0, layout)
    ((1023, 0), (None, 0), None)
    """
    left, right = limits
    found = (None if left is None else left + shift, None if right is None else right - shift)
    if any(limit is not None and limit < 0 for limit in found):
        return None
    # kernels add limits to positions in 32 bits
    longest = max(layout.num_queries, layout.num_keys)
    return None if found[0] is None or found[0] >= longest else found[0], (
        None if found[1] is None or found[1] >= longest else found[1]
    )


def is_expression(pattern: Pattern) -> bool:
    """Return whether a kernel can compute `allowed` from two positions alone.

    Only of classes of this package it is known: in CuTe DSL, -1 % 4 is -1, and `>>` is not complete.
    """
    is_plain = all(atom.is_plain_expression and not atom.table_sizes for atom in pattern.atoms())
    return is_plain and not own_classes(pattern) and not is_drawn(pattern) and pattern.is_traceable


def layout_with(pattern: Pattern, layout: Layout) -> Layout:
    """Return the layout with another pattern, with one head if all heads have the same pattern."""
    if is_drawn(pattern):
        return replace(layout, pattern=pattern)
    return replace(layout, pattern=pattern, num_heads=1, first_head=0, num_model_heads=None)


@cached()
def why_no_parts(layout: Layout, has_documents: bool) -> str | None:
    """Return why kernels cannot compute a layout, without a full stop; None: they can."""
    kind = layout.pattern.kind
    if has_documents and layout.is_drawn_by_document:
        return f"{kind} depends on the length of each document"
    layout = layout.fitted
    groups = layout.head_groups()
    if has_documents and len(groups) > MAX_GROUPS:
        return f"the heads have {len(groups)} patterns, but packed or padded sequences allow at most {MAX_GROUPS}"
    parts = [Part(mask=own) for _, _, own in groups] if has_documents else listed_parts(layout)
    for part in parts:
        is_known = part.mask is None or is_expression(part.mask)
        if not is_known or (part.blocks is not None and listed_blocks(layout_with(part.blocks, layout)) is None):
            return (
                f"{kind} needs tables of keys, or operators, that the kernels do not support, or a class from outside "
                f"this package; they support tables of up to {MOST_BLOCKS} blocks of at least {MIN_BLOCK_TOKENS} "
                "tokens, in one whole sequence"
            )
    return None


def listed_parts(layout: Layout) -> list[Part]:
    """Return the parts of all heads of one whole document."""
    return [part for heads in parts_of(layout, None) for part in heads.parts]


def may_need_mask(layout: Layout, tokens: TokenMask) -> bool:
    """Return whether a kernel may need a function of pairs, such as for masked keys that leave holes in a document."""
    if tokens.is_empty:
        return any(part.has_mask for part in listed_parts(layout.fitted))
    if tokens.key_mask is not None or tokens.global_mask is not None or layout.is_cross:
        return True
    limits = [own.band_limits for _, _, own in layout.fitted.head_groups()]
    are_windows = all(each is not None and window_of(each, 0, layout) is not None for each in limits)
    return not are_windows or layout.num_queries != layout.num_keys


def shares_keys(layout: Layout, has_documents: bool, group: int) -> bool:
    """Return whether different kernels compute some of the `group` heads that share keys."""
    if has_documents:
        sizes = [(first, count) for first, count, _ in layout.fitted.head_groups()]
    else:
        sizes = [(heads.first, heads.count) for heads in parts_of(layout.fitted, None)]
    return any(first % group or count % group for first, count in sizes)


class ListedBlocks(NamedTuple):
    """Blocks of `tokens` tokens, and the blocks of keys that each block of queries attends to.

    table: int32 [heads or 1, blocks of queries, most blocks of keys], padded with -1.
    """

    tokens: int
    table: Tensor


@cached()
def listed_blocks(layout: Layout) -> ListedBlocks | None:
    """Return the blocks of a layout; None: it is not made of blocks, or a block attends to more than MOST_BLOCKS."""
    groups = layout.head_groups()
    tokens = groups[0][2].granularity
    are_equal = all(drawn.is_made_of_blocks and drawn.granularity == tokens for _, _, drawn in groups)
    if not are_equal or tokens < MIN_BLOCK_TOKENS or layout.query_offset:
        return None
    firsts = range(0, layout.num_queries, tokens)
    listed = []
    for _, _, drawn in groups:
        found = [drawn.key_intervals(first, first, layout.num_keys) for first in firsts]
        rows = [
            [block for start, stop in each for block in range(start // tokens, -(-stop // tokens))] for each in found
        ]
        if max(map(len, rows)) > MOST_BLOCKS:
            return None
        listed.append(rows)
    width = max(1, *(len(row) for rows in listed for row in rows))
    table = torch.tensor([[row + [-1] * (width - len(row)) for row in rows] for rows in listed], dtype=torch.int32)
    counts = torch.tensor([count for _, count, _ in groups])
    return ListedBlocks(tokens, table if len(groups) == 1 else table.repeat_interleave(counts, 0))


@cached()
def listed_on(layout: Layout, device: torch.device) -> ListedBlocks:
    """Return `listed_blocks` of a layout that has them, with the table on a device."""
    found = cast(ListedBlocks, listed_blocks(layout))
    return ListedBlocks(found.tokens, send((found.table,), device)[0])


@cached()
def indices_on(part: Part, name: str, device: torch.device) -> Tensor:
    """Return `queries`, `keys` or `order` of a part as a tensor; "back": the place of every token in its order."""
    if name == "back":
        return torch.tensor(part.order).argsort().to(device)
    return torch.tensor(getattr(part, name), dtype=torch.long).to(device)


class Work(NamedTuple):
    """What kernels compute for one whole document: scores of all heads, kernels, and outputs that are joined."""

    num_pairs: int
    num_kernels: int
    num_joined: int


@cached()
def work_of(layout: Layout) -> Work:
    """Return the work of a layout."""
    listed = parts_of(layout, None)
    pairs = sum(heads.count * pairs_of_head(part, layout) for heads in listed for part in heads.parts)
    joined = [max(0, sum(not part.is_whole_row for part in heads.parts) - 1) for heads in listed]
    return Work(pairs, sum(len(heads.parts) for heads in listed), max(joined))


def pairs_of_head(part: Part, layout: Layout) -> int:
    """Return how many scores a kernel computes for one head, in tiles of TILE tokens."""
    num_queries, num_keys = layout.num_queries, layout.num_keys
    if part.queries is not None or part.keys is not None:
        of_queries = num_queries if part.queries is None else len(part.queries)
        return _tiles(of_queries) * _tiles(num_keys if part.keys is None else len(part.keys)) * TILE**2
    if part.has_mask:
        masked = part.masked_layout(layout)
        # the first head stands for all, because each draws the same number of blocks
        first = replace(masked, num_heads=1, num_model_heads=masked.num_model_heads or masked.num_heads)
        table = block_table(first, None, (TILE, TILE), CPU)
        return int((table.num_partial + table.num_full).sum()) * TILE**2
    bounds = part.bounds or (0, num_keys)
    left, right = part.window or (None, None)
    total = 0
    for length in (stop - start for start, stop in zip(bounds, bounds[1:], strict=False)):
        before, after = (length if limit is None else min(limit, length) for limit in (left, right))
        # queries near either end have fewer keys
        pairs = length * (1 + before + after) - (before * (before + 1) + after * (after + 1)) // 2
        total += min(_tiles(length) ** 2 * TILE**2, pairs + length * TILE)
    return total if part.bounds is not None else total * num_queries // num_keys


def _tiles(num_tokens: int) -> int:
    return -(-num_tokens // TILE)
