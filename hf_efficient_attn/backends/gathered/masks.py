"""Masks of tiles, which are added to scores: FORBIDDEN if a query may not attend to a key, otherwise 0.

A mask is a sum of distances by which a pair is beyond its limits, which takes a third of the time of comparisons.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_efficient_attn.backends.kernels import wide_dtype
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense_mask import groups_on
from hf_efficient_attn.layout.selected_keys import Rounds, Tiles
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, TokenLocations, axis_locations
from hf_efficient_attn.patterns.algebra import allowed_by

# finite, so that kernels need not look for rows without keys; the log-sum-exp of these is below NO_KEYS
FORBIDDEN, NO_KEYS = -3e38, -1e29
# unit of distances beyond limits: a power of 2, by which float32 scales exactly, and greater than -NO_KEYS
PER_TOKEN = 2.0**100
# the position of a place without a key
FAR_AWAY = 2.0**24
# tiles with fewer keys than FEW_KEYS are not checked for masks that change nothing; FAR is after all slots
FEW_KEYS, FAR = 32, 1 << 60
# the document of an empty place among queries, which no key has
NO_QUERY = -2


@dataclass(frozen=True)
class Locations:
    """Where the queries or keys of tiles are.

    Attributes:
        documents: NO_QUERY for empty places among queries, NO_DOCUMENT for keys that no query attends to.
        positions: positions in their documents.
        is_global: whether they are chosen global tokens; None: there are none.
    """

    documents: Tensor
    positions: Tensor
    is_global: Tensor | None


class TileMasks:
    """Makes the masks of the tiles of one call."""

    def __init__(self, call: AttentionCall, device: torch.device, dtype: torch.dtype) -> None:
        self.call = call
        self.dtype = wide_dtype(dtype)
        self.first_place = None if call.chosen is None else call.chosen.first_place
        self.device = device
        groups = call.layout.head_groups()
        self.groups = groups_on(call.layout, device)
        self.is_plain = call.tokens.global_mask is None and call.tokens.segment_ids is None and not call.layout.is_cross
        self.limits = groups[0][2].band_limits if len(groups) == 1 and self.is_plain else None

    @cached_property
    def locations(self) -> tuple[TokenLocations, TokenLocations]:
        """The locations of the tokens on the axis of queries and on that of keys."""
        return axis_locations(self.call.layout, self.call.tokens, self.device)

    def are_triangles(self, tiles: Tiles, self_pairs: str) -> bool:
        """Return whether query i of each tile attends to the keys 0 … i of the tile, empty places aside."""
        is_causal = self.limits == (None, 0) and self.leave_earlier_keys
        return tiles.are_diagonal and is_causal and self.is_band_alone(tiles, self_pairs)

    @property
    def leave_earlier_keys(self) -> bool:
        """Whether neither the pattern nor a mask forbids a key before a query."""
        return self.limits is not None and self.limits[0] is None and self.call.tokens.key_mask is None

    def of(self, tiles: Tiles, self_pairs: str = "as all") -> Tensor | None:
        """Return the mask of tiles, which broadcasts to [sets, tiles, queries, keys]; None: all are allowed.

        self_pairs: whether pairs of a token with itself are allowed "as all" others, "never", or as the "only" ones.
        """
        without_self = self_pairs == "never"
        if tiles.listed is not None and len(self.groups) == 1:
            tiles = tiles.of_sets(torch.zeros(1, dtype=torch.long, device=tiles.keys.device))
            if self.limits is not None:
                return self.of_listed(tiles, self.limits)
        queries, keys = self.query_slots(tiles), self.key_slots(tiles)
        closed: Tensor | None = None
        if self.limits is not None:
            closed = self.beyond_limits(tiles, queries, keys, without_self, self.limits)
            if self.is_band_alone(tiles, self_pairs):
                return closed
        else:
            closed = self.allowed(tiles).to(self.dtype).sub_(1)
        of_keys = tiles.of_keys(keys)
        if self_pairs == "only":
            closed = _sum(closed, _apart(queries, of_keys, self.dtype))
        elif without_self and (self.limits is None or self.limits[1] != 0):
            closed = _sum(closed, _apart(queries, of_keys, self.dtype).neg_().clamp_(max=1).sub_(1))
        if tiles.query_buckets is not None and tiles.key_buckets is not None:
            of_keys = tiles.of_keys(tiles.key_buckets.contiguous())
            closed = _sum(closed, _apart(tiles.query_buckets, of_keys, self.dtype))
        if self.first_place is not None and tiles.query_places is not None:
            key_places = torch.arange(tiles.tile_keys, device=tiles.keys.device)
            beyond = key_places - (tiles.query_places.view(-1, 1, tiles.queries.shape[2]) + self.first_place)[..., None]
            closed = _sum(closed, beyond.clamp_(max=0).to(self.dtype))
        members = tiles.members()
        if members is not None:
            closed = _sum(closed, members.to(self.dtype).sub_(1))
        return self.weighted(tiles, None if closed is None else closed.clamp_(-1, 0).mul_(-FORBIDDEN))

    def of_listed(self, tiles: Tiles, limits: tuple[int | None, int | None]) -> Tensor:
        """Return the mask of one set of tiles that list their pairs; only these pairs are compared with the limits."""
        assert tiles.listed is not None
        (left, right), num_keys = limits, tiles.tile_keys
        keys = self.key_slots(tiles)
        # places without a key, and the place after the last one, count as after all queries
        slots = torch.where(self.is_key(tiles, keys), keys, FAR)[0]
        of_places = torch.cat((slots, slots.new_full((1,), FAR)))
        of_pairs = of_places.index_select(0, tiles.listed.flatten()).view_as(tiles.listed)
        queries = self.query_slots(tiles)[0, 0].view(len(tiles.listed), -1)[:, :1]
        closed = of_pairs > (queries + right if right is not None else FAR - 1)
        if left is not None:
            closed |= of_pairs < queries - left
        mask = torch.full((len(closed), num_keys + 1), FORBIDDEN, dtype=self.dtype, device=closed.device)
        return tiles.repeated(mask.scatter_(1, tiles.listed.masked_fill(closed, num_keys), 0.0)[:, :-1])

    def weighted(self, tiles: Tiles, mask: Tensor | None) -> Tensor | None:
        """Return a mask plus what tiles add to the scores of allowed pairs, the logarithms of their weights."""
        if tiles.counts is not None:
            weight = tiles.counts.to(self.dtype).log()
            mask = weight if mask is None else mask + weight
        if tiles.rounds is not None:
            weight = num_meetings(tiles, tiles.rounds).clamp_(min=1).to(self.dtype).log_().neg_()
            mask = weight if mask is None else weight.add_(mask)
        return mask

    def queries(self, tiles: Tiles) -> Locations:
        """Return where the queries of tiles are, [sets, tiles, queries]."""
        return _at(self.locations[0], tiles.examples[:, None, None], self.query_slots(tiles), NO_QUERY)

    def keys(self, tiles: Tiles) -> Locations:
        """Return where the keys of each tile are, [sets, tiles, keys]."""
        found = _at(self.locations[1], tiles.examples[:, None], self.key_slots(tiles), NO_DOCUMENT)
        seen = [None if each is None else tiles.of_keys(each.contiguous()) for each in vars(found).values()]
        return Locations(*seen)  # type: ignore[arg-type]

    def split(self, tiles: Tiles, self_pairs: str) -> Iterator[tuple[Tiles, bool]]:
        """Yield (tiles, whether all of their pairs are allowed): the sets that need a mask, then those that do not.

        The check is for single tiles on CPUs and the limits of a band; in other calls all sets count as needing a mask.
        """
        has_more = tiles.query_buckets is not None or tiles.rounds is not None or tiles.counts is not None
        is_here = tiles.keys.device.type == "cpu" and tiles.queries.shape[1] == 1
        has_more = has_more or tiles.listed is not None or self_pairs != "as all"
        has_more = has_more or self.first_place is not None
        if self.limits is None or has_more or not is_here or tiles.keys.shape[1] < FEW_KEYS:
            yield tiles, False
            return
        left, right = self.limits
        queries, keys = self.query_slots(tiles)[:, 0], self.key_slots(tiles)
        is_key = self.is_key(tiles, keys).all(1)
        if right is not None:
            last = torch.where(queries >= 0, queries, FAR).amin(1) + right
            is_key &= keys.amax(1) <= last
        if left is not None:
            is_key &= keys.amin(1) >= queries.amax(1) - left
        for sets, is_full in ((~is_key, False), (is_key, True)):
            numbers = torch.nonzero(sets)[:, 0]
            if numbers.numel():
                yield (tiles if numbers.numel() == len(sets) else tiles.of_sets(numbers)), is_full

    def is_key(self, tiles: Tiles, keys: Tensor) -> Tensor:
        """Return which slots of keys hold tokens that are not masked, bool [sets, places]."""
        found = keys >= 0
        if self.call.tokens.key_mask is not None:
            found = found & self.call.tokens.key_mask[tiles.examples[:, None], keys.clamp(min=0)]
        return found

    def query_slots(self, tiles: Tiles) -> Tensor:
        """Return the slots of the queries, [sets, tiles, queries]; -1: an empty place."""
        return torch.where(tiles.queries < 0, -1, tiles.queries + self.call.layout.query_offset)

    def key_slots(self, tiles: Tiles) -> Tensor:
        """Return the slots of the keys of sets, [sets, places]; -1: an empty place."""
        return torch.where(tiles.keys < self.call.layout.num_keys, tiles.keys, -1)

    def beyond_limits(
        self, tiles: Tiles, queries: Tensor, keys: Tensor, without_self: bool, limits: tuple[int | None, int | None]
    ) -> Tensor | None:
        """Return how far pairs of slots are beyond the limits of a band, as negative numbers; None: all are within."""
        left, right = limits
        if right == 0 and without_self:
            right = -1
        is_key, total = self.is_key(tiles, keys), None
        # with a single document, positions differ from slots by a constant; a place without a key is beyond all limits
        if right is not None:
            places = tiles.of_keys(keys.to(self.dtype).masked_fill_(~is_key, FAR_AWAY).mul_(PER_TOKEN))
            total = (queries + right).to(self.dtype).mul_(PER_TOKEN)[..., None] - places[:, :, None]
        if left is not None:
            places = tiles.of_keys(keys.to(self.dtype).masked_fill_(~is_key, -FAR_AWAY).mul_(PER_TOKEN))
            beyond = places[:, :, None] - (queries - left).to(self.dtype).mul_(PER_TOKEN)[..., None]
            total = beyond if total is None else torch.minimum(total, beyond)
        if total is None and not (keys.device.type == "cpu" and bool(is_key.all())):
            total = tiles.of_keys(is_key.to(self.dtype).sub_(1).mul_(PER_TOKEN))[:, :, None]
        return total if total is None else total.clamp_(max=0)

    def is_band_alone(self, tiles: Tiles, self_pairs: str) -> bool:
        """Return whether the mask of tiles depends on nothing but the limits of a band."""
        leaves_self = self_pairs == "never" and self.limits is not None and self.limits[1] != 0
        if self_pairs == "only" or leaves_self or self.first_place is not None:
            return False
        return all(part is None for part in (tiles.query_buckets, tiles.listed, tiles.counts, tiles.rounds))

    def allowed(self, tiles: Tiles) -> Tensor:
        """Return which pairs the pattern and the documents allow, bool [sets, tiles, queries, keys]."""
        queries, keys = self.queries(tiles), self.keys(tiles)
        of_queries, of_keys = queries.positions[..., None], keys.positions[:, :, None]
        allowed: Tensor | None = None
        for first, count, pattern in self.groups:
            found = allowed_by(pattern, of_queries, of_keys)
            if len(self.groups) > 1:
                is_own = ((tiles.heads >= first) & (tiles.heads < first + count))[..., None]
                found = found & is_own
            allowed = found if allowed is None else allowed | found
        assert allowed is not None
        if queries.is_global is not None and keys.is_global is not None:
            chosen = queries.is_global[..., None] | keys.is_global[:, :, None]
            if self.call.layout.pattern.is_causal:
                chosen = chosen & (of_keys <= of_queries)
            allowed = allowed | chosen
        return allowed & (queries.documents[..., None] == keys.documents[:, :, None])


def num_meetings(tiles: Tiles, rounds: Rounds) -> Tensor:
    """Return how often the pairs of tiles meet in all rounds, [sets, tiles, queries, keys]."""
    key_chunks = tiles.of_keys(rounds.key_chunks)
    key_buckets = None if rounds.key_buckets is None else tiles.of_keys(rounds.key_buckets)
    total = None
    for own in range(rounds.query_reads.shape[3]):
        for other in range(key_chunks.shape[3]):
            meets = torch.zeros((), dtype=torch.int16, device=key_chunks.device)
            for chunk in rounds.query_reads[..., own, :].unbind(-1):
                meets = meets + (chunk[..., None] == key_chunks[:, :, None, :, other])
            if rounds.query_buckets is not None and key_buckets is not None:
                meets = meets * (rounds.query_buckets[..., own, None] == key_buckets[:, :, None, :, other])
            total = meets if total is None else total + meets
    assert total is not None
    return total


def _at(locations: TokenLocations, examples: Tensor, slots: Tensor, none: int) -> Locations:
    """Return the locations of slots of examples; slots of -1 get the document `none`."""
    rows = (examples if len(locations.documents) > 1 else torch.zeros_like(examples)).expand_as(slots)
    inside = slots.clamp(min=0)
    is_global = None if locations.is_global is None else locations.is_global[rows, inside]
    documents = locations.documents[rows, inside].masked_fill(slots < 0, none)
    return Locations(documents, locations.positions[rows, inside], is_global)


def _apart(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the negative distance between numbers [sets, tiles, queries] and [sets, tiles, keys] for every pair."""
    return (queries.to(dtype)[..., None] - keys.to(dtype)[:, :, None]).abs_().neg_()


def _sum(total: Tensor | None, added: Tensor) -> Tensor:
    if total is None:
        return added
    return total.add_(added) if total.shape == added.shape else total + added
