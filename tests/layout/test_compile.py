"""Block layouts hold every allowed pair once, and are found without looking at all pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_efficient_attn.layout import block_rows
from hf_efficient_attn.layout import block_rows as partitions_module
from hf_efficient_attn.layout import compile as compile_module
from hf_efficient_attn.layout.block_layout import BlockCosts, BlockLayout, CompiledPartition, Run
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal, CompressedKeys, Dilated, Full, Strided
from hf_efficient_attn.patterns.big_bird import RandomBlocks, bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal, Blocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.grid import SizedGrid
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.span_tree import SpanTree
from hf_efficient_attn.patterns.tables import GatheredKeys

CPU = torch.device("cpu")
PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "band": Band(9, 4),
    "wide band": Band(300, 300),
    "dilated": Dilated(30, 12, 3),
    "strided": Strided(5).causal(),
    "globals": Band(6, 6) | GlobalTokens([0, 3, 50, -1]),
    "causal globals": (Band(6, 6) | GlobalTokens([0, 3])).causal(),
    "two steps": Dilated(40, 40, 4) | Dilated(90, 90, 9) | Band(2, 2),
    "far keys": ~Band(10, 10),
    "compressed keys": CompressedKeys(8, 4),
    "gathered keys": GatheredKeys(Band(30, 5), [(0, 4), (20, 90)]),
    "block local": BlockLocal(24),
    "odd blocks": BlockLocal(37).causal(),
    "random": bigbird(block_tokens=16, num_random_blocks=2),
    "keyless blocks": BlockLocal(8) & ~GlobalTokens(range(8, 16)),
    "few random blocks": RandomBlocks(1, 8) & Band(9, 0),
    # 333 tokens
    "grid": SizedGrid([18, 18], [Band(2, 3), Dilated(4, 2, 2)], 9),
    "causal grid": SizedGrid([111, 3], [Band(4, 4), Full()], is_causal=True) | Band(2, 0),
    "shifted video": SizedGrid([4, 9, 9], [Band(1, 0), Band(2, 2), Band(2, 2)], 9, "shifted"),
    "interleaved tree": InterleavedSpanTree(2, left_only=True),
    "per head": PerHead([Band(5, 5), Dilated(40, 40, 4)]) | GlobalTokens([7]),
}


def places(run: Run, block: int) -> Tensor:
    """Return the places of the keys of one block."""
    if run.gathered is None:
        return run.first_key + block * run.key_step + torch.arange(run.key_tokens)
    return (run.gathered[block, :, None] * run.gather_block + torch.arange(run.gather_block)).flatten()


def count_pairs(partition: CompiledPartition, num_queries: int, num_keys: int) -> Tensor:
    """Return how often the share holds each pair without masking it."""
    counts = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    queries, keys = torch.tensor(list(partition.queries)), torch.tensor(list(partition.keys))
    for run in partition.runs:
        for block in range(run.num_blocks):
            rows = queries[run.first_query + block * run.block_tokens + torch.arange(run.block_tokens)]
            columns = keys[places(run, block)]
            shape = (run.block_tokens, run.key_tokens)
            bias = torch.zeros(shape) if run.bias is None else run.bias[block if run.bias.shape[0] > 1 else 0]
            counts[rows[:, None], columns[None, :]] += (bias == 0).long()
    return counts


def check(layout: Layout, blocks: BlockLayout) -> None:
    counts = torch.zeros(layout.num_heads, layout.num_queries, layout.num_keys, dtype=torch.int64)
    for partition in blocks.partitions:
        pairs = count_pairs(partition, layout.num_queries, layout.num_keys)
        counts[partition.first_head : partition.first_head + partition.num_heads] += pairs
    queries = torch.arange(layout.queries.stop)[layout.queries, None]
    keys = torch.arange(layout.num_keys)[None, :]
    for head, pattern in enumerate(layout.head_patterns()):
        assert torch.equal(counts[head], pattern.allowed(queries, keys).expand(counts.shape[1:]).long())
    assert blocks.num_allowed == counts.sum()
    check_first_runs(layout, blocks)


def check_first_runs(layout: Layout, blocks: BlockLayout) -> None:
    """Compute the runs in order: each query is written once, before anything is joined to it."""
    is_held = torch.zeros(layout.num_heads, layout.num_queries, dtype=torch.bool)
    for blank in blocks.blanks:
        heads = slice(blank.first_head, blank.first_head + blank.num_heads)
        is_held[heads, blank.first_query : blank.first_query + blank.num_queries] = True
    is_written = torch.zeros_like(is_held)
    for partition, run in blocks.runs():
        heads = slice(partition.first_head, partition.first_head + partition.num_heads)
        stop = run.first_query + run.num_blocks * run.block_tokens
        rows = torch.tensor(list(partition.queries))[run.first_query : stop]
        if run.is_first:
            assert not is_written[heads, rows].any()
        else:
            assert is_held[heads, rows].all()
        is_held[heads, rows] = is_written[heads, rows] = True
    assert is_held.all()


# queries and keys; sizes of blocks take turns
LENGTHS = ((1, 1), (65, 65), (333, 333), (1, 200), (70, 333))
BY_TURNS = [
    (name, *lengths, (16, 32, 96)[(number + turn) % 3])
    for number, name in enumerate(PATTERNS)
    for turn, lengths in enumerate(LENGTHS)
]


@pytest.mark.parametrize(("name", "num_queries", "num_keys", "block_tokens"), BY_TURNS)
def test_every_allowed_pair_once(name: str, num_queries: int, num_keys: int, block_tokens: int) -> None:
    pattern = PATTERNS[name]
    layout = Layout(pattern, 2, num_queries, num_keys, num_keys - num_queries, is_cross=pattern.needs_two_axes)
    check(layout, compile_layout(layout, BlockCosts.only(block_tokens), CPU))


def test_queries_behind_all_keys_of_another_axis() -> None:
    """Rows without an end on the left, of which none is a copy of another."""
    layout = Layout(~Blocks(Band(8, 4), 2), 2, 16, 6, 7, is_cross=True)
    check(layout, compile_layout(layout, BlockCosts.only(4), CPU))


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 75])
def test_interleaved_span_tree(num_tokens: int) -> None:
    layout = Layout(InterleavedSpanTree(2), 1, 2 * num_tokens, 2 * num_tokens)
    check(layout, compile_layout(layout, BlockCosts.only(32), CPU))


def test_span_tree() -> None:
    """Its positions are the nodes of a tree over 64 tokens."""
    layout = Layout(SpanTree(2), 1, 127, 127)
    check(layout, compile_layout(layout, BlockCosts.only(32), CPU))


def compositions() -> st.SearchStrategy[Pattern]:
    """Patterns of patterns, many of which leave queries without keys; one in seven atoms is a Longformer's."""
    bands = st.builds(Band, st.integers(-1, 30), st.integers(-1, 30))
    dilated = st.builds(Dilated, st.integers(0, 30), st.integers(0, 30), st.integers(2, 7))
    chosen = st.builds(GlobalTokens, st.lists(st.integers(-5, 120), max_size=4))
    atoms = st.one_of(
        bands,
        dilated,
        st.builds(lambda near, chosen: near | chosen, bands | dilated, chosen),
        st.builds(BlockLocal, st.integers(1, 40)),
        st.builds(RandomBlocks, st.integers(1, 3), st.sampled_from([4, 8, 16]), st.integers(0, 5)),
        st.builds(lambda start, size: GlobalTokens(range(start, start + size)), st.integers(0, 60), st.integers(1, 30)),
        st.just(Causal()),
    )
    return st.recursive(
        atoms,
        lambda parts: st.one_of(
            st.builds(lambda a, b: a | b, parts, parts),
            st.builds(lambda a, b: a & b, parts, parts),
            st.builds(lambda a: ~a, parts),
            st.builds(Blocks, parts, st.integers(2, 9)),
        ),
        max_leaves=4,
    )


