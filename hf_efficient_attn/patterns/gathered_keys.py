"""Keys that are gathered from some intervals of a sequence, such as those that a process has received from others."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import check_integer
from hf_efficient_attn.patterns.intervals import Intervals, clip, intersect, normalize
from hf_efficient_attn.patterns.part_checks import check_pattern
from hf_efficient_attn.patterns.pattern import Pattern

# a compiler expands every interval
MAX_TRACED_INTERVALS = 64


@dataclass(frozen=True)
class GatheredKeys(Pattern, kind="gathered_keys"):
    """Keys are those of `intervals`, one after the other, and a query reads those that `pattern` lets it read.

    Queries count the tokens of the sequence and keys count what was gathered: two axes, `cross=True` for `attention`.

    pattern: on the positions of the sequence, the same at every length, layer and head; see `resolve`.
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
                "Give what its resolve() returns."
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
                f"{self.kind}: intervals is {shown(self.intervals)}; give sorted pairs (start, stop) of positions, "
                "none of them empty, that neither overlap nor touch."
            )
        object.__setattr__(self, "intervals", listed)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return GatheredKeys(parts[0], self.intervals)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the pattern of the head; nothing else is left to resolve."""
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
        # a key is gathered to a place at most as large as its position
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
        """The length of the sequence, as far as it matters: up to the last key."""
        return self.intervals[-1][1]

    def _gathered(self, read: Intervals, num_keys: int) -> Intervals:
        """Return the places of the positions `read`, as far as they were gathered."""
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
