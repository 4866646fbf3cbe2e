"""Patterns made of other patterns: `|`, `&` and `~`, by interval arithmetic on the bounds of parts, and `PerHead`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, product
from math import lcm, prod
from operator import and_, or_
from typing import Any, NoReturn

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.intervals import Intervals, MovingIntervals, complement, intersect, union
from hf_efficient_attn.patterns.pattern import (
    ALL_BEFORE,
    DecodingReach,
    Pattern,
    TokenOrder,
    common_period,
    farthest,
    joined_reach,
    nearest,
)
from hf_efficient_attn.patterns.serialization import MAX_DEPTH, MAX_PARTS, check_head, check_kind

# Checks of the patterns that another pattern holds.


def check_patterns(kind: str, patterns: Any) -> tuple[Pattern, ...]:
    """Return `patterns` as a tuple of one or more patterns.

    Raises:
        ConfigurationError: there is none, or one is not a pattern.
    """
    listed = tuple(islice(patterns, MAX_PARTS + 1)) if isinstance(patterns, Iterable) else ()
    if not 0 < len(listed) <= MAX_PARTS:
        raise ConfigurationError(f"{kind}: patterns is {shown(patterns)}; give a list of 1 to {MAX_PARTS} patterns.")
    for pattern in listed:
        check_is_pattern(kind, pattern)
    check_size(kind, listed)
    return listed


def check_pattern(kind: str, pattern: Any) -> None:
    """Refuse anything that is not a pattern, and a pattern that is too large to be part of another.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold it.
    """
    check_is_pattern(kind, pattern)
    check_size(kind, (pattern,))


def check_size(kind: str, parts: tuple[Pattern, ...]) -> None:
    """Refuse parts that are nested too deep, or too many in total, to be computed in reasonable time.

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
    """Refuse anything that is not a pattern.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold it.
    """
    if not isinstance(pattern, Pattern):
        raise ConfigurationError(f"{kind} is made of patterns, such as Causal(); {shown(pattern)} is not a pattern.")
    if pattern.chooses_by_content:
        raise ConfigurationError(
            f"{kind} cannot hold {shown(pattern)}, which selects keys by their content and must be the only pattern of "
            "its layer. Give a list with one pattern per layer."
        )
    check_kind(pattern)


# members are computed separately; with more of them, that takes longer than computing them together
MAX_MEMBERS = 16


def allowed_by(pattern: Pattern, query: Any, key: Any) -> Any:
    """Return `pattern.allowed(query, key)`."""
    return pattern.allowed(query, key)


class Algebra(Pattern):
    """The base of unions and intersections: nested ones are flattened, and duplicates are removed."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        listed = check_patterns(self.kind, self.patterns)
        nested = (pattern.parts if isinstance(pattern, type(self)) else (pattern,) for pattern in listed)
        object.__setattr__(self, "patterns", tuple(dict.fromkeys(part for parts in nested for part in parts)))

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.patterns

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        unique = tuple(dict.fromkeys(parts))
        return unique[0] if len(unique) == 1 else type(self)(unique)  # type: ignore[call-arg]

    def allowed(self, query: Any, key: Any) -> Any:
        return self.composed(allowed_by, query, key)

    @property
    def period(self) -> int | None:
        return common_period(part.period for part in self.patterns)

    def causal(self) -> Pattern:
        return self._with_changed(part.causal() for part in self.patterns)

    def subsample(self, step: int) -> Pattern | None:
        parts = tuple(part.subsample(step) for part in self.patterns)
        return None if None in parts else self.with_parts(tuple(part for part in parts if part))


@dataclass(frozen=True)
class Union(Algebra, kind="union"):
    """`a | b`: a query attends to the keys that at least one of the patterns allows, and to each key once."""

    patterns: tuple[Pattern, ...]

    def composed(self, of: Callable[[Pattern, Any, Any], Any], query: Any, key: Any) -> Any:
        return reduce(or_, (of(part, query, key) for part in self.patterns))

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return union(*(part.key_intervals(first_query, last_query, num_keys) for part in self.patterns))

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return union(*(part.full_key_intervals(first_query, last_query, num_keys) for part in self.patterns))

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        return union(*(part.moving_intervals(first_query, last_query, num_keys) for part in self.patterns))

    @property
    def max_tokens_ahead(self) -> int | None:
        return farthest([part.max_tokens_ahead for part in self.patterns])

    @property
    def unread_tokens_ahead(self) -> int | None:
        return nearest([part.unread_tokens_ahead for part in self.patterns])

    def decoding_reach(self) -> DecodingReach | None:
        return joined_reach(part.decoding_reach() for part in self.patterns)

    def members(self) -> tuple[Pattern, ...]:
        if self.num_members > MAX_MEMBERS:
            return (self,)
        return tuple(member for part in self.patterns for member in part.members())

    @property
    def num_members(self) -> int:
        return sum(part.num_members for part in self.patterns)


@dataclass(frozen=True)
class Intersection(Algebra, kind="intersection"):
    """`a & b`: a query attends to the keys that all patterns allow."""

    patterns: tuple[Pattern, ...]

    def composed(self, of: Callable[[Pattern, Any, Any], Any], query: Any, key: Any) -> Any:
        return reduce(and_, (of(part, query, key) for part in self.patterns))

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return reduce(intersect, (part.key_intervals(first_query, last_query, num_keys) for part in self.patterns))

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return reduce(intersect, (part.full_key_intervals(first_query, last_query, num_keys) for part in self.patterns))

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        return reduce(intersect, (part.moving_intervals(first_query, last_query, num_keys) for part in self.patterns))

    @property
    def max_tokens_ahead(self) -> int | None:
        return nearest([part.max_tokens_ahead for part in self.patterns])

    @property
    def unread_tokens_ahead(self) -> int | None:
        return farthest([part.unread_tokens_ahead for part in self.patterns])

    def decoding_reach(self) -> DecodingReach | None:
        # if tokens are dropped, a part still allows the same kept pairs only if its whole reach is kept; a part that
        # allows all earlier tokens always does
        reaches = [reach for part in self.patterns if (reach := part.decoding_reach()) != ALL_BEFORE]
        return joined_reach(reaches) if reaches else ALL_BEFORE

    def members(self) -> tuple[Pattern, ...]:
        if self.num_members > MAX_MEMBERS:
            return (self,)
        return tuple(self._with_changed(parts) for parts in product(*(part.members() for part in self.patterns)))

    @property
    def num_members(self) -> int:
        return prod(part.num_members for part in self.patterns)

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return the orders of the first part that defines any, restricted by the other parts where possible."""
        extent = (num_queries, num_keys, query_offset)
        for part in self.patterns:
            orders = part.token_orders(*extent)
            if orders != Pattern.token_orders(part, *extent):
                others = tuple(other for other in self.patterns if other is not part)
                return tuple(_narrow(order, others) for order in orders)
        return super().token_orders(*extent)


