"""The axes of a grid: checks, shifted borders, the coordinates of ranges of tokens, and tiles."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from math import prod
from typing import Any, ClassVar

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.algebra import check_patterns
from hf_efficient_attn.patterns.bands import Distances, Full
from hf_efficient_attn.patterns.intervals import Intervals, charge, clip, normalize, size, union
from hf_efficient_attn.patterns.pattern import Pattern, TokenOrder
from hf_efficient_attn.patterns.serialization import (
    MAX_INTEGER,
    check_bool,
    check_choice,
    check_integer,
    is_integer,
    plain,
)
from hf_efficient_attn.patterns.tables import KeyTable

CUT, SHIFTED = "cut", "shifted"
# more than enough for tables, images and videos
MAX_AXES = 8


def check_grid(grid: Any, may_follow: bool) -> tuple[tuple[int | None, ...], tuple[Pattern, ...]]:
    """Return the shape and the axes of a grid as tuples, after checking all of its fields.

    Args:
        may_follow: whether the first size may be None, for as many rows as the input has.

    Raises:
        ConfigurationError: values that no grid has.
    """
    kind, shape = grid.kind, plain(grid.shape)
    listed = tuple(shape) if isinstance(shape, list | tuple) else ()
    if not 0 < len(listed) <= MAX_AXES or not all(
        _is_size(size, may_follow and not i) for i, size in enumerate(listed)
    ):
        first = " The first may be None, which allows any number." if may_follow else ""
        raise ConfigurationError(
            f"{kind}: shape is {shown(grid.shape)}; give the number of tokens along each axis: 1 to {MAX_AXES} "
            f"integers of at least 1, such as [56, 56].{first}"
        )
    check_integer(kind, "prefix_tokens", grid.prefix_tokens, at_least=0)
    if grid.prefix_tokens + prod(size or 1 for size in listed) > MAX_INTEGER:
        raise ConfigurationError(
            f"{kind}: shape is {shown(grid.shape)}; the grid and its prefix tokens can be at most {MAX_INTEGER} tokens."
        )
    check_choice(kind, "borders", grid.borders, (CUT, SHIFTED))
    check_bool(kind, "is_causal", grid.is_causal)
    axes = check_patterns(kind, grid.axes)
    if len(axes) != len(listed):
        raise ConfigurationError(
            f"{kind}: shape has {len(listed)} axes, but axes has {len(axes)} patterns; give one pattern per axis, such "
            "as Full() to attend to all tokens along an axis, or Band(0, 0) to attend to no other tokens along it."
        )
    for number, axis in enumerate(axes):
        if axis.needs_two_axes:
            raise ConfigurationError(
                f"{kind}: axes[{number}] is {shown(axis)}, a pattern for queries and keys of different sequences. Give "
                "a pattern for one sequence, such as Band(3, 3)."
            )
        if grid.borders == SHIFTED and not _can_shift(axis):
            raise ConfigurationError(
                f"{kind}: axes[{number}] is {shown(axis)}, which cannot be shifted inwards at the borders. Give Band "
                "or Dilated with two limits of at least 0, or Full; or set borders='cut'."
            )
    return listed, axes


def _is_size(size: Any, may_be_none: bool) -> bool:
    return (size is None and may_be_none) or (is_integer(size) and 1 <= size <= MAX_INTEGER)


def _can_shift(axis: Pattern) -> bool:
    listed = axis.heads(axis.num_head_patterns)
    return all(each.band_limits == (None, None) or _has_limits(each) for each in listed)


def _has_limits(axis: Pattern) -> bool:
    return isinstance(axis, Distances) and all(limit is not None and limit >= 0 for limit in (axis.left, axis.right))


def shifted_axis(axis: Pattern, size: int) -> Pattern:
    """Return the pattern of an axis with neighbourhoods shifted inwards at the borders; `axis` if it has no limits."""
    if isinstance(axis, Distances) and axis.left is not None and axis.right is not None:
        return ShiftedBand(axis.left // axis.step, axis.right // axis.step, axis.step, size)
    return axis


@dataclass(frozen=True)
class ShiftedBand(Pattern):
    """Every query attends to equally many keys; at the ends of the axis, its neighbourhood is shifted inwards.

    left, right: how many keys lie before and after a query that is far from the ends.
    step: distance between keys; a query attends to keys of its own residue class.
    size: length of the axis; a query attends to all keys of its class if there are too few.
    """

    # not registered, because no config holds it
    kind: ClassVar[str] = "shifted_band"

    left: int
    right: int
    step: int
    size: int

    def allowed(self, query: Any, key: Any) -> Any:
        start = self._first_place(query)
        place = key // self.step
        reads = (place >= start) & (place <= start + self.left + self.right)
        return reads if self.step == 1 else reads & ((key - query) % self.step == 0)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.step == 1:
            # the first keys of neighbouring queries are the same or one apart
            stop = self._first_place(last_query) + self.left + self.right + 1
            return clip([(self._first_place(first_query), stop)], min(num_keys, self.size))
        keys = (
            query % self.step + self.step * (self._first_place(query) + place)
            for query in range(first_query, last_query + 1)
            for place in range(self.left + self.right + 1)
        )
        return clip(normalize((key, key + 1) for key in keys), min(num_keys, self.size))

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.step > 1 or first_query == last_query:
            return super().full_key_intervals(first_query, last_query, num_keys)
        stop = self._first_place(first_query) + self.left + self.right + 1
        return clip([(self._first_place(last_query), stop)], min(num_keys, self.size))

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return one order per residue class; queries attend only to keys of their own class."""
        if self.step == 1 or (query_offset, num_queries, num_keys) != (0, self.size, self.size):
            return super().token_orders(num_queries, num_keys, query_offset)
        classes = (range(first, self.size, self.step) for first in range(min(self.step, self.size)))
        return tuple(TokenOrder(own, own, None) for own in classes)

    def _first_place(self, query: Any) -> Any:
        """Return the place of a query's first key among the keys of its class."""
        last = (self.size - 1 - query % self.step) // self.step
        start = query // self.step - self.left
        beyond = start + self.left + self.right - last
        start = start - beyond * (beyond > 0)
        return start * (start > 0)


