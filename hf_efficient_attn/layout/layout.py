"""Layout: a pattern over the positions of a sequence, and the positions of a call's queries among its keys."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.token_mask import Document
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.intervals import Intervals
from hf_efficient_attn.patterns.pattern import Extent, Pattern, check_own

# (number of the first head, heads of the call, heads of the model)
Heads = tuple[int, int, int]
# (first head, number of heads, their pattern) of consecutive heads with equal patterns
HeadGroups = tuple[tuple[int, int, Pattern], ...]


@dataclass(frozen=True)
class Layout:
    """Which keys the queries of one call may attend to; hashable, so that everything compiled from it can be cached.

    Keys have the positions 0 … `num_keys - 1`, queries `query_offset` … `query_offset + num_queries - 1`, on the same
    axis; in cached decoding the queries are its last positions. With `is_cross` the queries have an axis of their own,
    and the pattern relates positions on it to positions on that of the keys.

    Attributes:
        pattern: as the user gave it; `head_patterns` draws its random parts.
        num_heads: the number of query heads of this call.
        num_queries, num_keys, query_offset: in tokens.
        layer: the index of the layer, on which random patterns depend.
        first_head: the index of the first of these heads in the model.
        num_model_heads: the number of heads of the model, for which the pattern is meant; None if there are no others.
        is_cross: whether queries and keys are tokens of different sequences.
    """

    pattern: Pattern
    num_heads: int
    num_queries: int
    num_keys: int
    query_offset: int = 0
    layer: int = 0
    first_head: int = 0
    num_model_heads: int | None = None
    is_cross: bool = False

    def __post_init__(self) -> None:
        last_first = (self.num_model_heads or self.num_heads) - self.num_heads
        if not 0 <= self.first_head <= last_first:
            raise InputError(
                f"The {self.num_heads} heads from index {self.first_head} on are not among the "
                f"{self.num_model_heads or self.num_heads} of the model. Give num_model_heads, the number of all heads "
                f"of the model, and first_head between 0 and {max(0, last_first)}."
            )
        if self.pattern.needs_two_axes and not self.is_cross:
            raise ConfigurationError(
                "In a CompressedKeys pattern each key stands for several tokens, so queries and keys do not share "
                "positions. Give cross=True, or use another pattern for self-attention."
            )
        self._check_place()
        if self.is_cross and self.pattern.depends_on_length:
            raise ConfigurationError(
                f"A {self.pattern.kind} pattern depends on the length of one sequence, but queries and keys belong to "
                "two (cross=True). Use a pattern that is the same at every length: without random blocks, span "
                "trees, and global tokens counted from the end."
            )

    def _check_place(self) -> None:
        """Raise InputError for queries before the first position, or after the last key on the same axis."""
        most = None if self.is_cross else self.num_keys - self.num_queries
        if most is not None and most < 0:
            raise InputError(
                f"There are {self.num_queries} queries but only {self.num_keys} keys of the same sequence. Give at "
                "least one key per query, or cross=True for queries of another sequence."
            )
        if self.query_offset < 0:
            raise InputError(f"query_offset={self.query_offset} must be at least 0, the position of the first token.")
        if most is not None and self.query_offset > most:
            raise InputError(
                f"{self.num_queries} queries from position {self.query_offset} end at "
                f"{self.query_offset + self.num_queries}, but there are keys for {self.num_keys} positions. Give "
                f"query_offset between 0 and {most}, or cross=True for queries of another sequence."
            )

    def at_step(self, num_keys: int) -> "Layout":
        """Return the layout of a decoding step, whose only query is the last of `num_keys` tokens."""
        return self if num_keys == self.num_keys else replace(self, num_keys=num_keys, query_offset=num_keys - 1)

    @property
    def extent(self) -> Extent:
        """The numbers of queries and keys, and the position of the first query."""
        return Extent(self.num_queries, self.num_keys, self.query_offset)

    @property
    def queries(self) -> slice:
        """The positions of the queries."""
        return slice(self.query_offset, self.query_offset + self.num_queries)

    @property
    def num_positions(self) -> int | None:
        """The number of positions on the queries' axis, up to the last query; None if it is the axis of the keys."""
        return self.query_offset + self.num_queries if self.is_cross else None

    @property
    def fitted(self) -> "Layout":
        """This layout with a length that the pattern fits, from which costs are estimated; itself if its length fits.

        The pattern need not fit the length of a row if it fits the documents in the row, such as images.
        """
        if self.is_cross:
            return self
        num_keys = self.pattern.fitting_length(self.num_keys)
        if num_keys == self.num_keys:
            return self
        num_queries = min(self.num_queries, num_keys)
        offset = min(self.query_offset, num_keys - num_queries)
        return replace(self, num_queries=num_queries, num_keys=num_keys, query_offset=offset)

    @property
    def is_drawn_by_document(self) -> bool:
        """Whether patterns have to be drawn for the length of each document, which the length of the row is not."""
        return self.pattern.depends_on_length or self.fitted is not self

    @property
    def drawn_tokens(self) -> int:
        """The length that patterns are drawn for, which is the length of the longer axis."""
        return max(self.num_keys, self.num_positions or 0)

    @property
    def num_rows(self) -> int:
        """The number of queries in all heads."""
        return self.num_heads * self.num_queries

    @property
    def num_pairs(self) -> int:
        """The number of pairs of a query and a key in all heads, allowed or not."""
        return self.num_heads * self.num_queries * self.num_keys

    @property
    def heads(self) -> Heads:
        """(index of the first head, number of heads of the call, number of heads of the model)."""
        return self.first_head, self.num_heads, self.num_model_heads or self.num_heads

    def head_patterns(self) -> tuple[Pattern, ...]:
        """Return the pattern of each query head, with every random part drawn for these lengths."""
        return _head_patterns(*self._drawn)

    def head_groups(self) -> HeadGroups:
        """Return (first head, number of heads, drawn pattern) of consecutive heads with equal patterns.

        Heads are counted within this call.
        """
        return self._own_groups() if self.num_queries == 1 else _head_groups(*self._drawn)

    def groups_at_any_length(self) -> HeadGroups:
        """Return `head_groups` of a pattern that is the same at every length, without using the lengths."""
        return _groups_of(_undrawn(self.pattern, self.heads).patterns)

    @property
    def _drawn(self) -> tuple[Pattern, Heads, int, int]:
        """Everything that the drawn patterns depend on."""
        return self.pattern, self.heads, self.drawn_tokens, self.layer

    # not cached: every decoding step has another length, and caching its groups would take longer than finding them
    def _own_groups(self) -> HeadGroups:
        own = _undrawn(self.pattern, self.heads)
        if not own.are_alike:
            return _groups_of(_draw(*self._drawn))
        return ((0, self.num_heads, own.patterns[0].resolve(self.drawn_tokens, self.layer)),)

    def intervals_of_heads(self) -> tuple[Intervals, ...]:
        """Return the keys that each head of the only query attends to."""
        read: list[Intervals] = []
        for _, count, pattern in self.head_groups():
            read += [pattern.key_intervals(self.query_offset, self.query_offset, self.num_keys)] * count
        return tuple(read)

    def of_document(self, document: Document) -> "Layout":
        """Return the layout of one document, whose positions start at 0; it may have no queries.

        Its global tokens attend to all others and all others attend to them, as far as a causal pattern allows.
        """
        is_whole = document.start == 0 and document.stop == self.num_keys and document.queries is None
        if is_whole and not document.global_positions:
            return self
        start, stop = document.queries or (document.start, document.stop)
        first = max(self.query_offset, start)
        last = max(first, min(self.query_offset + self.num_queries, stop))
        chosen, num_keys = document.global_positions, document.stop - document.start
        pattern = _with_globals(self.pattern, chosen) if chosen else self.pattern
        offset = min(first, stop) - start
        return replace(self, pattern=pattern, num_queries=last - first, num_keys=num_keys, query_offset=offset)


