"""What every pattern can do.

A relation between absolute positions: query q may read key k. Intervals of keys come in two kinds, the outer one (keys
that some query of a range reads) and the inner one (keys that all of them read). The algebra is interval arithmetic on
these bounds, so that no method ever looks at all pairs.
"""

from collections.abc import Callable, Iterable, Mapping
from math import lcm
from typing import Any, ClassVar, NoReturn

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.bounds import DecodingReach, DrawnBlocks, GlobalPosition
from hf_efficient_attn.patterns.counting import CrossingError, MovingIntervals, pairs_of
from hf_efficient_attn.patterns.drawing import drawn
from hf_efficient_attn.patterns.intervals import Intervals, size
from hf_efficient_attn.patterns.serialization import read_pattern, write_pattern
from hf_efficient_attn.patterns.token_order import TokenOrder


class Pattern:
    """Who may read whom: a value, hashable and equal by content, that can be written as JSON and drawn.

    A new pattern is a frozen dataclass `class Name(Pattern, kind="name")`. Its methods come in groups, in this order:

    - what it must define: `allowed` and `key_intervals`; or `resolve`, with `depends_on_length` or `is_random`, where
      another pattern takes its place as soon as the length, the layer and the head are known;
    - what makes it faster, or lets it be used in more places: every default is right, but says that nothing is known;
    - what it defines if it holds other patterns: `parts` and `with_parts`;
    - what it defines if it looks something up in tables: `with_tables`, `table_sizes` and `is_traceable`.

    The rest is the same for every pattern.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type["Pattern"]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls.kind = kind
            Pattern.kinds[kind] = cls

    # What a pattern must define

    def allowed(self, query: Any, key: Any) -> Any:
        """Return whether `query` may read `key`: a bool for integers, a bool tensor for integer tensors (broadcast).

        Positions are absolute. Uses operators only, so the same line runs inside a kernel's mask function.

        Raises:
            ConfigurationError: the pattern needs a length first.
        """
        self._needs_length()

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        """Return intervals that contain every key which some query of first_query..last_query (inclusive) may read.

        Exact for one query, for atoms and for unions; an upper bound for other compositions.

        Raises:
            ConfigurationError: the pattern needs a length first.
        """
        self._needs_length()

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> "Pattern":
        """Return the pattern for this length, layer and head: random blocks drawn, positions counted from the start.

        Raises:
            InputError: a length the pattern cannot have.
            ConfigurationError: `num_heads` heads cannot share the patterns of a `PerHead`.
        """
        return self._with_changed(part.resolve(num_keys, layer, head, num_heads) for part in self.parts)

    @property
    def depends_on_length(self) -> bool:
        """Whether `resolve` gives another relation for another number of keys."""
        return any(part.depends_on_length for part in self.parts)

    @property
    def is_random(self) -> bool:
        """Whether `resolve` gives another relation for another layer or head."""
        return any(part.is_random for part in self.parts)

    # What makes it faster, or lets it be used in more places

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        """Return intervals of keys that every query of first_query..last_query (inclusive) may read.

        Exact for one query; a lower bound otherwise.
        """
        return self.key_intervals(first_query, last_query, num_keys) if first_query == last_query else ()

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        """Return the intervals of keys of every query of first_query..last_query, whose ends may move with the query.

        Raises:
            CrossingError: there is no such form for all of these queries, or none is known; never for one query.
        """
        intervals = self.key_intervals(first_query, last_query, num_keys)
        if first_query != last_query and intervals != self.full_key_intervals(first_query, last_query, num_keys):
            raise CrossingError
        return intervals

    def num_keys_of(self, query: int, num_keys: int) -> int:
        """Return how many keys `query` reads."""
        return size(self.key_intervals(query, query, num_keys))

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        """Return how many pairs (query, key) are allowed; the queries are query_offset, query_offset + 1, ...

        Raises:
            InputError: counting would take too long.
        """
        return pairs_of(self, num_queries, num_keys, query_offset)

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
    def unread_tokens_ahead(self) -> int | None:
        """How far after its query a key can lie that the pattern keeps from it; counted as `max_tokens_ahead` is."""
        return None

    @property
    def band_limits(self) -> tuple[int | None, int | None] | None:
        """(left, right) if every query reads exactly the keys of such a `Band`; None: it does not, or nobody knows."""
        return None

    def causal(self) -> "Pattern":
        """Return the causal form: no key after its query."""
        # the class of causal patterns is a subclass of this one
        from hf_efficient_attn.patterns.bands import Causal

        return self if self.is_causal else self & Causal()

    def members(self) -> tuple["Pattern", ...]:
        """Return a few patterns whose union this one is, none of them a union; itself if there would be many.

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

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return token orders in which the pattern is easy to compute; every allowed pair lies in one of them.

        An order may hold pairs that are not allowed, and two orders may share pairs.
        """
        return (TokenOrder(range(query_offset, query_offset + num_queries), range(num_keys), self, query_offset),)

    def decoding_reach(self) -> DecodingReach | None:
        """Return which tokens a causal pattern can read; None: others than such first and last ones."""
        return None

    def global_positions(self) -> tuple[GlobalPosition, ...]:
        """Return the positions that it names, each of which an input should have."""
        return tuple(position for part in self.parts for position in part.global_positions())

    def drawn_blocks(self) -> DrawnBlocks | None:
        """Return which blocks it draws at random for every row of blocks; None: it draws none, or nothing but these."""
        return None

    # What it defines if it holds other patterns

    @property
    def parts(self) -> tuple["Pattern", ...]:
        """The patterns this one is made of; empty for an atom."""
        return ()

    def with_parts(self, parts: tuple["Pattern", ...]) -> "Pattern":
        """Return the same pattern made of other parts."""
        return self

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

    # What it defines if it looks something up in tables

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

    # What is the same for every pattern

    @property
    def is_causal(self) -> bool:
        """Whether the structure proves that no key lies after its query."""
        return self.max_tokens_ahead is not None and self.max_tokens_ahead <= 0

    def atoms(self) -> tuple["Pattern", ...]:
        """Return the patterns without parts that this one is made of, each as often as it occurs in it."""
        return tuple(atom for part in self.parts for atom in part.atoms()) or (self,)

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern in JSON types; `Pattern.from_dict` is the way back.

        Raises:
            ConfigurationError: its class has no kind.
        """
        return write_pattern(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Pattern":
        """Return the pattern that `to_dict` wrote.

        Raises:
            ConfigurationError: an unknown kind, unknown or missing fields, or values the pattern refuses.
        """
        return read_pattern(data, cls.kinds)  # type: ignore[no-any-return]

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
        return drawn(self, num_queries, num_keys, layer, head, query_offset)

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
        return self if (changed := tuple(parts)) == self.parts else self.with_parts(changed)
