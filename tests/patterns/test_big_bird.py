"""BigBird: block counts of the paper's pattern, and the published code's random blocks, number for number."""

import pytest

from hf_efficient_attn.patterns import BigBirdBlocks, bigbird
from hf_efficient_attn.patterns.big_bird import _LegacyStream

Rows = tuple[tuple[int, ...], ...]


def heads_of(pattern: BigBirdBlocks, num_keys: int, layer: int = 0) -> list[Rows]:
    return [pattern.resolve(num_keys, layer, head, num_heads=12).parts[0].rows for head in range(12)]


def test_plan_of_the_authors() -> None:
    heads = heads_of(BigBirdBlocks(3, 64), 4096)
    assert heads[0][1:7] == sorted_rows([9, 14, 7], [9, 6, 7], [10, 5, 14], [6, 8, 12], [2, 13, 1], [4, 11, 3])
    assert heads[1][1:4] == sorted_rows([6, 11, 10], [8, 4, 12], [12, 11, 10])
    sums = [1435, 1635, 1576, 1515, 1387, 1457, 1421, 1557, 1491, 1569, 1419, 1415]
    assert [sum(map(sum, rows)) for rows in heads] == sums
    shorter = heads_of(BigBirdBlocks(3, 64), 2048)
    assert [rows[1:31] for rows in shorter] == [rows[1:31] for rows in heads]


def test_plan_of_other_lengths() -> None:
    heads = heads_of(BigBirdBlocks(3, 64, plan="transformers"), 2048)
    assert heads[0][1:7] == sorted_rows([4, 6, 7], [4, 8, 5], [8, 1, 5], [9, 2, 1], [9, 7, 2], [3, 1, 8])
    sums = [441, 479, 443, 473, 450, 457, 465, 472, 447, 443, 451, 452]
    assert [sum(map(sum, rows)) for rows in heads] == sums


def sorted_rows(*rows: list[int]) -> Rows:
    return tuple(tuple(sorted(row)) for row in rows)


def test_the_layer_moves_the_seed() -> None:
    assert heads_of(BigBirdBlocks(3, 64), 1024, layer=5) == heads_of(BigBirdBlocks(3, 64, seed=5), 1024)


@pytest.mark.parametrize("seed", [0, 7, 2**31])
def test_stream_is_that_of_numpy(seed: int) -> None:
    numpy = pytest.importorskip("numpy")
    theirs, ours = numpy.random.RandomState(seed), _LegacyStream(seed)
    for length in (1, 2, 15, 100):
        assert theirs.permutation(length).tolist() == ours.permutation(range(length))


@pytest.mark.parametrize(
    ("plan", "tokens", "least", "most"),
    [
        ("seeded", 4096, 622, 622),
        ("seeded", 2048, 302, 302),
        ("seeded", 1024, 142, 142),
        ("authors", 4096, 622, 622),
        ("transformers", 2048, 302, 302),
        # at 1,024 tokens the published code may draw the last block, which is global
        ("authors", 1024, 136, 142),
    ],
)
def test_block_counts(plan: str, tokens: int, least: int, most: int) -> None:
    pattern = bigbird(plan=plan)
    counts = {pattern.resolve(tokens, 0, head, 12).num_pairs(tokens, tokens) / 64**2 for head in range(12)}
    assert (min(counts), max(counts)) == (least, most)


def test_causal_form() -> None:
    pattern = bigbird(4, 2, causal=True)
    drawn = pattern.resolve(64)
    assert drawn.is_causal
    assert not pattern.depends_on_length
    # the first block, the one before the own, two random ones, and the own up to the query
    assert drawn.num_keys_of(43, 64) == 4 * 4 + 4
    assert bigbird(4, 0, causal=True).resolve(64).num_keys_of(43, 64) == 2 * 4 + 4
