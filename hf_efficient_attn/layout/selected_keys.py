"""What all choices of keys have in common: their tensors and shapes, groups, and the tiles that hold chosen pairs."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.layout import Layout, first_query
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.serialization import is_integer

# Which groups hold one position.


def holding_groups(queries: Tensor, position: int) -> Tensor:
    """Return the groups that hold a position, [batch, heads, n]; if fewer than n hold it, others fill up the list.

    queries: [batch, heads, groups, places].

    >>> import torch
    >>> holding_groups(torch.tensor([[[[0, 1], [2, 3], [3, 4]]]]), 3).sort().values.tolist()
    [[[1, 2]]]
    """
    holds = (queries == position).any(-1)
    return holds.int().topk(max(1, int(holds.sum(-1).max())) if holds.shape[2] else 0, -1).indices


def of_groups(places: Tensor, groups: Tensor) -> Tensor:
    """Return the places [batch or 1, heads or 1, groups, places] of some groups, [batch, heads, n]."""
    shape = (*groups.shape[:2], *places.shape[2:])
    return places.expand(shape).gather(2, groups[..., None].expand(*groups.shape, places.shape[3]))


# Tiles: chosen pairs as small rectangles of queries and keys, the form in which chosen keys are computed.


class Sizes(NamedTuple):
    """The sizes of a call on which its tiles depend.

    Attributes:
        most_pairs: the maximum number of pairs in tiles that are computed together.
        key_cost: the time that a key costs a tile, independently of its queries, in scores of the tile.
    """

    batch_size: int
    num_heads: int
    num_key_heads: int
    most_pairs: int
    key_cost: float = 0.0


class TileWork(NamedTuple):
    """How much the tiles of one example hold, in all heads: pairs, and rows of queries and keys that are gathered.

    num_listed: pairs in lists from which masks are made, counted once for all heads that share them.
    """

    num_pairs: int
    num_query_rows: int
    num_key_rows: int
    num_listed: int = 0


class Rounds(NamedTuple):
    """Where queries and keys of tiles lie in the rounds of an order, to count how often each pair meets.

    Attributes:
        query_reads: the chunks that a query attends to in each round, [sets, tiles, queries, rounds, n].
        key_chunks: the chunk of a key in each round, [sets, places, rounds]; -1 if the key is in no chunk.
        query_buckets, key_buckets: [sets, tiles, queries, rounds] and [sets, places, rounds]; None if all are equal.
    """

    query_reads: Tensor
    key_chunks: Tensor
    query_buckets: Tensor | None
    key_buckets: Tensor | None


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of equal size, in sets: the tiles of one set use the keys of one head, in order, and may share them.

    Attributes:
        examples, key_heads: the example and the key head of each set, [sets].
        heads: the heads of the queries, [sets, 1 or tiles, 1 or queries].
        queries: numbers of queries of the call, [sets, tiles, queries]; -1 for an empty place.
        keys: indices of keys, [sets, places]; -1 for an empty place. Tile t has the `tile_keys` places from
            t * key_step on.
        first_head, stop_head: the range of example * num_heads + head in which all queries lie.
        query_buckets, key_buckets: in the shapes of `queries` and `keys`; only pairs of equal buckets are selected.
        query_places: the places of the queries in their group, [queries], or [sets, 1, 1] for single queries.
        rounds: given if each pair counts once; None if a pair counts as often as tiles hold it.
        listed: the places of the selected keys, [queries, k], with the number of places for none; None if all keys are
            selected. With it all sets have the same `keys` and the same `queries`, each repeated for its heads.
        are_diagonal: whether query i and key i of each tile are the same token or both empty, and tokens consecutive.
        counts: how often each pair counts, broadcasts to [sets, tiles, queries, keys]; None: once.
        own_place: the place from which on the keys of a set are the queries of its tiles, in order; None if they are
            not.
    """

    examples: Tensor
    heads: Tensor
    key_heads: Tensor
    queries: Tensor
    keys: Tensor
    tile_keys: int
    key_step: int
    first_head: int
    stop_head: int
    query_buckets: Tensor | None = None
    key_buckets: Tensor | None = None
    query_places: Tensor | None = None
    rounds: Rounds | None = None
    counts: Tensor | None = None
    listed: Tensor | None = None
    are_diagonal: bool = False
    own_place: int | None = None

    def of_sets(self, sets: Tensor) -> "Tiles":
        """Return the sets with these numbers; the tiles must have no rounds."""
        names = ("examples", "heads", "key_heads", "queries", "keys", "query_buckets", "key_buckets", "counts")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.query_places is not None and self.query_places.ndim == 3:
            chosen["query_places"] = self.query_places
        own: dict[str, Any] = {name: None if each is None else each[sets] for name, each in chosen.items()}
        return replace(self, **own)

    def members(self) -> Tensor | None:
        """Return which pairs are selected, bool [1, 1, queries, keys]; None if all are."""
        if self.listed is None:
            return None
        members = torch.zeros(len(self.listed), self.tile_keys + 1, dtype=torch.bool, device=self.keys.device)
        return self.repeated(members.scatter_(1, self.listed, True)[:, :-1])

    def repeated(self, rows: Tensor) -> Tensor:
        """Return rows [listed queries, keys] for each head of a query, [1, 1, queries, keys]."""
        group = self.queries.shape[2] // len(rows)
        return (rows if group == 1 else rows.repeat_interleave(group, 0))[None, None]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return overlapping views [sets, tiles, keys of a tile, ...] of a contiguous tensor [sets, places, ...]."""
        sets, step = tensor.shape[0], tensor.stride(1)
        shape = (sets, self.queries.shape[1], self.tile_keys, *tensor.shape[2:])
        return tensor.as_strided(shape, (tensor.stride(0), self.key_step * step, *tensor.stride()[1:]))

    def own_keys(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor [sets, places, ...] that belongs to the queries, [sets, tiles, queries, ...]."""
        assert self.own_place is not None
        own = tensor[:, self.own_place : self.own_place + self.queries[0].numel()]
        return own.unflatten(1, self.queries.shape[1:])

    def added_keys(self, blocks: Tensor) -> Tensor:
        """Return the sums over all tiles, [sets, places, width], of values [sets, tiles, keys of a tile, width]."""
        num_tiles, step = self.queries.shape[1], self.key_step
        last = self.tile_keys - step
        if num_tiles == 1 or last == 0:
            return blocks.flatten(1, 2)
        # the last `key_step` keys of different tiles do not overlap; each tile's are the last but one of the next tile
        total = blocks.new_empty(*self.keys.shape, blocks.shape[3])
        before, end = last - step, last + (num_tiles - 1) * step
        total[:, :before] = 0
        total[:, before:last] = blocks[:, 0, before:last]
        both = total[:, last:end].unflatten(1, (num_tiles - 1, step))
        torch.add(blocks[:, :-1, last:], blocks[:, 1:, before:last], out=both)
        total[:, end:] = blocks[:, -1, last:]
        for first in range(0, before, step):
            shifted = total[:, first : first + num_tiles * step].unflatten(1, (num_tiles, step))
            shifted.add_(blocks[:, :, first : first + step])
        return total


def ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts of `count`, each with at most `step`.

    >>> list(ranges(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    for start in range(0, count, step):
        yield start, min(count, start + step)


def single_tiles(
    examples: Tensor, heads: Tensor, key_heads: Tensor, queries: Tensor, keys: Tensor, bounds: tuple[int, int],
    **options: Any,
) -> Tiles:  # fmt: skip
    """Return sets of one tile each: queries [sets, queries], keys [sets, keys], heads [sets] or [sets, queries]."""
    heads = heads[:, None, None] if heads.ndim == 1 else heads[:, None]
    return Tiles(examples, heads, key_heads, queries[:, None], keys, keys.shape[1], 0, *bounds, **options)


def rows_of_call(positions: Tensor, first: int, num_queries: int) -> Tensor:
    """Return the numbers of the call's queries at positions on their axis; -1 for positions without a query."""
    rows = positions - first
    return torch.where((rows >= 0) & (rows < num_queries), rows, -1)


def own_head(head: Tensor, num_heads: int, num_shared: int) -> Tensor:
    """Return which of `num_shared` heads each head belongs to; each is shared by the same number of `num_heads`."""
    return head // (num_heads // num_shared)


INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SOFTMAX, MEAN = "softmax", "mean"
POSITIONS, PLACES = "positions", "places"
DOCUMENT, AXIS = "document", "axis"


@dataclass(frozen=True)
class States:
    """The properties of a call's queries and keys that a choice of keys must fit."""

    batch_size: int
    num_heads: int
    num_key_heads: int
    num_queries: int
    num_keys: int
    device: torch.device
    is_cross: bool = False


class ChosenKeys:
    """The keys selected for each query by content, as tensors; frozen, and compared by identity.

    The pattern, the documents and the masks of the call remove pairs that they do not allow. A selection is for the
    heads of the call: the second dimension of a tensor is 1 if all heads share a selection, the number of key heads if
    the query heads of one key head share it, or the number of query heads.
    """

    kind: ClassVar[str] = ""
    # the fields that are tensors, and all others, in the order of the class's arguments
    tensor_names: ClassVar[tuple[str, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = ()
    # how the rows of several groups become one: by one softmax, or as the mean of several
    join: str = SOFTMAX
    # what the labels of terms are computed from: positions, or places within a group
    labels_count: str = POSITIONS
    # a query attends to the keys of its group that are at least this many places after its own; None: to all
    first_place: int | None = None
    attends_to_self_last: bool = False
    # whether keys are scaled to length 1
    unit_keys: bool = False
    # from where places are counted: the start of the document, or of the axis
    counted_from: str = AXIS
    # whether most tiles need no mask if the pattern allows all keys up to a query
    has_full_tiles: ClassVar[bool] = False
    # whether all heads that are computed together share the masks of tiles, so that their number does not matter
    shares_masks: ClassVar[bool] = False
    # whether blocks of consecutive keys are listed for each query (`ChosenBlocks`)
    are_blocks: ClassVar[bool] = False

    @property
    def tensors(self) -> list[Tensor | None]:
        """The tensors."""
        return [getattr(self, name) for name in self.tensor_names]

    @property
    def num_choosing_heads(self) -> int:
        """The number of heads with their own choice: 1, the number of key heads, or that of query heads."""
        return max(each.shape[1] for each in self.tensors if each is not None)

    @property
    def numbers(self) -> list[Any]:
        """The values of all other fields."""
        return [getattr(self, name) for name in self.number_names]

    @property
    def traits(self) -> Hashable:
        """Everything that the cost of the choice may depend on: all but the contents of its tensors."""
        shapes = tuple(None if each is None else each.shape for each in self.tensors)
        return self.kind, shapes, tuple(self.numbers)

    @property
    def needs_groups(self) -> bool:
        """Whether groups have their own outputs or labels, so that counting pairs is not enough."""
        return self.join != SOFTMAX or self.labels_count != POSITIONS

    def has_single_rows(self, layout: Layout) -> bool:
        """Return whether the tiles are known to hold each query at most once, with all of its keys."""
        return False

    def of_query(self, query: int, position: int) -> "ChosenKeys":
        """Return the choice for a call with only one query of this call.

        query, position: the number of the query in this call, and its position on the axis.
        """
        raise NotImplementedError

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return how often each pair is selected, before masks: int [batch or 1, heads or 1, queries, keys].

        query_start: as for `allowed_pairs`.
        """
        raise NotImplementedError

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield tiles that together hold every selected pair as often as it counts; masks are applied afterwards.

        only: the queries whose tiles are wanted, bool [batch, heads, queries]; None: all. `attends_to_self_last` uses
            it.
        """
        raise NotImplementedError

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold, without waiting for the contents of tensors."""
        raise NotImplementedError

    def most_pairs(self, layout: Layout, num_key_heads: int) -> int:
        """Return how many pairs can be selected in all heads of one example, whatever the tensors contain."""
        return self.work(layout, Sizes(1, layout.num_heads, num_key_heads, 0)).num_pairs

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        raise NotImplementedError

    def check_tensor(self, name: str, states: States, rest: dict[str, int | None]) -> None:
        """Raise InputError unless a field is an integer tensor [batch or 1, heads, …] on the device of the call.

        rest: what the other dimensions count, and how many there must be; None: any number.
        """
        tensor, argument = getattr(self, name), f"{type(self).__name__}.{name}"
        if not isinstance(tensor, Tensor):
            raise InputError(f"{argument} is a {type(tensor).__name__}; it must be a tensor of integers.")
        if tensor.dtype not in INTEGERS:
            raise InputError(f"{argument} has dtype {tensor.dtype}; it must hold integers. Use {name}.long().")
        if tensor.device != states.device:
            raise InputError(f"{argument} is on {tensor.device}, and q, k and v on {states.device}; move it there.")
        heads = (1, states.num_key_heads, states.num_heads)
        fits = tensor.ndim == 2 + len(rest) and tensor.shape[0] in (1, states.batch_size) and tensor.shape[1] in heads
        if not fits or any(n not in (None, size) for n, size in zip(rest.values(), tensor.shape[2:], strict=True)):
            listed = ", ".join(what if count is None else f"{count} {what}" for what, count in rest.items())
            raise InputError(
                f"{argument} has shape {list(tensor.shape)}; it must be [{_either(1, states.batch_size)} examples, "
                f"{_either(*heads)} heads, {listed}]."
            )

    def check_count(self, name: str, at_least: int) -> None:
        """Raise InputError unless a field is an integer of at least `at_least`."""
        value = getattr(self, name)
        if not is_integer(value) or value < at_least:
            raise InputError(f"{type(self).__name__}.{name}={shown(value)} must be an integer of at least {at_least}.")

    def check_word(self, name: str, words: Sequence[str]) -> None:
        """Raise InputError unless a field is one of these words."""
        value = getattr(self, name)
        if value not in words:
            raise InputError(f"{type(self).__name__}.{name}={shown(value)} must be {_either(*map(shown, words))}.")


def _either(*values: Any) -> str:
    """Return the distinct values as text, joined by "or"."""
    return " or ".join(map(str, dict.fromkeys(values)))


def in_range(numbers: Tensor, count: int) -> Tensor:
    """Return the numbers as int64, with `count` in place of those that are not from 0 to count - 1."""
    numbers = numbers.long()
    return torch.where((numbers >= 0) & (numbers < count), numbers, count)


def near_places(first_place: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return which pairs of places `first_place` allows, bool [queries, keys].

    >>> near_places(-1, 2, 3, torch.device("cpu")).int().tolist()
    [[1, 1, 1], [1, 1, 1]]
    >>> near_places(1, 2, 3, torch.device("cpu")).int().tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    queries, keys = (torch.arange(count, device=device) for count in (num_queries, num_keys))
    return keys >= queries[:, None] + first_place


def of_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Return a tensor of 1, key or query heads as [batch, query heads or 1, ...]; each key head is repeated."""
    return tensor if tensor.shape[1] in (1, num_heads) else tensor.repeat_interleave(num_heads // tensor.shape[1], 1)


# The common part of all choices in groups: lists of queries, and of the keys that they attend to.


class Groups(NamedTuple):
    """Positions of queries and keys that form groups; numbers out of range are empty places.

    Attributes:
        queries, keys: int64 [batch or 1, heads, groups, places].
        query_buckets, key_buckets: in the same shapes; only pairs of equal buckets are selected. None: all pairs.
    """

    queries: Tensor
    keys: Tensor
    query_buckets: Tensor | None = None
    key_buckets: Tensor | None = None


class GroupedKeys(ChosenKeys):
    """Keys that are selected in groups."""

    def groups(self) -> Groups:
        """Return the groups."""
        raise NotImplementedError

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return how many pairs of places hold each pair."""
        found = self.groups()
        num_queries, num_keys = layout.num_queries, layout.num_keys
        queries = in_range(found.queries - first_query(layout, query_start), num_queries)[..., None]
        keys = in_range(found.keys, num_keys)[..., None, :]
        is_pair = (queries < num_queries) & (keys < num_keys)
        if found.query_buckets is not None and found.key_buckets is not None:
            is_pair = is_pair & (found.query_buckets[..., None] == found.key_buckets[..., None, :])
        if self.first_place is not None:
            is_pair = is_pair & near_places(self.first_place, queries.shape[3], keys.shape[4], keys.device)
        numbers = torch.where(is_pair, queries * num_keys + keys, num_queries * num_keys)
        counts = torch.zeros(*numbers.shape[:2], num_queries * num_keys + 1, dtype=torch.int32, device=numbers.device)
        # a compiler cannot join the axes of groups and places for every number of groups
        examples, heads = (torch.arange(size, device=numbers.device) for size in numbers.shape[:2])
        index = (examples.view(-1, 1, 1, 1, 1), heads.view(-1, 1, 1, 1), numbers)
        counts = counts.index_put(index, torch.ones_like(numbers, dtype=torch.int32), accumulate=True)
        return counts[..., :-1].unflatten(2, (num_queries, num_keys))


# The number of tiles of a choice, for which the host waits in the forward pass, but not again in the backward pass.


_known: BoundedCache[list[int]] = BoundedCache(SMALL_BYTES)


def counted_once(owners: Iterable[Tensor | None], key: Hashable, counts: Tensor) -> list[int]:
    """Return `counts` [n] as a list, cached by the tensors and the key that determine it, to wait for it only once."""
    if counts.device.type == "cpu":
        return counts.tolist()  # type: ignore[no-any-return]
    return _known.get_of(owners, key, counts.tolist)
