"""BigBird (Zaheer et al., 2020, section 2), with random blocks drawn our way or exactly as in the published code."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from threading import Lock

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.algebra import check_pattern
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.blocks import Blocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.intervals import Intervals, charge, complement, size, work_budget
from hf_efficient_attn.patterns.pattern import DrawnBlocks, Pattern
from hf_efficient_attn.patterns.serialization import check_bool, check_choice, check_integer
from hf_efficient_attn.patterns.tables import KeyTable

# Random attention between blocks (Zaheer et al., BigBird, 2020, section 2).


# work for drawing a row, and for each of its blocks
STEPS_PER_RANDOM_ROW, STEPS_PER_BLOCK = 32, 2


@dataclass(frozen=True)
class RandomBlocks(Pattern, kind="random_blocks"):
    """Every block of queries attends to `num_blocks` distinct random blocks of keys, drawn for each layer and head.

    A draw is a pure function of the seed, the layer, the head, the block of queries and the number of blocks. It is the
    same in training and evaluation, on every device and at every batch size, and it does not use a global random
    generator.

    num_blocks: random blocks per block of queries; fewer if there are fewer candidates.
    block_tokens: tokens per block; the last may be shorter.
    exclude: a pattern of tokens. If it lets a query attend to any key of a block, this block is not a candidate for the
        query's block.
    is_causal: candidates lie strictly before the block of queries, and a draw does not depend on the length. Decoding
        with a cache therefore attends to the same blocks as a forward pass over the whole sequence.

    Raises:
        ConfigurationError: numbers below 1, a seed that is not an integer, or a causal pattern whose `exclude` depends
            on the length.
        WorkLimitError: a length at which there are too many blocks, or at which `exclude` attends to single keys nearly
            everywhere.
    """

    num_blocks: int
    block_tokens: int
    seed: int = 0
    exclude: Pattern | None = None
    is_causal: bool = False

    def __post_init__(self) -> None:
        check_integer(self.kind, "num_blocks", self.num_blocks, at_least=1)
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)
        check_integer(self.kind, "seed", self.seed, at_least=0)
        check_bool(self.kind, "is_causal", self.is_causal)
        if self.exclude is None:
            return
        check_pattern(self.kind, self.exclude)
        if self.is_causal and self.exclude.depends_on_length:
            raise ConfigurationError(
                f"{self.kind}: causal random blocks cannot depend on the length, but exclude does: "
                f"{shown(self.exclude)}. Exclude a pattern without negative positions and without bidirectional random "
                "blocks."
            )

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return () if self.exclude is None else (self.exclude,)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return replace(self, exclude=parts[0] if parts else None)

    @property
    def depends_on_length(self) -> bool:
        return not self.is_causal

    @property
    def is_random(self) -> bool:
        return True

    @property
    def max_tokens_ahead(self) -> int | None:
        return -1 if self.is_causal else None

    def drawn_blocks(self) -> DrawnBlocks:
        return DrawnBlocks(self.num_blocks, self.block_tokens)

    def causal(self) -> Pattern:
        """Return the causal form.

        Raises:
            ConfigurationError: `exclude` depends on the length, as in the bidirectional BigBird.
        """
        if not self.is_causal and self.exclude is not None and self.exclude.depends_on_length:
            raise ConfigurationError(
                f"These random blocks have no causal form, because they exclude {shown(self.exclude, 100)}, which "
                "depends on the length of the text, like the global last block of bigbird(). In a causal model, use "
                "bigbird(..., causal=True), or random blocks that exclude no such pattern."
            )
        return replace(self, is_causal=True)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        num_blocks = -(-num_keys // self.block_tokens)
        what = (
            f"{self.kind}: drawing num_blocks={self.num_blocks} blocks of block_tokens={self.block_tokens} for each of "
            f"{num_blocks} rows of blocks"
        )
        with work_budget(
            what, "Use longer blocks or fewer blocks per row, and exclude a pattern of whole blocks (Blocks)."
        ):
            charge(num_blocks * (STEPS_PER_RANDOM_ROW + STEPS_PER_BLOCK * min(num_blocks, self.num_blocks)))
            return Blocks(_draw_random_blocks(self, num_blocks, layer, head, num_heads), self.block_tokens)


# called in every forward pass; entries are small: num_blocks integers per row of blocks
@lru_cache(maxsize=512)
def _draw_random_blocks(pattern: RandomBlocks, num_rows: int, layer: int, head: int, num_heads: int) -> KeyTable:
    if pattern.is_causal:
        return KeyTable(_causal_rows(pattern, layer, head, num_heads).first(num_rows))
    exclude = _excluded(pattern, num_rows, layer, head, num_heads)
    return KeyTable(tuple(_row(pattern, exclude, row, num_rows, layer, head) for row in range(num_rows)))


@lru_cache(maxsize=512)
def _causal_rows(pattern: RandomBlocks, layer: int, head: int, num_heads: int) -> "GrowingRows":
    return GrowingRows(pattern, layer, head, num_heads)


class GrowingRows:
    """The rows of a causal draw, which are the same at every length: for a longer text, only new rows are drawn."""

    def __init__(self, pattern: RandomBlocks, layer: int, head: int, num_heads: int) -> None:
        self.pattern, self.place = pattern, (layer, head, num_heads)
        self.rows: list[tuple[int, ...]] = []
        self.lock = Lock()

    def first(self, num_rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the first rows."""
        with self.lock:
            if len(self.rows) < num_rows:
                exclude = _excluded(self.pattern, num_rows, *self.place)
                self.rows += [
                    _row(self.pattern, exclude, row, row + 1, *self.place[:2])
                    for row in range(len(self.rows), num_rows)
                ]
            return tuple(self.rows[:num_rows])