@st.composite
def layouts(draw: st.DrawFn, pattern: Pattern, num_heads: int, num_keys: int) -> Layout:
    """Queries anywhere among the keys, or on an axis of their own."""
    is_cross = not pattern.depends_on_length and draw(st.booleans())
    num_queries = draw(st.integers(1, 140 if is_cross else num_keys))
    offset = draw(st.integers(0, 50 if is_cross else num_keys - num_queries))
    return Layout(pattern, num_heads, num_queries, num_keys, offset, is_cross=is_cross)


@given(pattern=compositions(), num_keys=st.integers(1, 140), block_tokens=st.sampled_from([4, 8, 32]), data=st.data())
@settings(max_examples=150)
def test_every_allowed_pair_once_in_any_composition(
    pattern: Pattern, num_keys: int, block_tokens: int, data: st.DataObject
) -> None:
    layout = data.draw(layouts(pattern, 2, num_keys))
    check(layout, compile_layout(layout, BlockCosts.only(block_tokens), CPU))


@given(pattern=compositions(), num_keys=st.integers(1, 140), data=st.data())
@settings(max_examples=80)
def test_every_allowed_pair_once_where_rows_are_large(pattern: Pattern, num_keys: int, data: st.DataObject) -> None:
    """As test_every_allowed_pair_once_in_any_composition, with everything that only large layouts do."""
    layout = data.draw(layouts(pattern, 1, num_keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "MAX_WHOLE_PAIRS", 60)
        patch.setattr(compile_module, "MAX_MERGED_PAIRS", 200)
        patch.setattr(block_rows, "LARGE_MASK", 10)
        patch.setattr(block_rows, "MAX_SINGLE_MASKS", 10)
        patch.setattr(block_rows, "MAX_LOOKED_AT", 50)
        patch.setattr(partitions_module, "FEW_ORDERS", 2)
        patch.setattr(partitions_module, "MAX_MEMBERS", data.draw(st.sampled_from([1, 32])))
        patch.setattr(partitions_module, "SCORES_PER_RUN", data.draw(st.sampled_from([1, 10_000])))
        cut = partitions_module.partitions.function(layout.head_patterns()[0], layout.extent)
        patch.setattr(compile_module, "partitions", lambda *_: cut)
        blocks = compile_layout.function(layout, BlockCosts.only(4), CPU)
    check(layout, blocks)


def test_orders_that_share_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that is too large to be split into members may still have orders of its own, which overlap."""
    monkeypatch.setattr(GlobalTokens, "members", lambda self: (self,))
    layout = Layout(GlobalTokens([0, 3, 17]), 1, 41, 41)
    check(layout, compile_layout.function(layout, BlockCosts.only(8), CPU))


def test_a_band_is_three_kinds_of_blocks() -> None:
    """Cut at the left end, whole, cut at the right end: the whole ones are one run of copies with one mask."""
    (partition,) = compile_layout(Layout(Band(256, 256), 8, 8192, 8192), BlockCosts.only(32), CPU).partitions
    longest = max(partition.runs, key=lambda run: run.num_blocks)
    assert (longest.num_blocks, longest.block_tokens, longest.key_tokens) == (256 - 2 * 8, 32, 32 + 2 * 256)
    assert longest.bias is not None
    assert longest.bias.shape[0] == 1
    assert len(partition.runs) == 1 + 2 * 2


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [(Band(256, 256), 1.1), (Band(512, 0), 1.1), (Dilated(1024, 1024, 4), 1.1), (BlockLocal(512), 1.0)],
    ids=str,
)
def test_few_scores_are_computed_in_vain(pattern: Pattern, bound: float) -> None:
    blocks = compile_layout(Layout(pattern, 1, 16384, 16384), BlockCosts.only(32), CPU)
    assert blocks.num_pairs <= bound * pattern.num_pairs(16384, 16384)


def test_shared_work_is_one_part_for_all_heads() -> None:
    """The random blocks of BigBird differ by head, its global rows do not."""
    blocks = compile_layout(Layout(bigbird(), 4, 2048, 2048), BlockCosts.only(32), CPU)
    assert [partition.num_heads for partition in blocks.partitions].count(4) == 1
    assert [partition.num_heads for partition in blocks.partitions].count(1) == 4


@pytest.mark.parametrize("name", ["band", "globals", "random", "causal"])
def test_cut_runs_hold_the_same_pairs(name: str) -> None:
    blocks = compile_layout(Layout(PATTERNS[name], 2, 333, 333), BlockCosts.only(32), CPU)
    for partition in blocks.partitions:
        chunks = tuple(chunk for run in partition.runs for chunk in run.cut(40))
        assert all(chunk.num_blocks * chunk.block_tokens <= max(40, chunk.block_tokens) for chunk in chunks)
        cut = replace(partition, runs=chunks)
        assert torch.equal(count_pairs(cut, 333, 333), count_pairs(partition, 333, 333))
