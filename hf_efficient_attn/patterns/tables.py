"""Patterns given key by key."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.checks import integers
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.spans import Spans, clip, normalize

# fills rows with fewer keys than others; no key has this position
NO_KEY = -1


class LookupColumn(tuple[int, ...]):
    """One key per query; an integer tensor as index gives a tensor, so that one line serves both."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | slice):
            return super().__getitem__(index)
        return index.new_tensor(self)[index]


@dataclass(frozen=True)
class KeyTable(Pattern, kind="key_table"):
    """Query q reads the keys `rows[q]`; queries beyond the rows read nothing.

    >>> print(KeyTable([[0], [], [0, 2]]).draw(3))
    ■⬚⬚
    ⬚⬚⬚
    ■⬚■

    Raises:
        ConfigurationError: no rows, or keys that are no integers of at least 0.
    """

    rows: Sequence[Sequence[int]]
    columns: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        listed = tuple(self.rows) if isinstance(self.rows, Iterable) else ()
        rows = tuple(integers(self.kind, f"rows[{number}]", row) for number, row in enumerate(listed))
        if not rows or any(row and row[0] < 0 for row in rows):
            raise ConfigurationError(f"{self.kind}: rows is {self.rows!r}; give each query a list of keys, 0 or more.")
        object.__setattr__(self, "rows", rows)
        if not self.columns:
            columns = zip_longest(*rows, fillvalue=NO_KEY)
            object.__setattr__(self, "columns", tuple(map(LookupColumn, columns)))

    def allowed(self, query: Any, key: Any) -> Any:
        has_row = query < len(self.rows)
        row = query * has_row
        # queries without a row look up row 0, and read nothing
        reads = (column[row] == key for column in self.columns)
        return reduce(or_, reads, key < 0) & has_row

    def key_spans(self, first_query: int, last_query: int, num_keys: int) -> Spans:
        rows = self.rows[first_query : last_query + 1]
        return clip(normalize((key, key + 1) for row in rows for key in row), num_keys)

    def full_key_spans(self, first_query: int, last_query: int, num_keys: int) -> Spans:
        rows = self.rows[first_query : last_query + 1]
        common = set.intersection(*map(set, rows)) if len(rows) == last_query - first_query + 1 else ()
        return clip(normalize((key, key + 1) for key in common), num_keys)

    @property
    def max_tokens_ahead(self) -> int | None:
        return max((row[-1] - query for query, row in enumerate(self.rows) if row), default=-1)

    def with_tables(self, convert: Callable[[tuple[int, ...]], Any]) -> Pattern:
        return replace(self, columns=tuple(convert(tuple(column)) for column in self.columns))