def _excluded(pattern: RandomBlocks, num_rows: int, layer: int, head: int, num_heads: int) -> Pattern | None:
    return pattern.exclude and pattern.exclude.resolve(num_rows * pattern.block_tokens, layer, head, num_heads)


def _row(
    pattern: RandomBlocks, exclude: Pattern | None, row: int, num_rows: int, layer: int, head: int
) -> tuple[int, ...]:
    """Draw the blocks that a row attends to."""
    block, num_candidates = pattern.block_tokens, row if pattern.is_causal else num_rows
    touched = exclude.key_intervals(row * block, (row + 1) * block - 1, num_rows * block) if exclude else ()
    touched_blocks = tuple((start // block, -(-stop // block)) for start, stop in touched)
    length = "any" if pattern.is_causal else num_rows
    generator = Random(f"seed {pattern.seed} layer {layer} head {head} row {row} of {length}")
    return _sample(generator, complement(touched_blocks, num_candidates), pattern.num_blocks)


def _sample(generator: Random, candidates: Intervals, num_blocks: int) -> tuple[int, ...]:
    """Draw `num_blocks` distinct candidates, or all if there are fewer.

    These are the first steps of a Fisher-Yates shuffle with `random()`, whose numbers Python promises never to change.
    """
    num_left, moved, drawn = size(candidates), dict[int, int](), []
    if num_left <= num_blocks:
        return tuple(key for start, stop in candidates for key in range(start, stop))
    for _ in range(num_blocks):
        place = int(generator.random() * num_left)
        num_left -= 1
        drawn.append(_nth(candidates, moved.get(place, place)))
        moved[place] = moved.get(num_left, num_left)
    return tuple(sorted(drawn))


def _nth(intervals: Intervals, index: int) -> int:
    for start, stop in intervals:
        if index < stop - start:
            break
        index -= stop - start
    return start + index


# lengths at which the published code draws only from the first 1,024 tokens, as if the length were 4,096 tokens
PREFIX_LENGTHS = {"authors": (1024, 2048, 3072, 4096), "transformers": (1024, 3072, 4096)}
PREFIX_TOKENS, GRID_TOKENS = 1024, 4096
# work for drawing a row, in addition to one step for each block that is shuffled
STEPS_PER_ROW = 8

# the random blocks of one head, row by row
Rows = tuple[tuple[int, ...], ...]


def bigbird(
    block_tokens: int = 64, num_random_blocks: int = 3, seed: int = 0, plan: str = "seeded", causal: bool = False
) -> Pattern:
    """Return BigBird-ITC: the three blocks around a query, global first and last blocks, and random blocks.

    Args:
        block_tokens: tokens per block.
        num_random_blocks: random blocks for each block of queries that is not global.
        seed: seed of the random blocks.
        plan: "seeded" draws them with `RandomBlocks` from all blocks that the rest of the pattern does not touch;
            "authors" and "transformers" draw exactly as their code does in training, see `BigBirdBlocks`.
        causal: the causal form of this package, which is not in the paper: own and previous block, global first block,
            and random blocks strictly before the query's block.

    Raises:
        ConfigurationError: an unknown plan, a plan without a causal form, or invalid numbers.
    """
    check_choice("bigbird", "plan", plan, ("seeded", *PREFIX_LENGTHS))
    check_integer("bigbird", "num_random_blocks", num_random_blocks, at_least=0)
    if causal and plan != "seeded":
        raise ConfigurationError(f"bigbird: plan={shown(plan)} has no causal form; use plan='seeded'.")
    if causal:
        rest = Blocks(Band(left=1, right=0) | GlobalTokens([0]), block_tokens).causal()
    else:
        rest = Blocks(Band(left=1, right=1) | GlobalTokens([0, -1]), block_tokens)
    if num_random_blocks == 0:
        return rest
    if plan == "seeded":
        return rest | RandomBlocks(num_random_blocks, block_tokens, seed, exclude=rest, is_causal=causal)
    return rest | BigBirdBlocks(num_random_blocks, block_tokens, seed, plan)


@dataclass(frozen=True)
class BigBirdBlocks(Pattern, kind="bigbird_blocks"):
    """The random blocks of the published BigBird code, number for number: numpy's legacy generator, seed + layer.

    They lie in the first 1,024 tokens, or in the first (2·num_blocks + 5) blocks, whatever the length. A drawn block
    that the queries attend to anyway counts once.

    num_blocks: random blocks per block of queries. block_tokens: tokens per block.
    plan: "authors" (google-research/bigbird) or "transformers", which differ at 2,048 tokens.

    Raises:
        ConfigurationError: numbers below 1, a negative seed, or an unknown plan.
    """

    num_blocks: int
    block_tokens: int
    seed: int = 0
    plan: str = "authors"

    def __post_init__(self) -> None:
        check_integer(self.kind, "num_blocks", self.num_blocks, at_least=1)
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)
        check_integer(self.kind, "seed", self.seed, at_least=0)
        check_choice(self.kind, "plan", self.plan, PREFIX_LENGTHS)

    @property
    def depends_on_length(self) -> bool:
        return True

    @property
    def is_random(self) -> bool:
        return True

    def drawn_blocks(self) -> DrawnBlocks:
        return DrawnBlocks(self.num_blocks, self.block_tokens)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        num_rows = -(-num_keys // self.block_tokens)
        what = (
            f"{self.kind}: shuffling blocks one by one, like the published code, for num_blocks={self.num_blocks}, "
            f"{num_rows} rows of blocks of block_tokens={self.block_tokens} and {num_heads} heads"
        )
        with work_budget(what, "Use longer blocks, or plan='seeded' (random_blocks)."):
            charge(num_heads * _num_steps(self, num_rows))
            # the layer is part of the seed, so that layers share the cache
            heads = _draw(replace(self, seed=self.seed + layer), num_rows, num_heads)
        return Blocks(KeyTable(heads[head]), self.block_tokens)


def _num_steps(pattern: BigBirdBlocks, num_rows: int) -> int:
    """Return how many blocks the code shuffles for one head, in all rows together, plus STEPS_PER_ROW per row."""
    if num_rows * pattern.block_tokens in PREFIX_LENGTHS[pattern.plan]:
        return GRID_TOKENS // pattern.block_tokens * (PREFIX_TOKENS // pattern.block_tokens + STEPS_PER_ROW)
    border, count = _first_segment(num_rows, pattern.num_blocks)
    in_a_row = border * (count > 0) + (num_rows - border) * (pattern.num_blocks > count)
    return num_rows * (in_a_row + STEPS_PER_ROW)


@lru_cache(maxsize=64)
def _draw(pattern: BigBirdBlocks, num_rows: int, num_heads: int) -> tuple[Rows, ...]:
    """Return the rows of every head; all heads are drawn from one stream."""
    stream = _LegacyStream(pattern.seed)
    if num_rows * pattern.block_tokens in PREFIX_LENGTHS[pattern.plan]:
        drawn = [_prefix_rows(stream, pattern) for _ in range(num_heads)]
    else:
        drawn = _segment_rows(stream, num_rows, pattern.num_blocks, num_heads)
    # the first and the last row are global
    return tuple(((), *(tuple(row) for row in rows[1 : num_rows - 1]), ()) for rows in drawn)


def _prefix_rows(stream: "_LegacyStream", pattern: BigBirdBlocks) -> list[list[int]]:
    """Draw one head for a length of 4,096 tokens, from the blocks 1, 2, ... of the first 1,024 tokens."""
    candidates = range(1, PREFIX_TOKENS // pattern.block_tokens)
    rows: list[list[int]] = [[]]
    for row in range(1, GRID_TOKENS // pattern.block_tokens - 1):
        others = [block for block in candidates if abs(block - row) > 1]
        rows.append(stream.permutation(others)[: pattern.num_blocks])
    return rows


def _segment_rows(stream: "_LegacyStream", num_rows: int, num_blocks: int, num_heads: int) -> list[list[list[int]]]:
    """Draw all heads from one or two segments of blocks, row by row, and head by head within a row."""
    heads: list[list[list[int]]] = [[[] for _ in range(num_rows)] for _ in range(num_heads)]

    def draw(rows: Iterable[int], start: int, stop: int, count: int) -> None:
        for row in rows if count else ():
            for head in heads:
                head[row] += _candidates(stream.permutation(range(start, stop)), row, stop)[:count]

    border, count = _first_segment(num_rows, num_blocks)
    early, late = range(1, border), range(border, num_rows)
    # the second segment is drawn for the early rows before the first segment is drawn for the late ones
    draw(early, 0, border, count)
    draw(early, border, num_rows, num_blocks - count)
    draw(late, 0, border, count)
    draw(late, border, num_rows, num_blocks - count)
    return heads


def _first_segment(num_rows: int, num_blocks: int) -> tuple[int, int]:
    """Return the length of the first segment in blocks, and how many random blocks come from it."""
    if 2 * num_blocks + 5 < num_rows:
        return 2 * num_blocks + 5, num_blocks
    if num_blocks + 5 < num_rows:
        return num_blocks + 5, num_blocks // 2
    return num_rows, num_blocks


def _candidates(blocks: Sequence[int], row: int, stop: int) -> list[int]:
    """Return `blocks` without those that the code treats as neighbours or global in a segment that ends at `stop`."""
    left_out = {row - 1, row, row + 1, 0, stop - 1}
    # next to a global row, the code also leaves out the neighbour of the global block at the other end
    left_out |= {stop - 2} if row == 1 else set()
    left_out |= {1} if row == stop - 2 else set()
    return [block for block in blocks if block not in left_out]


class _LegacyStream:
    """The part of `numpy.random.RandomState(seed)` that shuffles: MT19937, and indices by masked rejection."""

    def __init__(self, seed: int) -> None:
        state = [seed & 0xFFFFFFFF]
        for index in range(1, 624):
            state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + index) & 0xFFFFFFFF)
        self._generator = Random()
        self._generator.setstate((3, (*state, 624), None))

    def permutation(self, values: Iterable[int]) -> list[int]:
        """Return `values` in random order."""
        shuffled = list(values)
        for last in range(len(shuffled) - 1, 0, -1):
            place = self._at_most(last)
            shuffled[last], shuffled[place] = shuffled[place], shuffled[last]
        return shuffled

    def _at_most(self, limit: int) -> int:
        mask = (1 << limit.bit_length()) - 1
        while (value := self._generator.getrandbits(32) & mask) > limit:
            pass
        return value