Ranges = tuple[tuple[int, int], ...]


def boxes(first: int, last: int, shape: Sequence[int]) -> Iterator[Ranges]:
    """Yield the tokens first … last of a grid as boxes: the first and last coordinate on every axis.

    >>> list(boxes(1, 7, (3, 3)))
    [((0, 0), (1, 2)), ((2, 2), (0, 1)), ((1, 1), (0, 2))]
    """
    if len(shape) == 1:
        yield ((first, last),)
        return
    row_tokens = prod(shape[1:])
    (top, start), (bottom, stop) = divmod(first, row_tokens), divmod(last, row_tokens)
    if top == bottom:
        yield from (((top, top), *rest) for rest in boxes(start, stop, shape[1:]))
        return
    if start > 0:
        yield from (((top, top), *rest) for rest in boxes(start, row_tokens - 1, shape[1:]))
        top += 1
    if stop < row_tokens - 1:
        yield from (((bottom, bottom), *rest) for rest in boxes(0, stop, shape[1:]))
        bottom -= 1
    if top <= bottom:
        yield ((top, bottom), *((0, size - 1) for size in shape[1:]))


def crossed(intervals: Sequence[Intervals], shape: Sequence[int]) -> Intervals:
    """Return the tokens of a grid whose coordinates lie in the intervals of every axis.

    >>> crossed([((0, 2),), ((1, 3),)], (3, 4))
    ((1, 3), (5, 7))
    """
    tokens: Intervals = ((0, 1),)
    num_inner = 1
    for of_axis, length in zip(reversed(intervals), reversed(shape), strict=True):
        if tokens == ((0, num_inner),):
            tokens = tuple((start * num_inner, stop * num_inner) for start, stop in of_axis)
        else:
            tokens = normalize(
                (coordinate * num_inner + start, coordinate * num_inner + stop)
                for interval in of_axis
                for coordinate in range(*interval)
                for start, stop in tokens
            )
        num_inner *= length
    return tokens


# Tiles of a grid: token orders that keep neighbours on every axis together, so that a block attends to few keys.
#
# The tokens of a tile attend to boxes of keys that overlap almost entirely, so that the box around all of them is only
# slightly larger than each. Tiles of equal size attend to boxes of equal size, even near borders, and are computed as
# one run.


# the engine does not accept longer blocks
MAX_TILE_TOKENS = 512
# gathering a key for a tile takes as long as this many scores: measured 44 to 110 (3,136 tokens, 8 heads, one thread)
SCORES_PER_KEY = 64
# numbers of coordinates that a tile may have on an axis
SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# a side that divides an axis evenly is used if it is between 0.6 and 1 / 0.6 times the best side
EVEN_SHARE = 0.6
# keys in the tables of all tiles of an axis
MAX_TABLE_KEYS = 1 << 20
# queries of an order that are listed in the time of one step of work
QUERIES_PER_STEP = 4

