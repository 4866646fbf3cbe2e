"""A pattern taken apart into jobs, each easy to compute in an order of the tokens of its own.

Members of a union that keep the order of the tokens are one job; each of the others (dilation, scattered globals) is
one in the order it asks for, without the pairs of the jobs before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import or_

from hf_efficient_attn.layout.blocks.layout import SCORES_PER_RUN
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.piece import Piece
from hf_efficient_attn.patterns.spans import size

# copying single keys costs more than reading them from longer granules, in tokens
MIN_GRANULE = 8
# more members are computed as one: each is cut by all before it
MAX_MEMBERS = 32
# so many orders of a member are always worth it
FEW_PIECES = 64
# queries of a row for an estimate
ROW_TOKENS = 128
# (queries, keys, position of the first query)
Place = tuple[int, int, int]


@dataclass(frozen=True)
class Job:
    """Pairs that are computed together.

    Attributes:
        target: which pairs of the piece are meant.
        piece: the order of the tokens; its local pattern bounds `target`.
    """

    target: Pattern
    piece: Piece

    def rows(self, query_offset: int) -> Sequence[int]:
        """Return the queries in the order of the piece, counted from the first query of the call."""
        queries = self.piece.queries
        if isinstance(queries, range):
            return range(queries.start - query_offset, queries.stop - query_offset, queries.step)
        return tuple(query - query_offset for query in queries)


@cached()
def jobs(pattern: Pattern, place: Place) -> tuple[Job, ...]:
    """Return the jobs of a drawn pattern; every allowed pair belongs to exactly one of them."""
    found: list[Job] = []
    seen: Pattern | None = None
    members = pattern.members()
    is_many = len(members) > MAX_MEMBERS
    for member, pieces in [(pattern, Pattern.pieces(pattern, *place))] if is_many else ordered(members, place):
        target = member if seen is None else member & ~seen
        seen = member if seen is None else seen | member
        if pieces == Pattern.pieces(member, *place):
            pieces = tuple(replace(piece, local=target) for piece in pieces)
        found += [Job(target, piece) for piece in pieces]
    return tuple(found)


def ordered(members: tuple[Pattern, ...], place: Place) -> list[tuple[Pattern, tuple[Piece, ...]]]:
    """Return (pattern, pieces) in the order in which they claim their pairs; all that keep the tokens' order as one."""
    listed = [(member, worthwhile(member, member.pieces(*place), place)) for member in members]
    natural = [member for member, pieces in listed if pieces == Pattern.pieces(member, *place)]
    rows = []
    if any(is_gathered(member, place) for member in natural):
        # keys that are gathered anyway take whole blocks of global keys along; blocks of global queries go before them
        blocks = [(member, pieces) for member, pieces in listed if member.granularity >= MIN_GRANULE]
        natural += [member for member, pieces in blocks if is_columns(pieces, place)]
        rows = [(member, pieces) for member, pieces in blocks if is_rows(pieces, place)]
    base = reduce(or_, natural) if natural else None
    rest = [(member, pieces) for member, pieces in listed if member not in natural and (member, pieces) not in rows]
    return rows + ([(base, Pattern.pieces(base, *place))] if base else []) + rest


def worthwhile(pattern: Pattern, pieces: tuple[Piece, ...], place: Place) -> tuple[Piece, ...]:
    """Return the pieces, or the tokens in their order where so many pieces would take longer or share pairs."""
    if not have_own_queries(pieces):
        return Pattern.pieces(pattern, *place)
    if len(pieces) <= FEW_PIECES:
        return pieces
    num_queries, num_keys, query_offset = place
    first = query_offset + num_queries // 2
    row = pattern.key_spans(first, min(first + ROW_TOKENS, query_offset + num_queries) - 1, num_keys)
    in_order = num_queries * size(row) < len(pieces) * SCORES_PER_RUN
    return Pattern.pieces(pattern, *place) if in_order else pieces


def have_own_queries(pieces: tuple[Piece, ...]) -> bool:
    """Return whether no query belongs to two of the pieces, so that no pair does."""
    if len(pieces) <= 1:
        return True
    orders = [piece.queries for piece in pieces]
    steps = {order.step if isinstance(order, range) else None for order in orders}
    step = steps.pop()
    if step and not steps:
        # one residue class each
        return len({order[0] % step for order in orders}) == len(orders)
    return len(set().union(*orders)) == sum(map(len, orders))


def is_gathered(pattern: Pattern, place: Place) -> bool:
    """Return whether a block of queries in the middle reads several spans of keys, others than the block before it."""
    num_queries, num_keys, query_offset = place
    if pattern.period is not None:
        return False
    own = pattern.granularity
    first = (query_offset + num_queries // 2) // own * own
    return len(pattern.key_spans(first, min(first + own, query_offset + num_queries) - 1, num_keys)) > 1


def is_columns(pieces: tuple[Piece, ...], place: Place) -> bool:
    """Return whether the pieces are one: all queries in their order, and keys that all of them read."""
    queries = range(place[2], place[2] + place[0])
    return len(pieces) == 1 and pieces[0].local is None and pieces[0].queries == queries


def is_rows(pieces: tuple[Piece, ...], place: Place) -> bool:
    """Return whether the pieces are one: queries that read all keys, these in their order."""
    return len(pieces) == 1 and pieces[0].local is None and pieces[0].keys == range(place[1])


def neighbours(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) of each run of neighbouring numbers.

    >>> neighbours([0, 1, 2, 5])
    [(0, 3), (5, 1)]
    """
    runs = [list(run) for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    return [(run[0][1], len(run)) for run in runs]
