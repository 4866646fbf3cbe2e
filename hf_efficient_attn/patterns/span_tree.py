"""The binary partition tree of BP-Transformer (Ye et al., 2019).

Tokens attend to short spans nearby and to long spans far away. The tokens are level 0 of the tree; node i of level j
covers the tokens i·2^j to (i+1)·2^j - 1, clipped at the end. All nodes, level by level, form one sequence; the patterns
in this file use positions in this sequence.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, takewhile
from typing import Any, ClassVar, NamedTuple

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.intervals import Intervals, charge, clip, normalize
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import check_bool, check_choice, check_integer, check_length

BUILDERS = ("fixed", "release")
# work for one level if its intervals are tensors, however small
STEPS_PER_LEVEL = 64


def span_tree_nodes(num_tokens: int) -> int:
    """Return how many nodes the tree over `num_tokens` tokens has.

    >>> span_tree_nodes(8), span_tree_nodes(5)
    (15, 11)
    """
    return sum(_level_sizes(num_tokens))


@dataclass(frozen=True)
class SpanTree(Pattern, kind="span_tree"):
    """A span attends to its tokens; a token attends to itself and then, level by level, to the nodes that come next.

    Queries and keys are the nodes of the tree, tokens first, so a sequence is `span_tree_nodes(num_tokens)` long.

    num_nodes: how many nodes of each level a token attends to on each side (the paper's k); one more if k nodes would
        not cover the text exactly.
    is_causal: tokens attend only to nodes on their left. Spans come later in the sequence than the tokens that attend
        to them, so the resolved pattern is not causal in the order of the nodes.
    builder: "release" repeats a bug of the authors' code: if the number of tokens is not a power of two, some tokens
        also attend to a node of the next level that does not lie to their right.

    Raises:
        ConfigurationError: fewer than one node, or an unknown builder.
    """

    num_nodes: int
    is_causal: bool = False
    builder: str = "fixed"

    is_plain_expression: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer(self.kind, "num_nodes", self.num_nodes, at_least=1)
        check_bool(self.kind, "is_causal", self.is_causal)
        check_choice(self.kind, "builder", self.builder, BUILDERS)

    @property
    def depends_on_length(self) -> bool:
        return True

    def causal(self) -> Pattern:
        return SpanTree(self.num_nodes, True, self.builder)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the tree that has `num_keys` nodes.

        Raises:
            InputError: no tree has `num_keys` nodes; the message names the nearest numbers.
        """
        check_length("num_keys", num_keys)
        num_tokens = bisect_left(range(num_keys), num_keys, lo=1, key=span_tree_nodes)
        if span_tree_nodes(num_tokens) != num_keys:
            near = " or ".join(f"{span_tree_nodes(n)} (for {n} tokens)" for n in (num_tokens - 1, num_tokens))
            raise InputError(
                f"A span tree cannot have {num_keys} nodes; give {near}. span_tree_nodes(num_tokens) returns the "
                "number of nodes."
            )
        return SizedSpanTree(num_tokens, self.num_nodes, self.is_causal, self.builder)

    def fitting_length(self, num_tokens: int) -> int:
        """Return the number of nodes of the largest tree with at most `num_tokens` nodes; at least 1."""
        fitting = bisect_left(range(num_tokens + 1), num_tokens + 1, lo=1, key=span_tree_nodes) - 1
        return span_tree_nodes(max(1, fitting))


class _Context(NamedTuple):
    """The nodes of one level that a query attends to on one side, as positions in the sequence.

    side: -1 for left, 1 for right.
    pointer: the node next to those of the previous level.
    start, stop: the nodes that the query attends to, as far as they exist.
    offset, end: all nodes of the level.
    """

    level: int
    side: int
    pointer: Any
    start: Any
    stop: Any
    offset: int
    end: int


@dataclass(frozen=True)
class SizedSpanTree(Pattern, kind="sized_span_tree"):
    """A `SpanTree` over a known number of tokens; `left_only` is its `is_causal`."""

    num_tokens: int
    num_nodes: int
    left_only: bool = False
    builder: str = "fixed"

    is_plain_expression: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer(self.kind, "num_tokens", self.num_tokens, at_least=1)
        check_integer(self.kind, "num_nodes", self.num_nodes, at_least=1)
        check_bool(self.kind, "left_only", self.left_only)
        check_choice(self.kind, "builder", self.builder, BUILDERS)

    def causal(self) -> Pattern:
        return SizedSpanTree(self.num_tokens, self.num_nodes, True, self.builder)

    def allowed(self, query: Any, key: Any) -> Any:
        # the same as `relation_label` >= 0, in far fewer operations
        reads = (query < 0) & (key < 0)
        for level, (offset, _) in enumerate(self._levels):
            reads = reads | ((key < self.num_tokens) & (key >> level == query - offset))
        is_token = query < self.num_tokens
        for context in self._contexts(query):
            reads = reads | (self._reads(context, key) & is_token)
        return reads

    def row_intervals(self, query: Any, most: int) -> list[tuple[Any, Any]] | None:
        charge(STEPS_PER_LEVEL * len(self._levels))
        is_token = query < self.num_tokens
        intervals = []
        for level, (offset, size) in enumerate(self._levels):
            # the tokens of a span of this level; an empty interval for other nodes
            span = (query - offset) * ((query >= offset) & (query < offset + size))
            stop = (span + (query >= offset) * (query < offset + size)) << level
            intervals.append((span << level, stop - (stop - self.num_tokens) * (stop > self.num_tokens)))
        for context in self._contexts(query):
            start = context.start + (context.offset - context.start) * (context.start < context.offset)
            stop = context.stop + (context.end - context.stop) * (context.stop > context.end)
            intervals.append((start * is_token, stop * is_token))
            if self.builder == "release":
                reads = self._misreads(context, context) & is_token
                intervals.append((context.end * reads, (context.end + 1) * reads))
        return intervals

    def relation_label(self, query: Any, key: Any, clip_distance: int) -> Any:
        """Return the number of the relation between two nodes, -1 if `query` does not attend to `key`.

        In level j, clipped to `clip_distance`, the number is (2k+1)·j for a span and its token, plus 2s+1 or 2s+2 for
        the s-th neighbour to the left or to the right. A node that replaces the first neighbour of the next level has
        the label of that neighbour. Positions are integers or integer tensors, as for `allowed`.
        """
        labels_per_level = 2 * self.num_nodes + 1
        label = -1 + (query - query) + (key - key)
        for level, (offset, _) in enumerate(self._levels):
            covers = (key < self.num_tokens) & (key >> level == query - offset)
            label = label + covers * (labels_per_level * min(level, clip_distance) + 1)
        for context in self._contexts(query):
            place = context.side * (key - context.pointer)
            level = min(context.level, clip_distance)
            # the index after the last one belongs to a node that replaces the first neighbour of the next level
            level = level + (min(context.level + 1, clip_distance) - level) * (place // self.num_nodes)
            relation = labels_per_level * level + 2 * (place % self.num_nodes) + (1 if context.side < 0 else 2)
            # the extra node of the "release" builder may already have a label
            reads = self._reads(context, key) & (query < self.num_tokens) & (label < 0)
            label = label + reads * (relation + 1)
        return label

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        intervals = self._neighbours(first_query, min(last_query, self.num_tokens - 1))
        for level, (offset, size) in enumerate(self._levels):
            first, last = max(first_query - offset, 0), min(last_query - offset, size - 1)
            if first <= last:
                intervals.append((first << level, min(last + 1 << level, self.num_tokens)))
        return clip(normalize(intervals), num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if first_query == last_query or last_query >= self.num_tokens:
            return super().full_key_intervals(first_query, last_query, num_keys)
        pairs = zip(_contexts_of(self, first_query), _contexts_of(self, last_query), strict=True)
        common = ((max(last.start, last.offset), min(first.stop, first.end)) for first, last in pairs)
        return clip(normalize(common), num_keys)

    @cached_property
    def _levels(self) -> tuple[tuple[int, int], ...]:
        """The first node and the number of nodes of each level."""
        sizes = _level_sizes(self.num_tokens)
        return tuple(zip(accumulate(sizes, initial=0), sizes, strict=False))

    def _contexts(self, query: Any) -> Iterator[_Context]:
        """Yield the nodes that token `query` attends to besides itself, level by level, first left, then right.

        Each level ends at an even border, so that the next level begins with the parent of the node beyond the border.
        """
        pointer, stop = query - 1, query
        for level, (offset, size) in enumerate(self._levels):
            border = (pointer - self.num_nodes + 1) >> 1
            yield _Context(level, -1, offset + pointer, offset + 2 * border, offset + stop, offset, offset + size)
            pointer, stop = (pointer - self.num_nodes) >> 1, border
        pointer = start = query + 1
        for level, (offset, size) in enumerate(() if self.left_only else self._levels):
            border = (pointer + self.num_nodes + 1) >> 1
            yield _Context(level, 1, offset + pointer, offset + start, offset + 2 * border, offset, offset + size)
            pointer, start = (pointer + self.num_nodes) >> 1, border

    def _reads(self, context: _Context, key: Any) -> Any:
        inside = (key >= context.start) & (key < context.stop) & ((key >= context.offset) & (key < context.end))
        if self.builder != "release":
            return inside
        return inside | ((key == context.end) & self._misreads(context, context))

    def _misreads(self, first: _Context, last: _Context) -> Any:
        """Return whether, as in the release, a query between two contexts attends to the node after the level."""
        is_possible = self.builder == "release" and first.side > 0 and (first.end - first.offset) % 2 == 1
        last_pointer = first.end - self.num_nodes
        return (first.pointer <= last_pointer) & (last.pointer >= last_pointer) & (is_possible and first.end > 1)

    def _neighbours(self, first_query: int, last_query: int) -> list[tuple[int, int]]:
        intervals: list[tuple[int, int]] = []
        if first_query > last_query:
            return intervals
        for first, last in zip(_contexts_of(self, first_query), _contexts_of(self, last_query), strict=True):
            # borders move with the query, and the intervals of neighbouring queries leave no gap
            intervals.append((max(first.start, first.offset), min(last.stop, last.end)))
            if self._misreads(first, last):
                intervals.append((last.end, last.end + 1))
        return intervals


# each block of queries needs the contexts of its first and last query several times
@lru_cache(maxsize=64)
def _contexts_of(tree: SizedSpanTree, query: int) -> tuple[_Context, ...]:
    return tuple(tree._contexts(query))


def _level_sizes(num_tokens: int) -> list[int]:
    halved = accumulate(range(num_tokens.bit_length()), lambda size, _: (size + 1) // 2, initial=num_tokens)
    return [*takewhile(lambda size: size > 1, halved), 1]
