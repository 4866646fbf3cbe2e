"""Work and messages are bounded: what would take forever, or overflow, is refused with a sentence."""

import json
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import pytest
from patterns.relation import pairs_of

from hf_efficient_attn.errors import ConfigurationError, EfficientAttentionError, InputError
from hf_efficient_attn.patterns import (
    Band,
    BigBirdBlocks,
    BlockLocal,
    Blocks,
    Dilated,
    Full,
    GlobalTokens,
    Grid,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    SpanTree,
    Strided,
    Union,
    parse_pattern,
)
from hf_efficient_attn.patterns.algebra import MAX_MEMBERS
from hf_efficient_attn.patterns.intervals import MAX_STEPS
from hf_efficient_attn.patterns.serialization import MAX_DEPTH, MAX_INTEGER, MAX_PARTS


def nested(levels: int) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": "full"}
    for _ in range(levels):
        data = {"kind": "union", "patterns": [data, {"kind": "causal"}]}
    return data


def cyclic() -> dict[str, Any]:
    data: dict[str, Any] = {"kind": "complement"}
    data["pattern"] = data
    return data


def shared(levels: int) -> dict[str, Any]:
    """Return a dict of few objects that would be 2 to the power of `levels` patterns."""
    data: dict[str, Any] = {"kind": "full"}
    for _ in range(levels):
        data = {"kind": "union", "patterns": [data, data]}
    return data


def cyclic_list() -> list[Any]:
    listed: list[Any] = []
    listed.append(listed)
    return listed


def chained() -> Pattern:
    pattern: Pattern = Full()
    for width in range(1000):
        pattern = ~(pattern | Band(width, width))
    return pattern


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pattern.from_dict(nested(300)),
        lambda: Pattern.from_dict(json.loads('{"kind": "complement", "pattern": ' * 900 + "{}" + "}" * 900)),
        lambda: Pattern.from_dict(cyclic()),
        lambda: Pattern.from_dict(shared(60)),
        lambda: Pattern.from_dict({"kind": "global_tokens", "positions": cyclic_list()}),
        lambda: Pattern.from_dict({"kind": 10**5000}),
        lambda: Pattern.from_dict({"kind": "span_tree", "num_nodes": 1, "builder": ["fixed"]}),
        lambda: parse_pattern("~" * 1000 + "full()"),
        lambda: parse_pattern("(" * 5000 + "full()" + ")" * 5000),
        lambda: parse_pattern("band(" + "-" * 100_000 + "1, 1)"),
        lambda: parse_pattern("band(" + "9" * 5000 + ", 1)"),
        lambda: parse_pattern("band(left=1, left=2, right=3)"),
        lambda: parse_pattern(" | ".join(f"band({width}, 0)" for width in range(2000))),
        chained,
        lambda: Union([Band(width, 0) for width in range(MAX_PARTS + 1)]),
        lambda: PerHead([PerHead([PerHead([Full()] * 97), Full()])] * 89),
        lambda: RandomBlocks(10**9, 1).resolve(MAX_STEPS),
        lambda: RandomBlocks(1, 1).resolve(65_536),
        lambda: RandomBlocks(2, 4, exclude=Strided(5)).resolve(65_536),
        lambda: BigBirdBlocks(1, 1).resolve(100_000),
        lambda: BigBirdBlocks(3000, 4).resolve(16_384),
    ],
)
def test_refused_in_short(make: Callable[[], object]) -> None:
    with pytest.raises(EfficientAttentionError) as refusal:
        make()
    assert len(str(refusal.value)) <= 500


@pytest.mark.parametrize("number", [MAX_INTEGER + 1, 10**30, 10**5000], ids=["33 bits", "100 bits", "5000 digits"])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: Band(number, 0),
        lambda number: Dilated(0, number, 2),
        lambda number: Strided(number),
        lambda number: GlobalTokens([number]),
        lambda number: GlobalTokens([-number]),
        lambda number: KeyTable([[0], [number]]),
        lambda number: BlockLocal(number),
        lambda number: Grid([number], [Full()]),
        lambda number: Grid([4], [Full()], number),
        lambda number: Blocks(Full(), number),
        lambda number: RandomBlocks(number, 1),
        lambda number: RandomBlocks(1, 1, seed=number),
        lambda number: BigBirdBlocks(1, number),
        lambda number: SpanTree(number),
        lambda number: Full().draw(number),
    ],
)
def test_numbers_that_kernels_cannot_count(make: Callable[[int], object], number: int) -> None:
    """A tensor of 32-bit positions compares wrongly with a larger number, or not at all."""
    with pytest.raises((ConfigurationError, InputError)) as refusal:
        make(number)
    assert len(str(refusal.value)) <= 500


def test_the_deepest_and_the_widest_are_read() -> None:
    pattern: Pattern = Full()
    for _ in range(MAX_DEPTH - 1):
        pattern = Blocks(pattern, 1)
    assert Pattern.from_dict(pattern.to_dict()) == pattern
    assert Pattern.from_dict(Union([Band(width, 0) for width in range(MAX_PARTS - 1)]).to_dict()).allowed(5, 5)


def test_members_are_few() -> None:
    """2 to the power of 8 members of an intersection, and hundreds of a union, are computed as one."""
    crossed = reduce(and_, [Band(5 + i, 5) | GlobalTokens([i], attends_to_all=False) for i in range(8)])
    many = Union([Dilated(9, 9, step) for step in range(2, 2 + MAX_MEMBERS + 1)])
    assert crossed.members() == (crossed,)
    assert many.members() == (many,)
    assert len(Union(many.patterns[:MAX_MEMBERS]).members()) == MAX_MEMBERS


@pytest.mark.parametrize("extent", [(30, 30, 0), (7, 40, 33), (20, 12, 5), (3, 50, 0)])
def test_pairs_of_what_repeats_itself(extent: tuple[int, int, int]) -> None:
    for pattern in (
        Dilated(9, 4, 2) | Band(3, -1),
        ~Strided(3),
        BlockLocal(4) & Band(3, 3),
        Blocks(Dilated(2, 2, 2), 3),
    ):
        assert pattern.num_pairs(*extent) == len(pairs_of(pattern, *extent))


def test_long_inputs_of_published_blocks() -> None:
    """Of a long input, the code shuffles the first blocks only, in every row."""
    drawn = BigBirdBlocks(3, 64).resolve(131_072, num_heads=16)
    assert {key for row in drawn.parts[0].rows for key in row} <= set(range(2 * 3 + 5))


def test_more_random_blocks_than_there_are() -> None:
    assert RandomBlocks(10**9, 4).resolve(12) == Blocks(KeyTable([range(3)] * 3), 4)
