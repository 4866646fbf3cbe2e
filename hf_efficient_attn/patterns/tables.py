"""Patterns that list the keys of every query."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, chain
from operator import or_
from typing import Any, NamedTuple

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.algebra import check_pattern
from hf_efficient_attn.patterns.intervals import Intervals, clip, intersect, normalize, union
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import MAX_LISTED, check_integer, first_listed, integers, plain

# fills the end of a table; no key has this position
NO_KEY = -1
# rows up to this length are scanned key by key, and longer rows are searched; a compiler expands every step of a search
# many times
MAX_SCANNED_KEYS = 32
# per row: a tuple and the reference to it; per key: an integer, references to it, and an interval that holds only it
BYTES_PER_ROW, BYTES_PER_KEY = 100, 100


class LookupTable(tuple[int, ...]):
    """A tuple of integers that can also be indexed by an integer tensor, which returns a tensor."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | slice):
            return super().__getitem__(index)
        return index.new_tensor(self)[index]


class _Lookup(NamedTuple):
    """The keys of all rows in one table, row by row, with the start of each row and the end of the last row.

    num_keys: the number of keys in the longest row.
    """

    starts: Any
    keys: Any
    num_keys: int


@dataclass(frozen=True)
class KeyTable(Pattern, kind="key_table"):
    """Query q attends to the keys in `rows[q]`; queries without a row attend to none. For patterns of your own.

    rows: sequences, arrays or tensors of integers in any order.

    >>> print(KeyTable([[0], [], [0, 2]]).draw(3))
    ■⬚⬚
    ⬚⬚⬚
    ■⬚■

    Raises:
        ConfigurationError: no rows, or keys that are not integers of at least 0.
    """

    rows: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        rows = plain(self.rows)
        listed = first_listed(rows) if isinstance(rows, Iterable) else ()
        if len(listed) > MAX_LISTED:
            raise ConfigurationError(f"{self.kind}: rows is {shown(self.rows)}; give at most {MAX_LISTED} rows.")
        rows = tuple(integers(self.kind, f"rows[{number}]", row) for number, row in enumerate(listed))
        if not rows or any(row and row[0] < 0 for row in rows):
            raise ConfigurationError(
                f"{self.kind}: rows is {shown(self.rows)}; give a list of keys, integers of at least 0, for each query."
            )
        object.__setattr__(self, "rows", rows)

    def __hash__(self) -> int:
        return self._hash

    def allowed(self, query: Any, key: Any) -> Any:
        starts, keys, num_keys = self._lookup
        has_row = query < len(self.rows)
        # queries without a row look up row 0 and attend to nothing
        row = query * has_row
        if isinstance(keys, LookupTable) and not isinstance(row, int):
            # convert once instead of at every lookup
            starts, keys = row.new_tensor(starts), row.new_tensor(keys)
        first, stop = starts[row], starts[row + 1]
        if num_keys <= MAX_SCANNED_KEYS:
            reads = ((keys[first + place] == key) & (first + place < stop) for place in range(num_keys))
            return reduce(or_, reads, key < 0) & has_row
        # rows are sorted: find the last key of the row that is not after this one
        last = first
        for step in reversed(range((num_keys - 1).bit_length())):
            last = last + (1 << step) * ((last + (1 << step) < stop) & (keys[last + (1 << step)] <= key))
        return (keys[last] == key) & (first < stop) & has_row

    def row_intervals(self, query: Any, most: int) -> list[tuple[Any, Any]] | None:
        firsts, starts, stops = self._interval_lookup
        has_row = query < len(self.rows)
        row = query * has_row
        first = firsts[row]
        count = (firsts[row + 1] - first) * has_row
        if isinstance(count, int):
            return [(starts[place], stops[place]) for place in range(first, first + count)]
        num_intervals = int(count.max())
        if num_intervals > most:
            return None
        place = count.new_tensor(range(num_intervals))
        # empty intervals fill the rest of a row
        index = (first + place) * (place < count)
        return [(starts[index], stops[index] * (place < count))]

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return clip(union(*set(self._intervals[first_query : last_query + 1])), num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        rows = self._intervals[first_query : last_query + 1]
        if len(rows) <= last_query - first_query:
            return ()
        common: Intervals = reduce(intersect, set(rows))
        return clip(common, num_keys)

    def num_keys_of(self, query: int, num_keys: int) -> int:
        return bisect_left(self.rows[query], num_keys) if query < len(self.rows) else 0

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        return sum(bisect_left(row, num_keys) for row in self.rows[query_offset : query_offset + num_queries])

    @property
    def max_tokens_ahead(self) -> int | None:
        return max((row[-1] - query for query, row in enumerate(self.rows) if row), default=-1)

    def with_tables(self, convert: Callable[[tuple[int, ...]], Any]) -> Pattern:
        starts, keys, num_keys = self._lookup
        converted = copy(self)
        # plain tuples are indexed faster
        vars(converted)["_lookup"] = _Lookup(convert(tuple(starts)), convert(tuple(keys)), num_keys)
        vars(converted)["_interval_lookup"] = tuple(convert(tuple(table)) for table in self._interval_lookup)
        return converted

    @property
    def table_sizes(self) -> tuple[int, ...]:
        return len(self._lookup.starts), len(self._lookup.keys), self._lookup.num_keys

    @property
    def is_traceable(self) -> bool:
        return self._lookup.num_keys <= MAX_SCANNED_KEYS

    @cached_property
    def _hash(self) -> int:
        """The hash of the rows, kept because caches need it often."""
        return hash(self.rows)

    @cached_property
    def num_held_bytes(self) -> int:
        """The approximate size in bytes of the rows and of all tables made from them; caches need it often."""
        return BYTES_PER_ROW * len(self.rows) + BYTES_PER_KEY * sum(map(len, self.rows))

    @cached_property
    def _lookup(self) -> _Lookup:
        num_keys = max(map(len, self.rows))
        # indices may lie this far beyond the last row
        rest = [NO_KEY] * (1 + max(num_keys, 1 << num_keys.bit_length()))
        starts = LookupTable(accumulate(map(len, self.rows), initial=0))
        return _Lookup(starts, LookupTable(chain(*self.rows, rest)), num_keys)

    @cached_property
    def _interval_lookup(self) -> tuple[Any, Any, Any]:
        """Where the intervals of each row begin, and the starts and stops of all and of one empty interval."""
        firsts = LookupTable(accumulate(map(len, self._intervals), initial=0))
        listed = [*chain(*self._intervals, [(0, 0)])]
        return firsts, LookupTable([start for start, _ in listed]), LookupTable([stop for _, stop in listed])

    @cached_property
    def _intervals(self) -> tuple[Intervals, ...]:
        return tuple(map(_intervals_of, self.rows))


def _intervals_of(row: Sequence[int]) -> Intervals:
    """Return the intervals of a sorted row without duplicates."""
    intervals, place = [], 0
    while place < len(row):
        stop = place + 1
        # within an interval, a key minus its index is constant
        if stop < len(row) and row[stop] == row[place] + 1:
            stop = bisect_right(range(len(row)), row[place] - place, lo=place, key=lambda index: row[index] - index)
        intervals.append((row[place], row[stop - 1] + 1))
        place = stop
    return tuple(intervals)


# Keys gathered from some intervals of a sequence, such as the keys that a process has received from other processes.


# a compiler expands every interval
MAX_TRACED_INTERVALS = 64


@dataclass(frozen=True)
class GatheredKeys(Pattern, kind="gathered_keys"):
    """Every query attends to the keys that `pattern` allows; keys are only those of `intervals`, one after the other.

    Positions of queries count the tokens of the sequence, and positions of keys count the gathered keys: these are two
    axes, so `attention` needs `cross=True`.

    pattern: a pattern on the positions of the sequence, resolved: it does not depend on the length and is not random.
    intervals: half-open intervals of positions, sorted and disjoint.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> print(GatheredKeys(Band(left=1, right=0), [(0, 1), (3, 6)]).draw(6, num_keys=4))
    ■⬚⬚⬚
    ■⬚⬚⬚
    ⬚⬚⬚⬚
    ⬚■⬚⬚
    ⬚■■⬚
    ⬚⬚■■

    Raises:
        ConfigurationError: no intervals, or a pattern that has to be resolved first.
    """

    pattern: Pattern
    intervals: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        check_pattern(self.kind, self.pattern)
        if self.pattern.depends_on_length or self.pattern.is_random:
            raise ConfigurationError(
                f"{self.kind}: {shown(self.pattern)} depends on the length of the sequence, the layer or the head. "
                "Give the pattern that its resolve() returns."
            )
        if not _are_pairs(self.intervals):
            raise ConfigurationError(
                f"{self.kind}: intervals is {shown(self.intervals)}; give pairs (start, stop) of positions."
            )
        listed = tuple(tuple(interval) for interval in self.intervals)
        for interval in listed:
            for position in interval:
                check_integer(self.kind, "a position of intervals", position, at_least=0)
        if not listed or normalize(listed) != listed:  # type: ignore[arg-type]
            raise ConfigurationError(
                f"{self.kind}: intervals is {shown(self.intervals)}; give sorted pairs (start, stop) of positions that "
                "are not empty and neither overlap nor touch."
            )
        object.__setattr__(self, "intervals", listed)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return GatheredKeys(parts[0], self.intervals)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the pattern of the head, which is all that may be left to resolve."""
        if self.pattern.num_head_patterns == 1:
            return self
        own = self.pattern.heads(num_heads)[head]
        return GatheredKeys(own, self.intervals)

    def allowed(self, query: Any, key: Any) -> Any:
        position = key + self.intervals[0][0]
        for place, (_, stop), (start, _) in zip(self._places[1:], self.intervals, self.intervals[1:], strict=False):
            position = position + (key >= place) * (start - stop)
        return self.pattern.allowed(query, position) & (key < self._num_gathered)

    def composed(self, of: Callable[[Pattern, Any, Any], Any], query: Any, key: Any) -> Any:
        return None

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return self._gathered(self.pattern.key_intervals(first_query, last_query, self._num_tokens), num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return self._gathered(self.pattern.full_key_intervals(first_query, last_query, self._num_tokens), num_keys)

    @property
    def needs_two_axes(self) -> bool:
        return True

    @property
    def depends_on_length(self) -> bool:
        return False

    @property
    def max_tokens_ahead(self) -> int | None:
        # the place of a gathered key is at most its position
        return self.pattern.max_tokens_ahead

    def causal(self) -> Pattern:
        return GatheredKeys(self.pattern.causal(), self.intervals)

    @property
    def is_traceable(self) -> bool:
        return self.pattern.is_traceable and len(self.intervals) <= MAX_TRACED_INTERVALS

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """The place of the first key of every interval, and the number of keys."""
        return tuple(accumulate((stop - start for start, stop in self.intervals), initial=0))

    @property
    def _num_gathered(self) -> int:
        return self._places[-1]

    @property
    def _num_tokens(self) -> int:
        """The length of the sequence up to the last gathered key."""
        return self.intervals[-1][1]

    def _gathered(self, read: Intervals, num_keys: int) -> Intervals:
        """Return the places of those positions in `read` that were gathered."""
        starts = [start for start, _ in self.intervals]
        places = []
        for start, stop in intersect(read, self.intervals):  # type: ignore[arg-type]
            number = bisect_right(starts, start) - 1
            shift = self._places[number] - starts[number]
            places.append((start + shift, stop + shift))
        return clip(normalize(places), num_keys)


def _are_pairs(intervals: Any) -> bool:
    if not isinstance(intervals, list | tuple):
        return False
    return all(isinstance(interval, list | tuple) and len(interval) == 2 for interval in intervals)
