"""The base class of all patterns.

A pattern is a relation between absolute positions: query q may attend to key k. If queries and keys belong to different
sequences, each position is counted in its own sequence. For a range of queries, a pattern returns two sets of
intervals: an upper bound (keys that at least one query attends to) and a lower bound (keys that all queries attend to).
The algebra is interval arithmetic on these bounds, so that no method ever enumerates all pairs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from operator import is_
from typing import Any, ClassVar, NamedTuple, NoReturn

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.patterns.intervals import (
    CrossingError,
    Intervals,
    MovingIntervals,
    checked_intervals,
    complement,
    intersect,
    normalize,
    pairs_of,
    size,
    work_budget,
)
from hf_efficient_attn.patterns.serialization import check_head, check_length, read_pattern, write_pattern


class Operators:
    """The operators `|`, `&` and `~` of every pattern, and its causal form."""

    def __or__(self: "Pattern", other: "Pattern") -> "Pattern":  # type: ignore[misc]
        if not isinstance(other, Operators):
            return NotImplemented
        from hf_efficient_attn.patterns.algebra import Union

        return self if self == other else Union((self, other))

    def __and__(self: "Pattern", other: "Pattern") -> "Pattern":  # type: ignore[misc]
        if not isinstance(other, Operators):
            return NotImplemented
        from hf_efficient_attn.patterns.algebra import Intersection

        return self if self == other else Intersection((self, other))

    def __invert__(self: "Pattern") -> "Pattern":  # type: ignore[misc]
        from hf_efficient_attn.patterns.algebra import Complement

        return Complement(self)

    def causal(self: "Pattern") -> "Pattern":  # type: ignore[misc]
        """Return the causal form: no query attends to a later key."""
        from hf_efficient_attn.patterns.bands import Causal

        return self if self.is_causal else self & Causal()


# Token orders in which a pattern is easy to compute.


class Extent(NamedTuple):
    """The number of queries and keys, and the position of the first query."""

    num_queries: int
    num_keys: int
    query_offset: int = 0


@dataclass(frozen=True)
class TokenOrder:
    """An order of some tokens in which a pattern is easy to compute, usually because it is a band in this order.

    queries, keys: absolute positions, in this order.
    local: the pattern on indices in this order, which may allow more pairs than the pattern itself; None: every query
        attends to every key.
    local_query_offset: the a-th query is at the local position a + local_query_offset, the b-th key at b.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    local: "Pattern | None"
    local_query_offset: int = 0

    @property
    def step(self) -> int:
        """The distance between neighbours if queries and keys are one residue class each; 0 otherwise."""
        if isinstance(self.queries, range) and isinstance(self.keys, range) and self.queries.step == self.keys.step:
            return self.keys.step
        return 0


# Bounds that patterns know about themselves, and functions that combine the bounds of a pattern's parts.


class DecodingReach(NamedTuple):
    """What a token attends to in causal decoding: at most the first `num_first` and the last `left` tokens before it.

    The tokens in between can be dropped, and the others moved together, without changing what the token attends to.
    `left` None: all tokens before it.
    """

    num_first: int
    left: int | None


