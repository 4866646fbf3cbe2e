"""What every pattern can do.

A pattern is a relation between absolute positions: query q may read key k. Spans of keys come in two kinds, the outer
one (keys that some query of a range reads) and the inner one (keys that all of them read); the algebra is interval
arithmetic on these bounds, so that no method ever looks at all pairs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import lcm
from typing import Any, ClassVar, NoReturn

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import check_head, check_length
from hf_efficient_attn.patterns.counting import CrossingError, MovingSpans, band_pairs, check_counted, counted_pairs
from hf_efficient_attn.patterns.piece import Piece
from hf_efficient_attn.patterns.serialization import check_nesting, from_json, to_json
from hf_efficient_attn.patterns.spans import Spans, size

# each is computed apart; with more of them that takes longer than all of them together
MAX_MEMBERS = 16
# patterns within a pattern, and how deep they may nest: every one costs time for every block of queries
MAX_PARTS = 1024
MAX_DEPTH = 32
MAX_DRAWN_PAIRS = 1 << 22
# rows of a pattern that repeats itself so soon are looked at once
MAX_CLASSES = 64


class Pattern:
    """Who may read whom: a value, hashable and equal by content, that can be written as JSON and drawn.

    A new pattern is a frozen dataclass `class Name(Pattern, kind="name")` that defines `allowed` and `key_spans`, or
    `resolve`; everything else has a default. One that holds other patterns defines `parts` and `with_parts`.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type["Pattern"]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls.kind = kind
            Pattern.kinds[kind] = cls

    @property
    def parts(self) -> tuple["Pattern", ...]:
        """The patterns this one is made of; empty for an atom."""
        return ()

    def atoms(self) -> tuple["Pattern", ...]:
        """Return the patterns without parts that this one is made of, each as often as it occurs in it."""
        return tuple(atom for part in self.parts for atom in part.atoms()) or (self,)

    def with_parts(self, parts: tuple["Pattern", ...]) -> "Pattern":
        """Return the same pattern made of other parts."""
        return self

    def allowed(self, query: Any, key: Any) -> Any:
        """Return whether `query` may read `key`: a bool for integers, a bool tensor for integer tensors (broadcast).

        Positions are absolute. Uses operators only, so the same line runs inside a kernel's mask function.

        Raises:
            ConfigurationError: the pattern needs a length first.
        """
        self._needs_length()

    def key_spans(self, first_query: int, last_query: int, num_keys: int) -> Spans:
        """Return spans that contain every key which some query of first_query..last_query (inclusive) may read.

        Exact for one query, for atoms and for unions; an upper bound for other compositions.

        Raises:
            ConfigurationError: the pattern needs a length first.
        """
        self._needs_length()

    def full_key_spans(self, first_query: int, last_query: int, num_keys: int) -> Spans:
        """Return spans of keys that every query of first_query..last_query (inclusive) may read.

        Exact for one query; a lower bound otherwise.
        """
        return self.key_spans(first_query, last_query, num_keys) if first_query == last_query else ()

    def num_keys_of(self, query: int, num_keys: int) -> int:
        """Return how many keys `query` reads."""
        return size(self.key_spans(query, query, num_keys))

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        """Return how many pairs (query, key) are allowed; the queries are query_offset, query_offset + 1, ...

        Raises:
            InputError: counting would take too long.
        """
        if self.period is not None and self.period <= min(MAX_CLASSES, num_queries):
            return periodic_pairs(self, self.period, num_queries, num_keys, query_offset)
        return counted_pairs(self, num_queries, num_keys, query_offset)

    def moving_spans(self, first_query: int, last_query: int, num_keys: int) -> MovingSpans:
        """Return the spans of keys of every query of first_query..last_query, whose ends may move with the query.

        Raises:
            CrossingError: there is no such form for all of these queries, or none is known; never for one query.
        """
        spans = self.key_spans(first_query, last_query, num_keys)
        if first_query != last_query and spans != self.full_key_spans(first_query, last_query, num_keys):
            raise CrossingError
        return spans

    @property
    def period(self) -> int | None:
        """Moving query and key by a multiple of it changes nothing; None: no such number is known."""
        return None

    @property
    def granularity(self) -> int:
        """The length in tokens of the blocks it is made of, a common multiple if there are several; 1: of no blocks."""
        return lcm(*(part.granularity for part in self.parts))

    @property
    def max_tokens_ahead(self) -> int | None:
        """How far after its query a key can lie: -1 only before it, 0 up to the query itself, None no known limit."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether the structure proves that no key lies after its query."""
        return self.max_tokens_ahead is not None and self.max_tokens_ahead <= 0

    @property
    def depends_on_length(self) -> bool:
        """Whether `resolve` gives another relation for another number of keys."""
        return any(part.depends_on_length for part in self.parts)

    @property
    def is_random(self) -> bool:
        """Whether `resolve` gives another relation for another layer or head."""
        return any(part.is_random for part in self.parts)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> "Pattern":
        """Return the pattern for this length, layer and head: random blocks drawn, positions counted from the start.

        Raises:
            InputError: a length the pattern cannot have.
            ConfigurationError: `num_heads` heads cannot share the patterns of a `PerHead`.
        """
        return self._with_changed(part.resolve(num_keys, layer, head, num_heads) for part in self.parts)

    def heads(self, num_heads: int) -> tuple["Pattern", ...]:
        """Return one pattern per head; none of them holds a `PerHead`.

        Raises:
            ConfigurationError: `num_heads` heads cannot share the patterns of a `PerHead`.
        """
        if not self.parts:
            return (self,) * num_heads
        return tuple(map(self._with_changed, zip(*(part.heads(num_heads) for part in self.parts), strict=True)))

    @property
    def num_head_patterns(self) -> int:
        """The smallest number of heads that `heads` accepts."""
        return lcm(*(part.num_head_patterns for part in self.parts))

    def causal(self) -> "Pattern":
        """Return the causal form: no key after its query."""
        # the class of causal patterns is a subclass of this one
        from hf_efficient_attn.patterns.bands import Causal

        return self if self.is_causal else self & Causal()

    def members(self) -> tuple["Pattern", ...]:
        """Return at most MAX_MEMBERS patterns whose union this one is, none of them a union; itself if there are more.

        Each is computed apart, without the pairs of those before it.
        """
        return (self,)

    @property
    def num_members(self) -> int:
        """How many members it would have without a limit, as far as that is known without writing them down."""
        return len(self.members())

    def subsample(self, step: int) -> "Pattern | None":
        """Return the pattern among the positions c, c + step, c + 2·step, ... in local coordinates 0, 1, 2, ...

        None: it has no form that is the same for every residue class c.
        """
        return None

    def pieces(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[Piece, ...]:
        """Return token orders in which the pattern is easy to compute; every allowed pair lies in one of them.

        Pieces may hold pairs that are not allowed, and two pieces may share pairs.
        """
        queries = range(query_offset, query_offset + num_queries)
        return (Piece(queries, range(num_keys), self, query_offset),)

    def with_tables(self, convert: Callable[[tuple[int, ...]], Any]) -> "Pattern":
        """Return the pattern with each of its lookup tables replaced by `convert(table)`, say a tensor."""
        parts = tuple(part.with_tables(convert) for part in self.parts)
        # lookup tables take no part in comparisons: a changed part still equals the old one
        is_same = all(new is old for new, old in zip(parts, self.parts, strict=True))
        return self if is_same else self.with_parts(parts)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Of its own lookup tables, all that a compiled form of `allowed` depends on; empty: it has none."""
        return ()

    @property
    def is_traceable(self) -> bool:
        """Whether a compiler can write out `allowed` in short time."""
        return all(part.is_traceable for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern in JSON types; `Pattern.from_dict` is the way back.

        Raises:
            ConfigurationError: its class has no kind.
        """
        check_kind(self)
        return to_json(self)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Pattern":
        """Return the pattern that `to_dict` wrote.

        Raises:
            ConfigurationError: an unknown kind, unknown or missing fields, or values the pattern refuses.
        """
        if not isinstance(data, Mapping):
            raise ConfigurationError(f'A pattern is a dict such as {{"kind": "causal"}}, not {shown(data)}.')
        check_nesting(data, MAX_DEPTH, MAX_PARTS)
        return from_json(data, cls.kinds)  # type: ignore[no-any-return]

    def draw(
        self, num_queries: int, num_keys: int | None = None, layer: int = 0, head: int = 0, query_offset: int = 0
    ) -> str:
        """Return one line of ■ (reads) and ⬚ (does not) per query, for one layer and head.

        Args:
            num_keys: query_offset + num_queries by default.
            head: of a model with the least number of heads that the pattern accepts and that has this head.

        Raises:
            InputError: a length below 1, one the pattern cannot have, or a head that no model has.
        """
        check_head(head)
        num_keys = query_offset + num_queries if num_keys is None else num_keys
        check_length("num_queries", num_queries)
        check_length("num_keys", num_keys)
        if num_queries * num_keys > MAX_DRAWN_PAIRS:
            raise InputError(
                f"{num_queries} queries × {num_keys} keys are more than {MAX_DRAWN_PAIRS} signs to draw; take fewer."
            )
        num_heads = self.num_head_patterns * (1 + head // self.num_head_patterns)
        pattern = self.resolve(num_keys, layer, head, num_heads)
        queries = range(query_offset, query_offset + num_queries)
        return "\n".join(
            "".join("■" if pattern.allowed(query, key) else "⬚" for key in range(num_keys)) for query in queries
        )

    def __or__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        # the classes of patterns of patterns are subclasses of this one
        from hf_efficient_attn.patterns.algebra import Union

        return self if self == other else Union((self, other))

    def __and__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        from hf_efficient_attn.patterns.algebra import Intersection

        return self if self == other else Intersection((self, other))

    def __invert__(self) -> "Pattern":
        from hf_efficient_attn.patterns.algebra import Complement

        return Complement(self)

    def _needs_length(self) -> NoReturn:
        raise ConfigurationError(
            f"{self.kind} says who reads whom only for a known length. Call resolve(num_keys) and use its result."
        )

    def _with_changed(self, parts: Iterable["Pattern"]) -> "Pattern":
        changed = tuple(parts)
        return self if changed == self.parts else self.with_parts(changed)


def check_patterns(kind: str, patterns: Any) -> tuple[Pattern, ...]:
    """Return `patterns`, one or more patterns, as a tuple.

    Raises:
        ConfigurationError: there is none, or one is no pattern.
    """
    listed = tuple(islice(patterns, MAX_PARTS + 1)) if isinstance(patterns, Iterable) else ()
    if not 0 < len(listed) <= MAX_PARTS:
        raise ConfigurationError(f"{kind}: patterns is {shown(patterns)}; give a list of 1 to {MAX_PARTS} patterns.")
    for pattern in listed:
        check_is_pattern(kind, pattern)
    check_size(kind, listed)
    return listed


def check_pattern(kind: str, pattern: Any) -> None:
    """Refuse what is no pattern, and one that is too large to be a part of another.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold it.
    """
    check_is_pattern(kind, pattern)
    check_size(kind, (pattern,))


def check_size(kind: str, parts: tuple[Pattern, ...]) -> None:
    """Refuse parts that nest so deep, or are so many in all, that nothing could be computed in time.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold them.
    """
    depth, num_parts = 0, 0
    level = parts
    while level:
        depth, num_parts = depth + 1, num_parts + len(level)
        if depth > MAX_DEPTH or num_parts > MAX_PARTS:
            raise ConfigurationError(
                f"{kind} would hold more than {MAX_PARTS} patterns, or nest them more than {MAX_DEPTH} deep. List the "
                "keys of every query in a KeyTable instead."
            )
        level = tuple(inner for part in level for inner in part.parts)


def check_is_pattern(kind: str, pattern: Any) -> None:
    """Refuse what is no pattern.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold it.
    """
    if not isinstance(pattern, Pattern):
        raise ConfigurationError(f"{kind} is made of patterns, such as Causal(); {shown(pattern)} is none.")
    check_kind(pattern)


def check_kind(pattern: Any) -> None:
    """Refuse a pattern that no config could hold.

    Raises:
        ConfigurationError: names its class.
    """
    if not pattern.kind:
        raise ConfigurationError(
            f"{type(pattern).__name__} is a subclass of Pattern without a kind, which configs and operators need to "
            "read it again. Write a pattern of your own as a KeyTable, KeyTable([[0], [0, 1], ...]), which lists the "
            "keys of every query."
        )


def farthest(limits: Sequence[int | None]) -> int | None:
    """Return the largest of the limits; None if one of them is not known."""
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def nearest(limits: Sequence[int | None]) -> int | None:
    """Return the smallest of the limits that are known; None: none is."""
    return min((limit for limit in limits if limit is not None), default=None)


def common_period(patterns: Iterable[Pattern]) -> int | None:
    """Return the least common multiple of the periods; None if a pattern has none."""
    periods = [pattern.period for pattern in patterns]
    return None if None in periods else lcm(*(period for period in periods if period))


def periodic_pairs(pattern: Pattern, period: int, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern of this period allows, by looking at one query of each class."""
    stop = query_offset + num_queries
    # far enough from both ends that none hides a key
    room = period * -(-(stop + num_keys) // period)
    total = num_spans = 0
    check_counted(pattern, num_keys)
    for query in range(query_offset, query_offset + period):
        spans = pattern.key_spans(room + query, room + query, 4 * room)
        num_spans += len(spans)
        check_counted(pattern, num_spans)
        alike = range(query, stop, period)
        total += sum(band_pairs(alike, start - room - query, after - room - query, num_keys) for start, after in spans)
    return total