def drawn_layer(pattern: Pattern, layer: int) -> int:
    """Return the layer for which a pattern is drawn: 0 if all layers are alike, so that they share cached results."""
    return layer if pattern.is_random else 0


class Undrawn(NamedTuple):
    """The patterns of some heads before random parts are drawn, and whether they are one pattern without such parts."""

    patterns: tuple[Pattern, ...]
    are_alike: bool


@cached()
def _undrawn(pattern: Pattern, heads: Heads) -> Undrawn:
    first, count, total = heads
    own = pattern.heads(total)[first : first + count]
    return Undrawn(own, not pattern.is_random and all(one == own[0] for one in own))


def _draw(pattern: Pattern, heads: Heads, num_tokens: int, layer: int) -> tuple[Pattern, ...]:
    own, total = _undrawn(pattern, heads).patterns, heads[2]
    return tuple(one.resolve(num_tokens, layer, head, total) for head, one in enumerate(own, heads[0]))


def _groups_of(drawn: tuple[Pattern, ...]) -> HeadGroups:
    groups: list[tuple[int, int, Pattern]] = []
    for head, pattern in enumerate(drawn):
        if groups and groups[-1][2] == pattern:
            first, count, _ = groups[-1]
            groups[-1] = (first, count + 1, pattern)
        else:
            groups.append((head, 1, pattern))
    return tuple(groups)


_head_patterns = cached()(_draw)


@cached()
def _head_groups(pattern: Pattern, heads: Heads, num_tokens: int, layer: int) -> HeadGroups:
    groups = _groups_of(_head_patterns(pattern, heads, num_tokens, layer))
    for _, _, drawn in groups:
        check_own(drawn, num_tokens)
    return groups


@cached()
def _with_globals(pattern: Pattern, positions: tuple[int, ...]) -> Pattern:
    chosen = GlobalTokens(positions)
    return pattern | (chosen.causal() if pattern.is_causal else chosen)


# The positions of a call's queries on their axis, given by a number or, while compiling, by a tensor.


def first_query(layout: Layout, query_start: Tensor | None) -> int | Tensor:
    """Return the position of the first query; query_start: integer scalar that replaces the layout's `query_offset`."""
    return layout.query_offset if query_start is None else query_start


def query_rows(layout: Layout, query_start: Tensor | None) -> slice | Tensor:
    """Return the positions of the queries, as an index into a dimension of tensors.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> layout = Layout(Causal(), num_heads=1, num_queries=2, num_keys=8, query_offset=6)
    >>> query_rows(layout, None), query_rows(layout, torch.tensor(3))
    (slice(6, 8, None), tensor([3, 4]))
    """
    if query_start is None:
        return layout.queries
    return query_start + torch.arange(layout.num_queries, device=query_start.device)