class GlobalPosition(NamedTuple):
    """A position named by a pattern, in blocks of `block_tokens` tokens; negative positions count from the end."""

    position: int
    block_tokens: int

    @property
    def unit(self) -> str:
        """The words that follow the position in a message."""
        return f" in blocks of {self.block_tokens} tokens" if self.block_tokens > 1 else ""

    def is_within(self, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` tokens contains the position."""
        num_blocks = -(-num_tokens // self.block_tokens)
        return -num_blocks <= self.position < num_blocks


class DrawnBlocks(NamedTuple):
    """How many blocks each row of blocks draws at random, and the length of a block in tokens."""

    num_blocks: int
    block_tokens: int


# every query attends to all tokens before itself
ALL_BEFORE = DecodingReach(0, None)


def joined_reach(reaches: Iterable[DecodingReach | None]) -> DecodingReach | None:
    """Return the smallest reach that includes all of these; None: it is unknown.

    >>> joined_reach([DecodingReach(2, 0), DecodingReach(0, 8)])
    DecodingReach(num_first=2, left=8)
    """
    listed = list(reaches)
    if ALL_BEFORE in listed:
        return ALL_BEFORE
    known = [reach for reach in listed if reach is not None]
    if len(known) < len(listed):
        return None
    return DecodingReach(max(reach.num_first for reach in known), farthest([reach.left for reach in known]))


def farthest(limits: Sequence[int | None]) -> int | None:
    """Return the largest of the limits; None if one of them is unknown."""
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def nearest(limits: Sequence[int | None]) -> int | None:
    """Return the smallest of the known limits; None if none is known."""
    return min((limit for limit in limits if limit is not None), default=None)


def common_period(periods: Iterable[int | None]) -> int | None:
    """Return the least common multiple of the periods; None if one is unknown."""
    listed = list(periods)
    return None if None in listed else lcm(*(period for period in listed if period))


# Pattern classes from outside this package: whether `allowed` and `key_intervals` agree.


# pairs that are compared at a length, but no fewer than those of two queries; multiples of GOLDEN spread the queries
OWN_PAIRS, GOLDEN = 1 << 15, 0.618034


def own_classes(pattern: "Pattern") -> list[type["Pattern"]]:
    """Return the classes of a pattern that are from outside this package, in the order of their names."""
    # a copy of this package on the Hub has all its modules in one folder
    package, found, left = Pattern.__module__.rpartition(".")[0] + ".", set(), [pattern]
    while left:
        each = left.pop()
        left += each.parts
        if not type(each).__module__.startswith(package):
            found.add(type(each))
    return sorted(found, key=lambda cls: cls.__name__)


def check_own(pattern: "Pattern", num_keys: int, num_pairs: int = OWN_PAIRS) -> None:
    """Raise ConfigurationError if `key_intervals` of classes from outside this package contradict `allowed`.

    The keys of some queries are compared, each alone and together with the next one.
    """
    if not own_classes(pattern):
        return
    count = max(2, num_pairs // (2 * num_keys))
    spread = {int(index * GOLDEN * num_keys) % num_keys for index in range(count)}
    for query in range(num_keys) if count >= num_keys else spread:
        for last in {query, min(query + 1, num_keys - 1)}:
            _compare_keys(pattern, query, last, num_keys)


def _compare_keys(pattern: "Pattern", first: int, last: int, num_keys: int) -> None:
    """Compare the intervals of the queries first..last (inclusive) with the keys that `allowed` gives them."""
    found = checked_intervals(pattern.kind, pattern.key_intervals(first, last, num_keys), num_keys)
    keys = (key for key in range(num_keys) if any(pattern.allowed(query, key) for query in range(first, last + 1)))
    allowed = normalize((key, key + 1) for key in keys)
    missing = intersect(allowed, complement(normalize(found), num_keys))
    others = intersect(found, complement(allowed, num_keys)) if first == last else ()
    if missing or others:
        query = f"query {first}" if first == last else f"one of the queries {first} to {last}"
        raise ConfigurationError(
            f"{', '.join(cls.__name__ for cls in own_classes(pattern))}: key_intervals({first}, {last}, {num_keys}) "
            f"{'leaves out' if missing else 'holds'} key {(missing or others)[0][0]}, but `allowed` "
            f"{'lets' if missing else 'does not let'} {query} attend to it. The intervals must hold every key that any "
            "of the queries attends to, and for a single query no others."
        )


# A pattern drawn with one character per pair, or per square of pairs.


MAX_DRAWN_PAIRS = 1 << 22
# enough for all queries of up to 512 tokens
DRAWN_OWN_PAIRS = 1 << 19


def drawn(
    pattern: "Pattern", num_queries: int, num_keys: int | None, layer: int, head: int, query_offset: int, step: int = 1
) -> str:
    """Return the drawing of `Pattern.draw`, in which a sign stands for step × step pairs: ■ if any is allowed."""
    check_head(head)
    check_length("step", step)
    num_keys = query_offset + num_queries if num_keys is None else num_keys
    check_length("num_queries", num_queries)
    check_length("num_keys", num_keys)
    num_signs = -(-num_keys // step)
    # the keys of every query are computed, whatever the step
    if num_queries * num_signs > MAX_DRAWN_PAIRS:
        raise InputError(
            f"The drawing would need {num_queries} × {num_signs} signs; at most {MAX_DRAWN_PAIRS} are drawn. Draw "
            "fewer tokens, or use a larger step."
        )
    for named in pattern.global_positions():
        if not named.is_within(num_keys):
            raise InputError(
                f"The global position {named.position}{named.unit} of the pattern lies outside of {num_keys} tokens, "
                f"so the drawing would not show it. Draw at least {_tokens_to(*named)} tokens."
            )
    num_heads = pattern.num_head_patterns * (1 + head // pattern.num_head_patterns)
    resolved = pattern.resolve(num_keys, layer, head, num_heads)
    check_own(resolved, num_keys, DRAWN_OWN_PAIRS)
    queries = range(query_offset, query_offset + num_queries)
    lines = []
    with work_budget("Drawing this pattern"):
        for first in range(0, num_queries, step):
            read = [
                checked_intervals(resolved.kind, resolved.key_intervals(query, query, num_keys), num_keys)
                for query in queries[first : first + step]
            ]
            signs = [(start // step, -(-stop // step)) for each in read for start, stop in each]
            lines.append(_line(normalize(signs), num_signs))
    return "\n".join(lines)


def _line(intervals: Intervals, num_signs: int) -> str:
    unread = complement(intervals, num_signs)
    signs = sorted([(start, stop, "■") for start, stop in intervals] + [(start, stop, "⬚") for start, stop in unread])
    return "".join(sign * (stop - start) for start, stop, sign in signs)


def _tokens_to(position: int, block_tokens: int) -> int:
    """Return how many tokens a sequence needs to contain a global position; negative positions count from its end."""
    return (position if position >= 0 else -position - 1) * block_tokens + 1


class Pattern(Operators):
    """Which query may attend to which key: a hashable value, equal by content, that can be saved as JSON and drawn.

    A new pattern is a frozen dataclass `class Name(Pattern, kind="name")`. Once the class exists, it works wherever a
    pattern works, including expressions and saved configs; nothing has to be registered. In this example, tokens attend
    to their own line, and all lines have the same length (`clip` and `normalize` come from `patterns.intervals`):

        @dataclass(frozen=True)
        class Line(Pattern, kind="line"):
            tokens: int

            def allowed(self, query, key):
                return query // self.tokens == key // self.tokens

            def key_intervals(self, first_query, last_query, num_keys):
                first, last = first_query // self.tokens, last_query // self.tokens
                return clip(normalize([(first * self.tokens, (last + 1) * self.tokens)]), num_keys)

    Its methods come in groups, in this order:

    - what it must define: `allowed` and `key_intervals`. If the allowed pairs depend on the length, the layer or the
      head, it instead defines `resolve`, which returns the pattern for them, and `depends_on_length` or `is_random`. If
      its keys are not tokens, it also defines `needs_two_axes`;
    - what makes it faster, or usable in more places: every default is correct, and means that nothing is known;
    - what it defines if it holds other patterns: `parts` and `with_parts`;
    - what it defines if it uses lookup tables: `with_tables`, `table_sizes` and `is_traceable`.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type["Pattern"]]] = {}
    # whether keys are selected by the contents of queries and keys; such a pattern cannot be part of another one
    chooses_by_content: ClassVar[bool] = False
    # whether queries and keys are nodes of a tree, and not tokens
    is_of_nodes: ClassVar[bool] = False
    # whether CuTe DSL can compute `allowed`: no `>>`, and `%` of numbers below 0 only to compare the result with 0
    is_plain_expression: ClassVar[bool] = True

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            known = Pattern.kinds.get(kind)
            # a cell of a notebook defines the same class again
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigurationError(
                    f"{cls.__qualname__}: another pattern is already called {kind!r}, "
                    f"{known.__module__}.{known.__qualname__}. Give the class another kind."
                )
            cls.kind = kind
            Pattern.kinds[kind] = cls

    # What a pattern must define

    def allowed(self, query: Any, key: Any) -> Any:
        """Return whether `query` may attend to `key`: a bool for integers, a bool tensor for tensors (broadcast).

        Positions are absolute. The method uses only operators, so that the same line also runs inside the mask function
        of a kernel.

        Raises:
            ConfigurationError: the pattern depends on the length; call `resolve` first.
        """
        self._needs_length()

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        """Return intervals of all keys that any query of first_query..last_query (inclusive) may attend to.

        An interval (start, stop) holds the keys start, …, stop − 1. The intervals are exact for one query. For several
        queries they may hold more, but those of this package's atoms and their unions are exact. They are sorted,
        disjoint, not empty, and between 0 and num_keys: `clip(normalize(found), num_keys)` from `patterns.intervals`
        converts any list of intervals to this form. If a pattern is from outside this package, attention compares the
        intervals of some queries with `allowed`.
        """
        self._needs_length()

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> "Pattern":
        """Return the pattern for this length, layer and head, with random blocks drawn and positions counted from 0.

        Raises:
            InputError: a length that the pattern cannot have.
            ConfigurationError: the patterns of a `PerHead` cannot be divided evenly among `num_heads` heads.
        """
        return self._with_changed(part.resolve(num_keys, layer, head, num_heads) for part in self.parts)

    @property
    def depends_on_length(self) -> bool:
        """Whether the pattern that `resolve` returns depends on the number of keys."""
        return any(part.depends_on_length for part in self.parts)

    @property
    def is_random(self) -> bool:
        """Whether the pattern that `resolve` returns depends on the layer or the head."""
        return any(part.is_random for part in self.parts)

    @property
    def needs_two_axes(self) -> bool:
        """Whether queries and keys must belong to different sequences."""
        return any(part.needs_two_axes for part in self.parts)

    # What makes it faster, or usable in more places

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        """Return intervals of keys that every query of first_query..last_query (inclusive) may attend to.

        They are exact for one query, and a lower bound otherwise.
        """
        return self.key_intervals(first_query, last_query, num_keys) if first_query == last_query else ()

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        """Return the keys of each query of first_query..last_query as intervals whose ends may move with the query.

        Raises:
            CrossingError: there is no such form for all of these queries, or it is unknown. Never raised for a single
                query.
        """
        intervals = self.key_intervals(first_query, last_query, num_keys)
        if first_query != last_query and intervals != self.full_key_intervals(first_query, last_query, num_keys):
            raise CrossingError
        return intervals

    def num_keys_of(self, query: int, num_keys: int) -> int:
        """Return how many keys `query` attends to."""
        return size(self.key_intervals(query, query, num_keys))

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        """Return how many pairs (query, key) are allowed for the queries query_offset, query_offset + 1, ...

        Raises:
            InputError: counting would take too long.
        """
        return pairs_of(self, num_queries, num_keys, query_offset)

    @property
    def period(self) -> int | None:
        """A number such that adding a multiple of it to both query and key changes nothing; None: unknown."""
        return None

    @property
    def granularity(self) -> int:
        """The length of its blocks in tokens, the least common multiple of several lengths; 1: it has no blocks."""
        return lcm(*(part.granularity for part in self.parts))

    @property
    def is_made_of_blocks(self) -> bool:
        """Whether each square of `granularity` × `granularity` pairs is either allowed entirely or not at all.

        Squares are counted from position 0.
        """
        parts = self.parts
        return bool(parts) and all(p.is_made_of_blocks and p.granularity == self.granularity for p in parts)

    @property
    def max_tokens_ahead(self) -> int | None:
        """How far after its query a key can be. -1: only before it; 0: up to the query itself; None: no known limit."""
        return None

    @property
    def unread_tokens_ahead(self) -> int | None:
        """How far after its query a key that is not allowed can be, counted as in `max_tokens_ahead`."""
        return None

    @property
    def band_limits(self) -> tuple[int | None, int | None] | None:
        """(left, right) of the `Band` that allows exactly the same pairs; None: there is none, or this is unknown."""
        return None

    @property
    def spaced_limits(self) -> tuple[int | None, int | None, int] | None:
        """(left, right, step) of the `Dilated` that allows exactly the same pairs; None: as for `band_limits`."""
        return None

    def row_intervals(self, query: Any, most: int) -> list[tuple[Any, Any]] | None:
        """Return intervals (start, stop) that together hold the keys of `query`; None: `allowed` is at least as fast.

        Intervals may be empty and may overlap; more than about `most` of them are not worth it. `query` may also be an
        integer tensor whose last axis has one entry. Each end is then a tensor of the same shape, or has one entry per
        interval on the last axis.
        """
        return None

    def members(self) -> tuple["Pattern", ...]:
        """Return a few patterns whose union is this pattern, none of them a union itself; only `self` if too many.

        Each member is computed separately, without the pairs of earlier members.
        """
        return (self,)

    @property
    def num_members(self) -> int:
        """The number of members it would have without a limit, as far as it is known without listing them."""
        return len(self.members())

    def subsample(self, step: int) -> "Pattern | None":
        """Return the pattern on the positions c, c + step, c + 2·step, ... in local coordinates 0, 1, 2, ...

        None: it is not the same for every residue class c, or unknown.
        """
        return None

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return token orders in which the pattern is easy to compute. Every allowed pair lies in one of them.

        An order may hold pairs that are not allowed, and two orders may share pairs.
        """
        return (TokenOrder(range(query_offset, query_offset + num_queries), range(num_keys), self, query_offset),)

    def decoding_reach(self) -> DecodingReach | None:
        """Return which first and last tokens a causal pattern can attend to; None: it may also attend to others."""
        return None

    def global_positions(self) -> tuple[GlobalPosition, ...]:
        """Return the positions that the pattern names. An input should contain all of them."""
        return tuple(position for part in self.parts for position in part.global_positions())

    def fitting_length(self, num_tokens: int) -> int:
        """Return an allowed length of an input near this one; the same length if all are allowed."""
        for part in self.parts:
            num_tokens = part.fitting_length(num_tokens)
        return num_tokens

    def grid_shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """Return the shapes of the pattern's grids of tokens; None in a shape: any size."""
        return tuple(shape for part in self.parts for shape in part.grid_shapes())

    def drawn_blocks(self) -> DrawnBlocks | None:
        """Return how many random blocks it draws for each block of queries; None: it is another kind of pattern."""
        return None

    # What it defines if it holds other patterns

    @property
    def parts(self) -> tuple["Pattern", ...]:
        """The patterns that this one is made of; empty for an atom."""
        return ()

    def with_parts(self, parts: tuple["Pattern", ...]) -> "Pattern":
        """Return the same pattern made of other parts."""
        return self

    def composed(self, of: Callable[["Pattern", Any, Any], Any], query: Any, key: Any) -> Any:
        """Return `allowed`, computed from `of(part, query, key)` for all parts; None: this is not possible."""
        return None

    def heads(self, num_heads: int) -> tuple["Pattern", ...]:
        """Return one pattern per head; none of them holds a `PerHead`.

        Raises:
            ConfigurationError: the patterns of a `PerHead` cannot be divided evenly among `num_heads` heads.
        """
        if not self.parts:
            return (self,) * num_heads
        return tuple(map(self._with_changed, zip(*(part.heads(num_heads) for part in self.parts), strict=True)))

    @property
    def num_head_patterns(self) -> int:
        """The smallest number of heads that `heads` accepts."""
        return lcm(*(part.num_head_patterns for part in self.parts))

    # What it defines if it uses lookup tables

    def with_tables(self, convert: Callable[[tuple[int, ...]], Any]) -> "Pattern":
        """Return the pattern with each of its lookup tables replaced by `convert(table)`, such as a tensor."""
        parts = tuple(part.with_tables(convert) for part in self.parts)
        # lookup tables take no part in comparisons, so a changed part still equals the old one
        return self if all(map(is_, parts, self.parts)) else self.with_parts(parts)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """The sizes of its own lookup tables, on which the compiled `allowed` depends; empty if there are no tables."""
        return ()

    @property
    def is_traceable(self) -> bool:
        """Whether a compiler can expand `allowed` in reasonable time."""
        return all(part.is_traceable for part in self.parts)

    # What is defined here for every pattern

    @property
    def is_causal(self) -> bool:
        """Whether it is known that no key lies after its query."""
        return self.max_tokens_ahead is not None and self.max_tokens_ahead <= 0

    def atoms(self) -> tuple["Pattern", ...]:
        """Return the patterns without parts that this one is made of, with repetitions."""
        return tuple(atom for part in self.parts for atom in part.atoms()) or (self,)

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern in JSON types, for `Pattern.from_dict`.

        Raises:
            ConfigurationError: it has no kind, or its class is not a dataclass.
        """
        return write_pattern(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Pattern":
        """Return the pattern that `to_dict` wrote.

        Raises:
            ConfigurationError: an unknown kind, unknown or missing fields, or values that the pattern refuses.
        """
        return read_pattern(data, cls.kinds)  # type: ignore[no-any-return]

    def draw(
        self, num_queries: int, num_keys: int | None = None, layer: int = 0, head: int = 0, query_offset: int = 0
    ) -> str:
        """Return a drawing for one layer and head: one line per query, ■ for keys it attends to and ⬚ for all others.

        Args:
            num_keys: query_offset + num_queries by default.
            head: index of a head. The number of heads is the smallest one that includes this head and that the pattern
                accepts.

        Raises:
            InputError: a length below 1, a length that the pattern cannot have, an invalid head, a drawing that is too
                large, or one too short to contain a global position of the pattern.
        """
        return drawn(self, num_queries, num_keys, layer, head, query_offset)

    def _needs_length(self) -> NoReturn:
        raise ConfigurationError(
            f"{self.kind or type(self).__name__} depends on the length. Call resolve(num_keys) and use its result. "
            "If it is your own class and does not depend on the length, define both allowed and key_intervals."
        )

    def _with_changed(self, parts: Iterable["Pattern"]) -> "Pattern":
        return self if (changed := tuple(parts)) == self.parts else self.with_parts(changed)
