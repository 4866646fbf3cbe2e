"""A pattern divided into shares, each easy to compute in a token order of its own.

Members of a union that keep the order of the tokens are one share. Each of the others (dilation, scattered globals) is
a share in the order that it asks for, without the pairs of the shares before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import or_

from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.patterns.intervals import size
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.token_order import Extent, TokenOrder

# in tokens; keys are not gathered by shorter granules, but one by one
MIN_GRANULE = 8
# more members are computed as one share, since each has to leave out the pairs of all before it
MAX_MEMBERS = 32
# up to this many orders of a member are always worth it
FEW_ORDERS = 64
# about the fixed time of a run, in scores of dense attention without a mask, on any machine
SCORES_PER_RUN = 80_000
# queries of the row by which work is estimated
ROW_TOKENS = 128


@dataclass(frozen=True)
class PatternShare:
    """Pairs that are computed together.

    Attributes:
        target: which pairs of the order belong to the share.
        order: the order of the tokens; its local pattern bounds `target`.
    """

    target: Pattern
    order: TokenOrder

    def rows(self, query_offset: int) -> Sequence[int]:
        """Return the queries in their order, counted from the first query of the call."""
        queries = self.order.queries
        if isinstance(queries, range):
            return range(queries.start - query_offset, queries.stop - query_offset, queries.step)
        return tuple(query - query_offset for query in queries)


@cached()
def shares(pattern: Pattern, extent: Extent) -> tuple[PatternShare, ...]:
    """Return the shares of a drawn pattern; every allowed pair belongs to exactly one."""
    found: list[PatternShare] = []
    seen: Pattern | None = None
    members = pattern.members()
    is_many = len(members) > MAX_MEMBERS
    for member, orders in [(pattern, Pattern.token_orders(pattern, *extent))] if is_many else ordered(members, extent):
        target = member if seen is None else member & ~seen
        seen = member if seen is None else seen | member
        if orders == Pattern.token_orders(member, *extent):
            orders = tuple(replace(order, local=target) for order in orders)
        found += [PatternShare(target, order) for order in orders]
    return tuple(found)


def ordered(members: tuple[Pattern, ...], extent: Extent) -> list[tuple[Pattern, tuple[TokenOrder, ...]]]:
    """Return (pattern, orders) in the order in which they claim pairs; all that keep the tokens' own order are one."""
    listed = [(member, worthwhile(member, member.token_orders(*extent), extent)) for member in members]
    natural = [member for member, orders in listed if orders == Pattern.token_orders(member, *extent)]
    rows = []
    if any(is_gathered(member, extent) for member in natural):
        # keys that are gathered anyway include whole blocks of global keys; blocks of global queries come first
        blocks = [(member, orders) for member, orders in listed if member.granularity >= MIN_GRANULE]
        natural += [member for member, orders in blocks if is_columns(orders, extent)]
        rows = [(member, orders) for member, orders in blocks if is_rows(orders, extent)]
    base = reduce(or_, natural) if natural else None
    rest = [(member, orders) for member, orders in listed if member not in natural and (member, orders) not in rows]
    return rows + ([(base, Pattern.token_orders(base, *extent))] if base else []) + rest


def worthwhile(pattern: Pattern, orders: tuple[TokenOrder, ...], extent: Extent) -> tuple[TokenOrder, ...]:
    """Return the orders, or the tokens' own order if so many would take longer, or if some share pairs."""
    if not have_own_queries(orders):
        return Pattern.token_orders(pattern, *extent)
    if len(orders) <= FEW_ORDERS:
        return orders
    num_queries, num_keys, query_offset = extent
    first = query_offset + num_queries // 2
    row = pattern.key_intervals(first, min(first + ROW_TOKENS, query_offset + num_queries) - 1, num_keys)
    in_order = num_queries * size(row) < len(orders) * SCORES_PER_RUN
    return Pattern.token_orders(pattern, *extent) if in_order else orders


def have_own_queries(orders: tuple[TokenOrder, ...]) -> bool:
    """Return whether no query, and so no pair, belongs to two of the orders."""
    if len(orders) <= 1:
        return True
    listed = [order.queries for order in orders]
    steps = {queries.step if isinstance(queries, range) else None for queries in listed}
    step = steps.pop()
    if step and not steps:
        # each order is one residue class
        return len({queries[0] % step for queries in listed}) == len(listed)
    return len(set().union(*listed)) == sum(map(len, listed))


def is_gathered(pattern: Pattern, extent: Extent) -> bool:
    """Return whether a block in the middle reads several intervals of keys that differ from those of other blocks."""
    num_queries, num_keys, query_offset = extent
    if pattern.period is not None:
        return False
    own = pattern.granularity
    first = (query_offset + num_queries // 2) // own * own
    return len(pattern.key_intervals(first, min(first + own, query_offset + num_queries) - 1, num_keys)) > 1


def is_columns(orders: tuple[TokenOrder, ...], extent: Extent) -> bool:
    """Return whether there is one order, with all queries in their own order, and keys that all of them read."""
    queries = range(extent.query_offset, extent.query_offset + extent.num_queries)
    return len(orders) == 1 and orders[0].local is None and orders[0].queries == queries


def is_rows(orders: tuple[TokenOrder, ...], extent: Extent) -> bool:
    """Return whether there is one order, with all keys in their own order, and queries that read all of them."""
    return len(orders) == 1 and orders[0].local is None and orders[0].keys == range(extent.num_keys)


def neighbours(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) of each run of neighbouring numbers.

    >>> neighbours([0, 1, 2, 5])
    [(0, 3), (5, 1)]
    """
    runs = [list(run) for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    return [(run[0][1], len(run)) for run in runs]
