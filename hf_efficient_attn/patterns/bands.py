"""Patterns by distance: full, causal, band, dilated and strided attention, keys that stand for blocks, block top-k.

Lin et al., A Survey of Transformers (2022), section 4.1.1; Beltagy et al., Longformer (2020), section 3.1.
"""

from dataclasses import dataclass
from functools import reduce, wraps
from math import gcd
from operator import and_
from typing import Any, ClassVar, NoReturn, TypeVar

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.intervals import (
    MOVING_INTERVAL,
    CrossingError,
    Intervals,
    Moving,
    MovingIntervals,
    band_pairs,
    charge,
    clip,
    normalize,
)
from hf_efficient_attn.patterns.pattern import ALL_BEFORE, DecodingReach, Pattern, TokenOrder
from hf_efficient_attn.patterns.serialization import MAX_INTEGER, check_integer, is_integer

T = TypeVar("T")


class Distances(Pattern):
    """Query q attends to the keys q + step·i that lie at most `left` tokens before it and `right` tokens after it.

    None: no limit on that side; -1: not even the query itself.
    """

    left: int | None
    right: int | None
    step: int

    def __post_init__(self) -> None:
        for field, limit in (("left", self.left), ("right", self.right)):
            if limit is not None and (not is_integer(limit) or not -1 <= limit <= MAX_INTEGER):
                raise ConfigurationError(
                    f"{self.kind}: {field} is {shown(limit)}; it is the number of tokens on that side that a query "
                    f"attends to: an integer from 0 to {MAX_INTEGER}, -1 to exclude the query itself, or None for no "
                    "limit."
                )
        check_integer(self.kind, "step", self.step, at_least=1)

    def allowed(self, query: Any, key: Any) -> Any:
        # limits are applied to queries or keys alone, which takes less memory than the differences of all pairs; they
        # are subtracted, because sums could overflow
        is_any = self.left is None and self.right is None
        conditions = [(key - query) % self.step == 0] if self.step > 1 or is_any else []
        if self.left is not None:
            conditions.append(key >= query - self.left)
        if self.right is not None:
            conditions.append(query >= key - self.right)
        return reduce(and_, conditions)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if last_query - first_query + 1 < self.step:
            distances = self._distances(first_query, last_query, num_keys)
            charge(len(distances))
            return normalize(
                clip(((first_query + distance, last_query + distance + 1) for distance in distances), num_keys)
            )
        # the keys of neighbouring queries touch and form one interval
        distances = self._distances(first_query, last_query, num_keys)
        return clip([(first_query + distances.start, last_query + distances.stop)], num_keys) if distances else ()

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.step > 1 or first_query == last_query:
            return super().full_key_intervals(first_query, last_query, num_keys)
        distances = self._distances(first_query, last_query, num_keys)
        return clip([(last_query + distances.start, first_query + distances.stop)], num_keys)

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        if first_query == last_query:
            return self.key_intervals(first_query, last_query, num_keys)

        def moving(distance: int) -> Any:
            return Moving(first_query + distance, last_query + distance)

        if self.step > 1:
            if last_query - first_query < MOVING_INTERVAL:
                # single rows are faster
                raise CrossingError
            distances = self._distances(first_query, last_query, num_keys)
            return clip(((moving(distance), moving(distance + 1)) for distance in distances), num_keys)
        start: Any = 0 if self.left is None else moving(-self.left)
        stop: Any = num_keys if self.right is None else moving(self.right + 1)
        return clip([(start, stop)], num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        queries = range(query_offset, query_offset + num_queries)
        distances = self._distances(query_offset, queries.stop - 1, num_keys)
        if self.step == 1:
            return band_pairs(queries, distances.start, distances.stop, num_keys) if distances else 0
        if len(distances) <= self.step:
            return sum(band_pairs(queries, distance, distance + 1, num_keys) for distance in distances)
        # the sum over residue classes, each of which is a band, has fewer terms than the sum over distances
        return sum(
            self.subsample(self.step).num_pairs(len(order.queries), len(order.keys), order.local_query_offset)
            for order in self.token_orders(num_queries, num_keys, query_offset)
        )

    @property
    def period(self) -> int:
        return 1

    @property
    def max_tokens_ahead(self) -> int | None:
        return self.right

    @property
    def unread_tokens_ahead(self) -> int | None:
        if self.right is not None or self.step > 1:
            return None
        return 0 if self.left == -1 else -1

    @property
    def band_limits(self) -> tuple[int | None, int | None] | None:
        return (self.left, self.right) if self.step == 1 else None

    @property
    def spaced_limits(self) -> tuple[int | None, int | None, int] | None:
        return self.left, self.right, self.step

    def decoding_reach(self) -> DecodingReach | None:
        if self.left is None:
            return ALL_BEFORE if self.step == 1 else None
        return DecodingReach(0, max(0, self.left))

    def causal(self) -> Pattern:
        return distances_pattern(self.left, 0 if self.right is None else min(self.right, 0), self.step)

    def subsample(self, step: int) -> Pattern:
        left, right = (None if limit is None else limit // step for limit in (self.left, self.right))
        return distances_pattern(left, right, self.step // gcd(self.step, step))

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return one order, in which the pattern is a band, for each residue class that has both queries and keys."""
        if self.step == 1:
            return super().token_orders(num_queries, num_keys, query_offset)
        firsts = range(query_offset, query_offset + min(self.step, num_queries))
        return tuple(
            TokenOrder(
                queries=range(first, query_offset + num_queries, self.step),
                keys=range(first % self.step, num_keys, self.step),
                local=self.subsample(self.step),
                local_query_offset=first // self.step,
            )
            for first in sorted(firsts, key=lambda first: first % self.step)
            if first % self.step < num_keys
        )

    def _distances(self, first_query: int, last_query: int, num_keys: int) -> range:
        """Return all distances from a query of the range to a key, clipped to the range of the keys."""
        left = last_query if self.left is None else min(self.left, last_query)
        right = num_keys - 1 - first_query if self.right is None else min(self.right, num_keys - 1 - first_query)
        lowest, highest = -(left // self.step), right // self.step
        if highest < lowest:
            return range(0)
        # one past the last distance, so that it is also the stop of an interval
        return range(lowest * self.step, highest * self.step + 1, self.step)


@dataclass(frozen=True)
class Full(Distances, kind="full"):
    """Every query attends to every key."""

    left = None
    right = None
    step = 1


@dataclass(frozen=True)
class Causal(Distances, kind="causal"):
    """Every query attends to itself and to all keys before it."""

    left = None
    right = 0
    step = 1


def says_sides(cls: type[T]) -> type[T]:
    """Return the class with an `__init__` whose error for a missing argument explains left and right."""
    build: Any = cls.__init__

    @wraps(build)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            build(self, *args, **kwargs)
        except TypeError as error:
            what = str(error).removeprefix(f"{cls.__name__}.__init__() ")
            raise ConfigurationError(
                f"{cls.__name__} takes {', '.join(cls.__annotations__)}: {what}. left and right are the "
                "numbers of tokens before and after itself that a query attends to, or None for no limit: left=64, "
                "right=64 for both sides, left=64, right=0 for earlier tokens only."
            ) from error

    cls.__init__ = checked  # type: ignore[assignment, misc]
    return cls


@says_sides
@dataclass(frozen=True)
class Band(Distances, kind="band"):
    """Every query attends to the keys around it: sliding-window attention.

    left, right: how many tokens before and after itself a query attends to. None: no limit; -1: the query does not
        attend to itself either.

    >>> print(Band(left=1, right=0).draw(4))
    ■⬚⬚⬚
    ■■⬚⬚
    ⬚■■⬚
    ⬚⬚■■

    Raises:
        ConfigurationError: a limit below -1.
    """

    left: int | None
    right: int | None
    step = 1


@says_sides
@dataclass(frozen=True)
class Dilated(Distances, kind="dilated"):
    """Every query attends to every `step`-th key around it (Longformer, section 3.1).

    left, right: in tokens, as for `Band`.
    step: distance from key to key in tokens; 1 is a band. The paper counts the gaps between keys, step - 1.

    >>> print(Dilated(left=4, right=0, step=2).draw(5))
    ■⬚⬚⬚⬚
    ⬚■⬚⬚⬚
    ■⬚■⬚⬚
    ⬚■⬚■⬚
    ■⬚■⬚■

    Raises:
        ConfigurationError: a limit below -1, or a step below 1.
    """

    left: int | None
    right: int | None
    step: int


@dataclass(frozen=True)
class Strided(Distances, kind="strided"):
    """Every query attends to every `step`-th key, counted from itself, at any distance.

    Raises:
        ConfigurationError: a step below 1.
    """

    step: int
    left = None
    right = None


def distances_pattern(left: int | None, right: int | None, step: int) -> Pattern:
    """Return the simplest pattern with these limits."""
    if step > 1:
        return Strided(step) if left is None and right is None else Dilated(left, right, step)
    if left is None and right in (None, 0):
        return Full() if right is None else Causal()
    return Band(left, right)


# Longformer's windows, which count the tokens on both sides of a query together, converted to bands.


def band_of_window(attention_window: Any) -> Band:
    """Return the band of a window; the query itself is not counted.

    Raises:
        ConfigurationError: a window that is not an integer, is odd, or is below 2.

    >>> band_of_window(512)
    Band(left=256, right=256)
    """
    if not is_integer(attention_window):
        raise ConfigurationError(
            f"attention_window={shown(attention_window)} must be an integer, such as 512: the number of tokens on both "
            "sides of a query together."
        )
    if attention_window // 2 > MAX_INTEGER:
        raise ConfigurationError(
            f"attention_window={shown(attention_window)} must be at most {2 * MAX_INTEGER}: no input is longer."
        )
    if attention_window < 2 or attention_window % 2:
        nearest = "2" if attention_window < 3 else f"{attention_window - 1} or {attention_window + 1}"
        raise ConfigurationError(
            f"attention_window={shown(attention_window)} counts both sides of a query together, so it must be even "
            f"and at least 2. Use {nearest}."
        )
    return Band(attention_window // 2, attention_window // 2)


# Keys that each stand for several tokens. The last of these tokens and all later ones may attend to such a key.


@dataclass(frozen=True)
class CompressedKeys(Pattern, kind="compressed_keys"):
    """Every query attends to the compressed keys of tokens up to itself (Yuan et al., Native Sparse Attention, 2025).

    Key c stands for the tokens step · c … step · c + block_tokens - 1. The last of these tokens, and all later ones,
    attend to it. Positions of queries count tokens, and positions of keys count compressed keys: these are two axes, so
    `attention` needs `cross=True`. A query before the end of the first block attends to nothing.

    block_tokens: how many tokens a key stands for.
    step: distance from one key to the next in tokens.

    >>> print(CompressedKeys(block_tokens=3, step=2).draw(6, num_keys=3))
    ⬚⬚⬚
    ⬚⬚⬚
    ■⬚⬚
    ■⬚⬚
    ■■⬚
    ■■⬚

    Raises:
        ConfigurationError: a block or a step of less than one token.
    """

    block_tokens: int
    step: int

    def __post_init__(self) -> None:
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)
        check_integer(self.kind, "step", self.step, at_least=1)

    def allowed(self, query: Any, key: Any) -> Any:
        return key <= (query - self.block_tokens + 1) // self.step

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return clip([(0, self._num_ended(last_query))], num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return clip([(0, self._num_ended(first_query))], num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        stop = query_offset + num_queries
        # how many keys all queries attend to, and how many keys at least one query attends to
        every, some = (min(num_keys, self._num_ended(query)) for query in (query_offset, stop - 1))
        left = (some - every) * (stop - self.block_tokens + 1)
        return every * num_queries + left - self.step * (some - every) * (every + some - 1) // 2

    @property
    def needs_two_axes(self) -> bool:
        return True

    @property
    def max_tokens_ahead(self) -> int | None:
        # the index of a key is at most the index of the last token it stands for
        return max(-1, 1 - self.block_tokens)

    def _num_ended(self, query: int) -> int:
        """Return the number of keys that stand only for tokens up to the query."""
        return max(0, (query - self.block_tokens + 1) // self.step + 1)


# Blocks of keys selected by content: every query attends to its own block and to the past blocks with the best scores.


@dataclass(frozen=True)
class BlockTopK(Pattern, kind="block_top_k"):
    """Every query attends to its own block, causally, and to the `num_chosen` - 1 past blocks with the highest scores.

    Mixture of block attention (MoBA, Lu et al., arXiv:2502.13189, equations 3 to 6): the score of a block is the
    dot product of the query, after rotary positions, and the mean of the block's keys; the first block wins a tie.
    Every head selects its own blocks, even if heads share keys. Blocks are counted from the first token of a document.
    No gradient passes through the selection. For sequences of up to `num_chosen` · `block_tokens` tokens, the pattern
    is the same as `Causal()`.

    The selected keys depend on the contents of queries and keys. Therefore this pattern cannot be drawn and cannot be
    part of another pattern: it must be the only pattern of its layer. Pretrained models need further training with it.
    MoBA trains 90% of the tokens with blocks and 10% with full attention, and fine-tunes with full attention in the
    last layers.

    block_tokens: the length of a block in tokens; the paper's models have 512 to 4,096.
    num_chosen: how many blocks a query attends to, its own block included; the paper's models have 3 to 12.

    >>> BlockTopK(block_tokens=512, num_chosen=3).num_keys_of(query=8191, num_keys=8192)
    1536

    Raises:
        ConfigurationError: a block of less than one token, or fewer than one block.
    """

    block_tokens: int
    num_chosen: int
    chooses_by_content: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)
        check_integer(self.kind, "num_chosen", self.num_chosen, at_least=1)

    def allowed(self, query: Any, key: Any) -> Any:
        self._needs_content()

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        self._needs_content()

    def num_keys_of(self, query: int, num_keys: int) -> int:
        block, place = divmod(query, self.block_tokens)
        return min(block, self.num_chosen - 1) * self.block_tokens + place + 1

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        return self._pairs_before(query_offset + num_queries) - self._pairs_before(query_offset)

    @property
    def granularity(self) -> int:
        return self.block_tokens

    @property
    def max_tokens_ahead(self) -> int | None:
        return 0

    def attends_to_all_up_to(self) -> int:
        """Return the length in tokens up to which every query attends to all tokens before it."""
        return self.num_chosen * self.block_tokens

    def _pairs_before(self, stop: int) -> int:
        """Return how many pairs the queries 0 … stop - 1 have."""
        blocks, rest = divmod(stop, self.block_tokens)
        # queries of block b attend to min(b, num_chosen - 1) whole past blocks; summed over all whole blocks
        few = min(blocks, self.num_chosen)
        read = few * (few - 1) // 2 + (blocks - few) * (self.num_chosen - 1)
        own = blocks * self.block_tokens * (self.block_tokens + 1) // 2 + rest * (rest + 1) // 2
        return read * self.block_tokens**2 + rest * min(blocks, self.num_chosen - 1) * self.block_tokens + own

    def _needs_content(self) -> NoReturn:
        raise ConfigurationError(
            f"{self.kind} selects keys by their content, so the keys of a query are known only in attention(q, k, v, "
            "...). Use Causal() for all keys that can be selected, or BlockLocal(block_tokens) & Causal() for the keys "
            "that are always selected."
        )
