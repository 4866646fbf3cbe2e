"""Random attention between blocks (Zaheer et al., BigBird, 2020, section 2)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from threading import Lock

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.blocks import Blocks
from hf_efficient_attn.patterns.bounds import DrawnBlocks
from hf_efficient_attn.patterns.checks import check_bool, check_integer
from hf_efficient_attn.patterns.intervals import Intervals, complement, size
from hf_efficient_attn.patterns.part_checks import check_pattern
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.tables import KeyTable
from hf_efficient_attn.patterns.work import bounded, spend

# of drawing a row, and each of its blocks
STEPS_PER_ROW, STEPS_PER_BLOCK = 32, 2


@dataclass(frozen=True)
class RandomBlocks(Pattern, kind="random_blocks"):
    """Every block of queries reads `num_blocks` distinct blocks of keys, drawn at random for each layer and head.

    A draw is a pure function of seed, layer, head, row of blocks and number of blocks: it is the same in training and
    evaluation, on every device and at every batch size, and touches no global generator.

    num_blocks: random blocks per row, fewer if there are fewer candidates.
    block_tokens: tokens per block; the last may be shorter.
    exclude: a pattern of tokens; the blocks that it touches in a row are not candidates there.
    is_causal: candidates lie strictly before the row, and a draw does not depend on the length, so that decoding with
        a cache reads the same blocks as a forward pass over the whole sequence.

    Raises:
        ConfigurationError: numbers below 1, a seed that is not an integer, or a causal pattern that excludes one that
            depends on the length.
        WorkLimitError: a length at which it has too many blocks, or `exclude` reads single keys nearly everywhere.
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
                f"{self.kind}: a causal draw cannot depend on the length, but exclude does: {shown(self.exclude)}. "
                "Exclude a pattern without negative positions and without bidirectional random blocks."
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
                f"These random blocks have no causal form: they exclude {shown(self.exclude, 100)}, which "
                "depends on the length of the text, as the global last block of bigbird() does. In a causal model use "
                "bigbird(..., causal=True), or random blocks that exclude no such pattern."
            )
        return replace(self, is_causal=True)

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        num_blocks = -(-num_keys // self.block_tokens)
        what = (
            f"{self.kind}: drawing num_blocks={self.num_blocks} blocks of block_tokens={self.block_tokens} for each of "
            f"{num_blocks} rows of blocks"
        )
        with bounded(what, "Take longer blocks or fewer for each row, and exclude a pattern of whole blocks (Blocks)."):
            spend(num_blocks * (STEPS_PER_ROW + STEPS_PER_BLOCK * min(num_blocks, self.num_blocks)))
            return Blocks(_draw(self, num_blocks, layer, head, num_heads), self.block_tokens)


# a model asks in every forward pass; entries are small: num_blocks integers per row of blocks
@lru_cache(maxsize=512)
def _draw(pattern: RandomBlocks, num_rows: int, layer: int, head: int, num_heads: int) -> KeyTable:
    if pattern.is_causal:
        return KeyTable(_causal_rows(pattern, layer, head, num_heads).first(num_rows))
    exclude = _excluded(pattern, num_rows, layer, head, num_heads)
    return KeyTable(tuple(_row(pattern, exclude, row, num_rows, layer, head) for row in range(num_rows)))


@lru_cache(maxsize=512)
def _causal_rows(pattern: RandomBlocks, layer: int, head: int, num_heads: int) -> "GrowingRows":
    return GrowingRows(pattern, layer, head, num_heads)


class GrowingRows:
    """The rows of a causal draw, which are the same at every length: as a text gets longer, only new ones are drawn."""

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
    """Draw the blocks that a row reads."""
    block, num_candidates = pattern.block_tokens, row if pattern.is_causal else num_rows
    touched = exclude.key_intervals(row * block, (row + 1) * block - 1, num_rows * block) if exclude else ()
    touched_blocks = tuple((start // block, -(-stop // block)) for start, stop in touched)
    length = "any" if pattern.is_causal else num_rows
    generator = Random(f"seed {pattern.seed} layer {layer} head {head} row {row} of {length}")
    return _sample(generator, complement(touched_blocks, num_candidates), pattern.num_blocks)


def _sample(generator: Random, candidates: Intervals, num_blocks: int) -> tuple[int, ...]:
    """Draw `num_blocks` distinct candidates, or all if there are fewer.

    It makes the first steps of a Fisher-Yates shuffle by `random()`, whose numbers Python promises never to change.
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
