"""The pattern of some queries of a text over the keys at hand, which are counted anew, in a form that is fast."""

from dataclasses import dataclass, replace

from hf_efficient_attn.patterns.algebra import PerHead, Union, common_period
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.intervals import Intervals, size
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.tables import GatheredKeys


@dataclass(frozen=True)
class PlacedPattern:
    """A pattern over keys at hand: which the queries count from `query_offset` on.

    Attributes:
        is_cross: whether queries count tokens of the text, and keys those at hand.
        keeps_distances: whether queries and keys are as far from each other as in the text.
    """

    pattern: Pattern
    query_offset: int
    is_cross: bool = False
    keeps_distances: bool = True


def place_pattern(pattern: Pattern, keys: Intervals, first: int, num_queries: int) -> PlacedPattern:
    """Return the pattern of queries from position `first` on over the keys of some intervals, one after the other.

    Where the keys are one interval, and the pattern looks the same from its start, it is the pattern itself, for which
    every backend is fastest; likewise where all other keys are global tokens.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> place_pattern(Band(2, 0), ((6, 12),), 8, 4)
    PlacedPattern(pattern=Band(left=2, right=0), query_offset=2, is_cross=False, keeps_distances=True)
    """
    stop = first + num_queries
    if len(keys) == 1 and keys[0][0] <= first and stop <= keys[0][1]:
        start, period = keys[0][0], pattern.period
        if start == 0 or (period is not None and start % period == 0):
            return PlacedPattern(pattern, first - start)
    reach = pattern.decoding_reach() if pattern.is_causal else None
    if reach is not None and reach.left is not None and len(keys) == 2 and keys[1][1] >= stop:
        (begin, num_first), (start, _) = keys
        if begin == 0 and num_first >= reach.num_first and start <= first - reach.left:
            return PlacedPattern(pattern, first - start + num_first, keeps_distances=False)
    placed = place_globals(pattern, keys, first, stop)
    # a process may hold no key of a document whose only tokens there are masked
    return placed or PlacedPattern(GatheredKeys(pattern, keys or ((0, 1),)), first, True, False)


def place_globals(pattern: Pattern, keys: Intervals, first: int, stop: int) -> PlacedPattern | None:
    """Return the pattern where all keys but the neighbours of the queries are tokens that everything reads.

    Then only global tokens change their positions: how far keys are from queries matters among neighbours alone. None:
    the keys or the pattern are others.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> place_globals(Band(1, 1) | GlobalTokens([0, 9]), ((0, 1), (7, 12)), 8, 11).pattern.parts[1].positions
    (0, 3)
    """
    number = next((place for place, (start, end) in enumerate(keys) if start <= first and stop <= end), None)
    if number is None:
        return None
    place = sum(end - start for start, end in keys[:number])
    shift = keys[number][0] - place
    others = (*keys[:number], *keys[number + 1 :])
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    moved = [found for each in heads if (found := move_globals(each, keys, others, shift)) is not None]
    if len(moved) < len(heads):
        return None
    together = PerHead(moved) if isinstance(pattern, PerHead) else moved[0]
    return PlacedPattern(together, first - shift, keeps_distances=False)


def move_globals(pattern: Pattern, keys: Intervals, others: Intervals, shift: int) -> Pattern | None:
    """Return a pattern with its global tokens counted among the keys at hand; None: other parts would change, too.

    Args:
        others: intervals of the keys that are no neighbours of the queries.
        shift: by how much neighbours are counted from an earlier one.
    """
    parts = pattern.parts if isinstance(pattern, Union) else (pattern,)
    global_parts = [each for each in parts if isinstance(each, GlobalTokens)]
    local = [each for each in parts if not isinstance(each, GlobalTokens)]
    period = common_period(each.period for each in local)
    read_by_all = {position for each in global_parts if each.read_by_all for position in each.positions}
    if not local or period is None or shift % period or size(others) > len(read_by_all):
        return None
    if any(position not in read_by_all for each in others for position in range(*each)):
        return None
    moved = []
    for each in global_parts:
        places = tuple(place for position in each.positions if (place := place_among(keys, position)) is not None)
        moved += [replace(each, positions=places)] if places else []
    return Union((*local, *moved)) if len(local) + len(moved) > 1 else local[0]


def place_among(keys: Intervals, position: int) -> int | None:
    """Return the place of a position among the keys of some intervals; None: it is not there.

    >>> place_among(((0, 2), (5, 9)), 6)
    3
    """
    place = 0
    for start, stop in keys:
        if start <= position < stop:
            return place + position - start
        place += stop - start
    return None