def _narrow(order: TokenOrder, others: tuple[Pattern, ...]) -> TokenOrder:
    limits = [other.subsample(order.step) for other in others] if order.step > 1 else [None]
    if order.local is None or None in limits:
        return order
    local = reduce(and_, (limit for limit in limits if limit), order.local)
    return TokenOrder(order.queries, order.keys, local, order.local_query_offset)


@dataclass(frozen=True)
class Complement(Pattern, kind="complement"):
    """`~a`: a query attends to exactly the keys that the pattern does not allow."""

    pattern: Pattern

    def __post_init__(self) -> None:
        check_pattern(self.kind, self.pattern)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return Complement(*parts)

    def __invert__(self) -> Pattern:
        return self.pattern

    def allowed(self, query: Any, key: Any) -> Any:
        return self.composed(allowed_by, query, key)

    def composed(self, of: Callable[[Pattern, Any, Any], Any], query: Any, key: Any) -> Any:
        # `~` would turn the bool True into -2
        return of(self.pattern, query, key) ^ True

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return complement(self.pattern.full_key_intervals(first_query, last_query, num_keys), num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return complement(self.pattern.key_intervals(first_query, last_query, num_keys), num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        return num_queries * num_keys - self.pattern.num_pairs(num_queries, num_keys, query_offset)

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        return complement(self.pattern.moving_intervals(first_query, last_query, num_keys), num_keys)

    @property
    def max_tokens_ahead(self) -> int | None:
        return self.pattern.unread_tokens_ahead

    @property
    def unread_tokens_ahead(self) -> int | None:
        return self.pattern.max_tokens_ahead

    @property
    def period(self) -> int | None:
        return self.pattern.period

    def subsample(self, step: int) -> Pattern | None:
        part = self.pattern.subsample(step)
        return None if part is None else ~part


# Different patterns for different heads.


@dataclass(frozen=True)
class PerHead(Pattern, kind="per_head"):
    """The patterns are divided evenly among the heads: with two patterns and 8 heads, heads 0-3 follow the first.

    Raises:
        ConfigurationError: no patterns.
    """

    patterns: Sequence[Pattern]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", check_patterns(self.kind, self.patterns))

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return tuple(self.patterns)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return PerHead(parts)

    def heads(self, num_heads: int) -> tuple[Pattern, ...]:
        run, left_over = divmod(num_heads, len(self.patterns))
        if left_over or not run:
            raise ConfigurationError(
                f"{len(self.patterns)} patterns of {self.kind} cannot share {num_heads} heads evenly; give a number of "
                "patterns that divides the number of heads."
            )
        shares = (pattern.heads(num_heads)[i * run : (i + 1) * run] for i, pattern in enumerate(self.patterns))
        return tuple(pattern for share in shares for pattern in share)

    @property
    def num_head_patterns(self) -> int:
        return lcm(len(self.patterns), *(pattern.num_head_patterns for pattern in self.patterns))

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the resolved pattern of this head.

        Raises:
            InputError: there is no such head.
        """
        check_head(head, num_heads)
        return self.heads(num_heads)[head].resolve(num_keys, layer, head, num_heads)

    @property
    def period(self) -> int | None:
        return common_period(pattern.period for pattern in self.patterns)

    @property
    def max_tokens_ahead(self) -> int | None:
        return farthest([pattern.max_tokens_ahead for pattern in self.patterns])

    @property
    def unread_tokens_ahead(self) -> int | None:
        return farthest([pattern.unread_tokens_ahead for pattern in self.patterns])

    def decoding_reach(self) -> DecodingReach | None:
        return joined_reach(pattern.decoding_reach() for pattern in self.patterns)

    def causal(self) -> Pattern:
        return PerHead(tuple(pattern.causal() for pattern in self.patterns))

    def allowed(self, query: Any, key: Any) -> Any:
        self._needs_length()

    def _needs_length(self) -> NoReturn:
        raise ConfigurationError(f"{self.kind} differs from head to head. Call heads(num_heads) and use its entries.")