# products of axis patterns; the pattern of the grid is their union
Products = Sequence[Sequence[Pattern]]


@dataclass(frozen=True)
class Tile:
    """Coordinates on one axis, and all coordinates that they attend to."""

    coordinates: Sequence[int]
    reads: Intervals


@dataclass(frozen=True)
class GridTiles(Pattern):
    """All tokens of a tile attend to the same box of keys; queries are counted tile by tile, and keys as in the grid.

    shape: shape of the grid.
    num_tiles: number of tiles on each axis.
    axes: which coordinates each tile of an axis attends to.
    tile_tokens: number of tokens in each tile.
    prefix_tokens: number of keys before the grid, which all tiles attend to.
    """

    # not registered, because it only bounds patterns in token orders, and no config holds it
    kind: ClassVar[str] = "grid_tiles"

    shape: tuple[int, ...]
    num_tiles: tuple[int, ...]
    axes: tuple[Pattern, ...]
    tile_tokens: int
    prefix_tokens: int

    def allowed(self, query: Any, key: Any) -> Any:
        tile, of_grid = query // self.tile_tokens, key >= self.prefix_tokens
        token = (key - self.prefix_tokens) * of_grid
        reads = of_grid
        for axis, count, length in zip(*map(reversed, (self.axes, self.num_tiles, self.shape)), strict=True):
            reads = reads & axis.allowed(tile % count, token % length)
            tile, token = tile // count, token // length
        return reads | (key < self.prefix_tokens)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        read = [(0, self.prefix_tokens)]
        for tile in range(first_query // self.tile_tokens, last_query // self.tile_tokens + 1):
            of_axes = []
            for axis, count, length in zip(*map(reversed, (self.axes, self.num_tiles, self.shape)), strict=True):
                of_axes.append(axis.key_intervals(tile % count, tile % count, length))
                tile //= count
            tokens = crossed(of_axes[::-1], self.shape)
            read += [(start + self.prefix_tokens, stop + self.prefix_tokens) for start, stop in tokens]
        return clip(normalize(read), num_keys)

    @property
    def granularity(self) -> int:
        return self.tile_tokens


def tile_orders(
    shape: tuple[int, ...], products: Products, prefix_tokens: int, is_causal: bool
) -> tuple[TokenOrder, ...] | None:
    """Return an order for the prefix tokens, and one for all tiles of equal size; None: the grid's own order is best.

    Args:
        products: products of axis patterns; the pattern of the grid is their union.
    """
    axes = [Axis(tuple(each[number] for each in products), size) for number, size in enumerate(shape)]
    sides = best_sides(axes)
    tiles = [axis.tiles(side) for axis, side in zip(axes, sides, strict=True)]
    if any(sum(size(tile.reads) for tile in of_axis) > MAX_TABLE_KEYS for of_axis in tiles):
        return None
    orders = [order_of(shape, listed, prefix_tokens) for listed in product(*map(by_size, tiles))]
    num_tokens = prefix_tokens + prod(shape)
    if len(orders) == 1 and orders[0].queries == tuple(range(prefix_tokens, num_tokens)):
        return None
    if prefix_tokens > 0:
        of_prefix = range(prefix_tokens if is_causal else num_tokens)
        orders.insert(0, TokenOrder(range(prefix_tokens), of_prefix, None))
    return tuple(orders)


class Axis:
    """The coordinates of one axis, which coordinates they attend to, and their division into tiles.

    Attributes:
        sequences: the coordinates, in orders in which neighbours attend to nearly the same coordinates: all in one
            sequence, or one sequence per residue class.
    """

    def __init__(self, patterns: tuple[Pattern, ...], length: int) -> None:
        self.patterns, self.length = patterns, length
        orders = [order.queries for order in patterns[0].token_orders(length, length)]
        is_divided = sorted(chain(*orders)) == list(range(length))
        self.sequences = [tuple(order) for order in orders] if is_divided else [tuple(range(length))]

    def reads(self, coordinates: Sequence[int]) -> Intervals:
        """Return all coordinates that at least one of these attends to."""
        return union(
            *(pattern.key_intervals(each, each, self.length) for pattern in self.patterns for each in coordinates)
        )

    def num_reads(self, side: int) -> int:
        """Return how many coordinates a tile far from the borders attends to."""
        sequence = max(self.sequences, key=len)
        first = max(0, (len(sequence) - side) // 2)
        return size(self.reads(sequence[first : first + side]))

    def tiles(self, side: int) -> list[Tile]:
        """Return tiles of at most `side` coordinates that hold all of them, about equally long within a sequence."""
        found = []
        for sequence in self.sequences:
            count = -(-len(sequence) // side)
            edges = [len(sequence) * number // count for number in range(count + 1)]
            for start, stop in pairwise(edges):
                coordinates = sequence[start:stop]
                found.append((sequence, Tile(coordinates, self.reads(coordinates))))
        width = max(size(tile.reads) for _, tile in found)
        return [widened(tile, sequence, width) for sequence, tile in found]


def widened(tile: Tile, sequence: Sequence[int], width: int) -> Tile:
    """Return a tile that attends to `width` neighbours of its sequence even near the ends of the sequence.

    A tile that does not attend to neighbours of its sequence is returned unchanged.
    """
    first = bisect_left(sequence, tile.reads[0][0]) if tile.reads else 0
    if intervals_of(sequence[first : first + size(tile.reads)]) != tile.reads:
        return tile
    start = max(0, min(first, len(sequence) - width))
    return Tile(tile.coordinates, intervals_of(sequence[start : start + width]))


def intervals_of(coordinates: Iterable[int]) -> Intervals:
    """Return coordinates as intervals."""
    return normalize((each, each + 1) for each in coordinates)


def by_size(tiles: Iterable[Tile]) -> list[list[Tile]]:
    """Return the tiles grouped by their number of coordinates."""
    listed: dict[int, list[Tile]] = {}
    for tile in tiles:
        listed.setdefault(len(tile.coordinates), []).append(tile)
    return list(listed.values())


def best_sides(axes: Sequence[Axis]) -> list[int]:
    """Return how many coordinates a tile has on each axis; sides grow as long as that saves time."""

    def time(sides: Sequence[int]) -> float:
        # per query
        num_keys = prod(axis.num_reads(side) for axis, side in zip(axes, sides, strict=True))
        return num_keys * (1 + SCORES_PER_KEY / prod(sides))

    best, longest = [1] * len(axes), [max(map(len, axis.sequences)) for axis in axes]
    while True:
        longer = [
            [*best[:number], min(next(each for each in SIDES if each > side), longest[number]), *best[number + 1 :]]
            for number, side in enumerate(best)
            if side < min(longest[number], SIDES[-1])
        ]
        found = min((sides for sides in longer if prod(sides) <= MAX_TILE_TOKENS), key=time, default=best)
        if found == best or time(found) > time(best):
            return list(map(even_side, longest, best))
        best = found


def even_side(length: int, side: int) -> int:
    """Return the side nearest to this one that divides a length evenly; the same if none is near.

    >>> even_side(56, 8), even_side(128, 7), even_side(37, 7)
    (8, 8, 7)
    """
    even = (each for each in range(1, length + 1) if length % each == 0 and EVEN_SHARE * each <= side)
    return min((each for each in even if each >= EVEN_SHARE * side), key=lambda each: abs(each - side), default=side)


def order_of(shape: tuple[int, ...], tiles: Sequence[Sequence[Tile]], prefix_tokens: int) -> TokenOrder:
    """Return the order of all tiles of the grid that combine one listed tile of each axis."""
    strides = [prod(shape[number + 1 :]) for number in range(len(shape))]
    moved = [
        [tuple(each * stride for each in tile.coordinates) for tile in of_axis]
        for of_axis, stride in zip(tiles, strides, strict=True)
    ]
    queries = tuple(prefix_tokens + sum(token) for tile in product(*moved) for token in product(*tile))
    charge(len(queries) // QUERIES_PER_STEP)
    local = GridTiles(
        shape=shape,
        num_tiles=tuple(map(len, tiles)),
        axes=tuple(map(read_by, tiles, shape)),
        tile_tokens=prod(len(of_axis[0].coordinates) for of_axis in tiles),
        prefix_tokens=prefix_tokens,
    )
    return TokenOrder(queries, range(prefix_tokens + prod(shape)), local)


def read_by(tiles: Iterable[Tile], length: int) -> Pattern:
    """Return the pattern in which query i is the i-th tile of an axis, and keys are the coordinates it attends to."""
    read = [tile.reads for tile in tiles]
    if all(intervals == ((0, length),) for intervals in read):
        return Full()
    return KeyTable([[key for interval in intervals for key in range(*interval)] for intervals in read])
