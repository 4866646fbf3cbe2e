"""Random patterns of every public kind, for `tests/fuzz_engine.py`."""

import math
import random
from collections.abc import Callable, Sequence

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns import (
    Band,
    BigBirdBlocks,
    BlockLocal,
    Blocks,
    Causal,
    CompressedKeys,
    Dilated,
    Full,
    GatheredKeys,
    GlobalTokens,
    Grid,
    InterleavedSpanTree,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    SizedGrid,
    SizedSpanTree,
    SpanTree,
    Strided,
    bigbird,
    span_tree_nodes,
)

MAX_DEPTH = 3


def draw_pattern(rng: random.Random, num_heads: int, num_keys: int) -> Pattern:
    """Draw a pattern that this number of heads can have at any length, on one axis or on two."""
    pattern = draw_part(rng, num_heads, num_keys, 0)
    while pattern.needs_two_axes and pattern.depends_on_length:
        pattern = draw_part(rng, num_heads, num_keys, 0)
    return pattern


def draw_part(rng: random.Random, num_heads: int, num_keys: int, depth: int) -> Pattern:
    """Draw a pattern, or a part of one."""
    kind = rng.random()
    if depth >= MAX_DEPTH or kind < 0.5:
        pattern = rng.choice(ATOMS)(rng, num_keys)
    elif kind < 0.6:
        pattern = ~draw_part(rng, num_heads, num_keys, depth + 1)
    elif kind < 0.7:
        count = rng.choice([number for number in range(1, num_heads + 1) if num_heads % number == 0])
        pattern = PerHead([draw_part(rng, num_heads, num_keys, depth + 1) for _ in range(count)])
    elif kind < 0.75:
        block = rng.randint(1, 9)
        pattern = Blocks(draw_part(rng, num_heads, -(-num_keys // block), depth + 1), block)
    else:
        one, other = (draw_part(rng, num_heads, num_keys, depth + 1) for _ in range(2))
        pattern = one | other if rng.random() < 0.6 else one & other
    try:
        return pattern.causal() if rng.random() < 0.15 else pattern
    except ConfigurationError:
        # random blocks that exclude a pattern of the length have no causal form
        return pattern


def draw_fitted(rng: random.Random) -> tuple[Pattern, int] | None:
    """Draw a pattern that not every length fits, and one that does, for a few calls."""
    draw = rng.choice((draw_tree, draw_grid))
    return draw(rng) if rng.random() < 0.06 else None


def draw_tree(rng: random.Random) -> tuple[Pattern, int]:
    """Draw a span tree, and how many nodes it has."""
    num_tokens = rng.randint(1, 40)
    num_nodes, is_causal = rng.randint(1, 4), rng.random() < 0.5
    builder = rng.choice(("fixed", "release", "interleaved"))
    if builder == "interleaved":
        return InterleavedSpanTree(num_nodes, is_causal), 2 * num_tokens
    return SpanTree(num_nodes, is_causal, builder), span_tree_nodes(num_tokens)


def draw_grid(rng: random.Random) -> tuple[Pattern, int]:
    """Draw a grid, and how many tokens it has."""
    shape = [rng.randint(1, size) for size in rng.choice(((60,), (12, 12), (4, 6, 6)))]
    prefix, is_causal = rng.randint(0, 3), rng.random() < 0.3
    borders, drawn = rng.choice((("cut", PLAIN), ("shifted", SHIFTED)))
    listed = [draw_axis(rng, size, drawn) for size in shape]
    num_tokens = prefix + math.prod(shape)
    return Grid([rng.choice((None, shape[0])), *shape[1:]], listed, prefix, borders, is_causal), num_tokens


def draw_axis(rng: random.Random, size: int, drawn: Sequence["Draw"]) -> Pattern:
    """Draw the pattern of an axis."""
    axis = rng.choice(drawn)(rng, size)
    return Full() if axis.needs_two_axes else axis


def sized_grid(rng: random.Random, num_keys: int) -> Pattern:
    """Draw a grid of about as many tokens as there are."""
    width = rng.randint(1, 8)
    shape = [max(1, num_keys // width + rng.randint(-1, 1)), width]
    return SizedGrid(shape, [draw_axis(rng, size, PLAIN) for size in shape], rng.randint(0, 2))


def limit(rng: random.Random, num_keys: int) -> int | None:
    """Draw how far a query reads on one side."""
    return rng.choice((None, -1, 0, 1, rng.randint(0, 8), rng.randint(0, 8), rng.randint(0, num_keys + 2)))


def positions(rng: random.Random, num_keys: int) -> list[int]:
    """Draw positions of global tokens, from both ends and beyond them."""
    return [rng.randint(-num_keys - 2, num_keys + 2) for _ in range(rng.randint(0, 4))]


def global_tokens(rng: random.Random, num_keys: int) -> Pattern:
    """Draw global tokens, one half of them left away at times."""
    attends_to_all, attended_by_all = rng.choice(((True, True), (True, True), (True, False), (False, True)))
    return GlobalTokens(positions(rng, num_keys), attends_to_all, attended_by_all)


def key_table(rng: random.Random, num_keys: int) -> Pattern:
    """Draw a table, of fewer or more rows than there are tokens."""
    num_rows = rng.randint(1, max(1, min(40, num_keys + 2)))
    return KeyTable([[rng.randint(0, num_keys + 1) for _ in range(rng.randint(0, 4))] for _ in range(num_rows)])


def random_blocks(rng: random.Random, num_keys: int) -> Pattern:
    """Draw random blocks, of which some exclude another pattern."""
    is_causal = rng.random() < 0.4
    exclude = rng.choice(PLAIN)(rng, num_keys) if rng.random() < 0.4 else None
    if is_causal and exclude is not None and exclude.depends_on_length:
        exclude = None
    return RandomBlocks(rng.randint(1, 3), rng.randint(1, 20), rng.randint(0, 5), exclude, is_causal)


def big_bird(rng: random.Random, num_keys: int) -> Pattern:
    """Draw one of BigBird's."""
    plan, block = rng.choice(("seeded", "authors", "transformers")), rng.randint(1, 17)
    is_causal = plan == "seeded" and rng.random() < 0.5
    return bigbird(block, rng.randint(0, 3), rng.randint(0, 5), plan, is_causal)


Draw = Callable[[random.Random, int], Pattern]
PLAIN: tuple[Draw, ...] = (
    lambda rng, num_keys: Full(),
    lambda rng, num_keys: Causal(),
    lambda rng, num_keys: Band(limit(rng, num_keys), limit(rng, num_keys)),
    lambda rng, num_keys: Band(rng.randint(0, 40), rng.randint(0, 40)),
    lambda rng, num_keys: Band(rng.randint(0, 40), 0),
    lambda rng, num_keys: Dilated(limit(rng, num_keys), limit(rng, num_keys), rng.randint(1, 7)),
    lambda rng, num_keys: Strided(rng.randint(1, 9)),
    lambda rng, num_keys: BlockLocal(rng.randint(1, 40)),
    lambda rng, num_keys: CompressedKeys(rng.randint(1, 9), rng.randint(1, 5)),
    lambda rng, num_keys: GatheredKeys(Dilated(9, 5, rng.randint(1, 3)), [(1, 4), (6, 7 + rng.randint(1, 40))]),
    global_tokens,
    key_table,
)
SHIFTED: tuple[Draw, ...] = (
    lambda rng, num_keys: Full(),
    lambda rng, num_keys: Band(rng.randint(0, 6), rng.randint(0, 6)),
    lambda rng, num_keys: Dilated(rng.randint(0, 9), rng.randint(0, 9), rng.randint(1, 4)),
)
ATOMS: tuple[Draw, ...] = (
    *PLAIN,
    random_blocks,
    big_bird,
    sized_grid,
    lambda rng, num_keys: BigBirdBlocks(rng.randint(1, 3), rng.randint(1, 17), rng.randint(0, 5)),
    lambda rng, num_keys: SizedSpanTree(rng.randint(1, 40), rng.randint(1, 3), rng.random() < 0.5),
    lambda rng, num_keys: InterleavedSpanTree(rng.randint(1, 3), rng.random() < 0.5, rng.randint(1, 40)),
)
