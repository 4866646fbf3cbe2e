"""A `SpanTree` with one span node after each token: 2n nodes for n tokens, at every length.

Node 2t is token t. Node 2t + 1 is the span whose left half ends with token t. Its size b is the largest power of two
that divides 2t + 2, and it covers the tokens from t + 1 - b / 2 to t + b / 2, clipped at the end of the text. If a text
ends within the left half of a span, the span has no node. The largest span with a node that begins at the same token
covers the same tokens and replaces it. Spans that reach beyond the end are therefore the same as in a `SpanTree`.

Every token thus has two nodes, whatever follows it. A text that gets longer only adds nodes, and the nodes of padded or
packed documents lie at the positions of their tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.intervals import Intervals, charge, counting, normalize
from hf_efficient_attn.patterns.pattern import Pattern, TokenOrder
from hf_efficient_attn.patterns.serialization import check_bool, check_integer, check_length

# spans have at most 2 ** MAX_LEVELS tokens
MAX_LEVELS = 31
# the length of a block of spans of one size, which attend to disjoint tokens
SPANS_PER_BLOCK = 8
# the largest spans are computed together with all tokens, up to this number of pairs; that costs less than a block for
# each size
JOINED_PAIRS = 1 << 16


@dataclass(frozen=True)
class InterleavedSpanTree(Pattern, kind="interleaved_span_tree"):
    """A span attends to its tokens; a token attends to itself and then, size by size, to the nodes that come next.

    Queries and keys are nodes, two for each token: token t is node 2t.

    num_nodes: how many nodes of each size a token attends to on each side (the paper's k); one more if k nodes would
        not cover the text exactly.
    left_only: tokens attend only to nodes on their left. A span lies in the middle of its tokens, so the pattern is not
        causal in the order of the nodes; but a token attends to no node that depends on a later token.
    num_tokens: the length of the text. The nodes on the right of a token depend on where the text ends. None: the
        length is not known yet, or nothing depends on it because of `left_only`.

    Raises:
        ConfigurationError: fewer than one node or token.

    >>> print(InterleavedSpanTree(1, left_only=True).draw(8))
    ■⬚⬚⬚⬚⬚⬚⬚
    ■⬚■⬚⬚⬚⬚⬚
    ■⬚■⬚⬚⬚⬚⬚
    ■⬚■⬚■⬚■⬚
    ■⬚■⬚■⬚⬚⬚
    ⬚⬚⬚⬚■⬚■⬚
    ⬚■⬚⬚■⬚■⬚
    ■⬚■⬚■⬚■⬚
    """

    num_nodes: int
    left_only: bool = False
    num_tokens: int | None = None

    is_of_nodes: ClassVar[bool] = True
    is_plain_expression: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer(self.kind, "num_nodes", self.num_nodes, at_least=1)
        check_bool(self.kind, "left_only", self.left_only)
        if self.num_tokens is not None:
            check_integer(self.kind, "num_tokens", self.num_tokens, at_least=1)

    @property
    def depends_on_length(self) -> bool:
        return not self.left_only and self.num_tokens is None

    def causal(self) -> Pattern:
        return InterleavedSpanTree(self.num_nodes, True, self.num_tokens)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the tree of `num_keys` / 2 tokens.

        Raises:
            InputError: an odd number of nodes.
        """
        if not self.depends_on_length:
            return self
        check_length("num_keys", num_keys)
        if num_keys % 2:
            raise InputError(
                f"An interleaved span tree has two nodes per token, so it cannot have {num_keys} nodes; give "
                f"{num_keys - 1} or {num_keys + 1}."
            )
        return replace(self, num_tokens=num_keys // 2)

    def fitting_length(self, num_tokens: int) -> int:
        """Return the next even number that is not larger, at least 2, if the end of the text matters."""
        return max(2, num_tokens - num_tokens % 2) if self.depends_on_length else num_tokens

    def allowed(self, query: Any, key: Any) -> Any:
        if self.depends_on_length:
            self._needs_length()
        first, size = extent_of(query)
        # the tokens of the query's node; for a token, the token itself
        reads = (key % 2 == 0) & (key >> 1 >= first) & (key >> 1 < first + size)
        is_token, token = query % 2 == 0, query >> 1
        for before in (True,) if self.left_only else (True, False):
            reads = reads | (is_token & self._is_next(token, key, before))
        return reads if self.num_tokens is None else reads & (key < 2 * self.num_tokens)

    def relation_label(self, query: Any, key: Any, clip_distance: int) -> Any:
        """Return the number of the relation between two nodes; an arbitrary one if `query` does not attend to `key`.

        The numbers are those of `SizedSpanTree.relation_label`, and do not depend on the length. A span that replaces
        another span, which has no node, has the label of the replaced span.
        """
        token, labels_per_level = query >> 1, 2 * self.num_nodes + 1
        first, size = extent_of(query)
        own = (key % 2 == 0) & (key >> 1 >= first) & (key >> 1 < first + size)
        label = own * (labels_per_level * level_of(size, clip_distance))
        start, size = extent_of(key)
        for before in (True,) if self.left_only else (True, False):
            edge, gap = (start + size, token - start - size) if before else (start, start - token - 1)
            reach = gap + self.num_nodes
            if not before:
                size = self._read_size(reach, edge)
            place = clamped((reach - 1) // size + 1 - self.num_nodes, self.num_nodes)
            # the place after the last one is the first place of the next level
            is_next = place // self.num_nodes
            # ONNX has no shift by a tensor
            level = level_of(size + size * is_next, clip_distance)
            relation = labels_per_level * level + 2 * (place % self.num_nodes) + (1 if before else 2)
            label = label + ((gap >= 0) & (own == 0)) * relation
        return label

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        limit = num_keys if self.num_tokens is None else min(num_keys, 2 * self.num_tokens)
        first, last = (first_query + 1) // 2, last_query // 2
        keys = set(range(2 * first, min(2 * last + 1, limit), 2))
        for size, start, stop in self._nodes(first, last, limit):
            keys.update(range((2 * start + 1) * size - 1, (2 * stop - 1) * size, 2 * size))
        for query in range(first_query | 1, last_query + 1, 2):
            start, size = extent_of(query)
            keys.update(range(2 * start, min(2 * (start + size), limit), 2))
        return normalize((key, key + 1) for key in sorted(keys))

    def num_keys_of(self, query: int, num_keys: int) -> int:
        limit = num_keys if self.num_tokens is None else min(num_keys, 2 * self.num_tokens)
        start, size = extent_of(query)
        own = len(range(2 * start, min(2 * (start + size), limit), 2))
        if query % 2:
            return own
        return own + sum(stop - start for _, start, stop in self._nodes(query // 2, query // 2, limit))

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        with counting(self):
            return sum(self._counted(query, num_keys) for query in range(query_offset, query_offset + num_queries))

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return one order for tokens, with keys sorted by span size, and one order for the spans of each size.

        The few spans of the largest sizes share one order without a local pattern; in short texts, it is the order of
        all spans.
        """
        is_whole = query_offset == 0 and num_queries == num_keys and num_keys % 2 == 0
        if not is_whole or self.num_tokens not in (None, num_keys // 2):
            return super().token_orders(num_queries, num_keys, query_offset)
        sizes = [1 << level for level in range(num_keys.bit_length())]
        keys = [range(size - 1, num_keys, 2 * size) for size in sizes]
        by_size = tuple(key for of_size in keys for key in of_size)
        tokens = TokenOrder(keys[0], by_size, TokensBySize(self, num_keys))
        # nodes of at least this size are `size` positions apart
        large = next(size for size in sizes[1:] if len(range(size - 1, num_keys, size)) * len(keys[0]) <= JOINED_PAIRS)
        spans = [(size, nodes) for size, nodes in zip(sizes[1:], keys[1:], strict=True) if size < large]
        joined = range(large - 1, num_keys, large)
        return (
            tokens,
            *(TokenOrder(nodes, keys[0], TokensOfSpans(size)) for size, nodes in spans),
            *([TokenOrder(joined, keys[0], None)] if joined else []),
        )

    def _counted(self, query: int, num_keys: int) -> int:
        charge(1)
        return self.num_keys_of(query, num_keys)

    def _is_next(self, token: Any, key: Any, before: bool) -> Any:
        """Return whether a token attends to a node on one side; each size is used until the next larger one begins.

        A token attends to a node of size b, `gap` tokens away, if b · (2k - 1) < 2 · (gap + k) and one of these holds:
        b · (2k - 1) is at least gap + k; or no larger node has this edge, and 2k times the largest power of two that
        divides the edge is at least gap + k.
        """
        start, size = extent_of(key)
        edge, gap = (start + size, token - start - size) if before else (start, start - token - 1)
        reach, k = gap + self.num_nodes, self.num_nodes
        largest = edge & -edge
        stands_in = size == largest
        if not before and self.num_tokens is not None:
            # the next larger span with this edge has no node
            stands_in = stands_in | (start + size > self.num_tokens)
        is_far = size * (2 * k - 1) < 2 * reach
        return (gap >= 0) & is_far & ((reach <= size * (2 * k - 1)) | (stands_in & (reach <= largest * 2 * k)))

    def _read_size(self, reach: Any, edge: Any) -> Any:
        """Return the size of the span with this left edge that a token attends to, whether it has a node or not."""
        largest, size = edge & -edge, 1 + (edge - edge)
        for _ in range(MAX_LEVELS):
            # ONNX has no shift by a tensor, and torch exports none by a bool
            size = size + size * ((size * (2 * self.num_nodes - 1) < reach) & (2 * size <= largest))
        return size

    def _nodes(self, first: int, last: int, limit: int) -> Iterator[tuple[int, int, int]]:
        """Yield (size, start, stop): the nodes start … stop - 1 of a size that tokens first..last attend to.

        The nodes lie on both sides of the tokens, and before position `limit`.
        """
        if first > last:
            return
        k, size = self.num_nodes, 1
        while size <= last:
            # half a size is added before rounding down; tokens, of size 1, have no half
            stop = (last - 1 + k - k * size + size // 2) // size if size > 1 else last
            start = max(0, 2 * ((first - 1 + k - 2 * k * size + size) // (2 * size)))
            stop = min(stop, (limit + size) // (2 * size))
            if start < stop:
                yield size, start, stop
            size *= 2
        yield from () if self.left_only else self._nodes_right(first, last, limit)

    def _nodes_right(self, first: int, last: int, limit: int) -> Iterator[tuple[int, int, int]]:
        k, size, num_tokens = self.num_nodes, 1, self.num_tokens or 0
        while size < num_tokens:
            start = (first + 1 - k + k * size + size // 2) // size if size > 1 else first + 1
            stop = 2 * ((last + 1 - k + 2 * k * size + size) // (2 * size))
            existing = (2 * num_tokens + size) // (2 * size)
            inside = min(stop, existing, (limit + size) // (2 * size))
            if start < inside:
                yield size, start, inside
            if start <= existing < stop and existing * size < num_tokens:
                # the text ends within the left half of this span, so a smaller span replaces it
                smaller = 2 << (num_tokens - existing * size).bit_length() - 1
                index = existing * size // smaller
                if (2 * index + 1) * smaller - 1 < limit:
                    yield smaller, index, index + 1
            size *= 2


@dataclass(frozen=True)
class TokensBySize(Pattern):
    """The keys of tokens if keys are sorted by span size; the keys of each size are neighbours."""

    tree: InterleavedSpanTree
    num_places: int

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        offsets, offset, size = {}, 0, 1
        while size <= num_keys:
            offsets[size] = offset
            offset += len(range(size - 1, self.num_places, 2 * size))
            size *= 2
        read = [(first_query, last_query + 1)]
        for size, start, stop in self.tree._nodes(first_query, last_query, self.num_places):
            read.append((offsets[size] + start, offsets[size] + stop))
        return normalize(read)


@dataclass(frozen=True)
class TokensOfSpans(Pattern):
    """The keys of spans of one size: queries are these spans, and keys are tokens."""

    size: int

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return ((first_query * self.size, min((last_query + 1) * self.size, num_keys)),)

    @property
    def granularity(self) -> int:
        return SPANS_PER_BLOCK


def extent_of(node: Any) -> tuple[Any, Any]:
    """Return the first token of a node and its size in tokens; a token is a node of size 1."""
    size = (node + 1) & -(node + 1)
    return (node + 1 - size) >> 1, size


def level_of(size: Any, most: int) -> Any:
    """Return the level of a node, at most `most`: tokens are level 0, and sizes double."""
    level = size - size
    for number in range(1, most + 1):
        level = level + (size >= 1 << number)
    return level


def clamped(number: Any, most: int) -> Any:
    """Return the number, clipped to the range from 0 to `most`."""
    number = number * (number > 0)
    return number - (number - most) * (number > most)
