"""Block tables against all pairs, block by block."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.block_table import GlobalsFirst, block_table, globals_first
from hf_efficient_attn.layout.dense_mask import allowed_pairs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import Document, TokenMask
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal, Blocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.grid import SizedGrid
from hf_efficient_attn.patterns.pattern import Pattern

CPU = torch.device("cpu")
QUERY_TOKENS, KEY_TOKENS = 8, 16
NUM_KEYS = 77
PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "band with globals": Band(9, 20) | GlobalTokens([0, 40]),
    "block local": BlockLocal(16),
    "per head": PerHead([Band(1, 1), Causal()]),
    "random": bigbird(block_tokens=8, num_random_blocks=1, causal=True),
}
INDEX = torch.arange(NUM_KEYS).expand(2, -1)
MASKS = {
    "none": TokenMask(),
    "padding": TokenMask(key_mask=(torch.tensor([[16], [0]]) <= INDEX) & (torch.tensor([[77], [40]]) > INDEX)),
    "documents": TokenMask(segment_ids=INDEX // torch.tensor([[30], [8]]), global_mask=INDEX % 31 == 5),
    "holes": TokenMask(key_mask=INDEX % 13 != 2),
}


def blocks(num: Tensor, indices: Tensor) -> Tensor:
    """The listed blocks as True in [batch, heads, rows, blocks]."""
    listed = torch.arange(indices.shape[-1]) < num[..., None]
    found = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.int)
    found.scatter_add_(-1, torch.where(listed, indices.long(), indices.shape[-1]), listed.int())
    assert found.max() <= 1
    return found[..., :-1].bool()


@pytest.mark.parametrize("num_queries", [NUM_KEYS, 30, 1])
@pytest.mark.parametrize("tokens", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_blocks(pattern: Pattern, tokens: TokenMask, num_queries: int) -> None:
    layout = Layout(pattern, 2, num_queries, NUM_KEYS, NUM_KEYS - num_queries)
    documents = None if tokens.is_empty else tuple(tokens.documents(2, NUM_KEYS))
    table = block_table(layout, documents, (QUERY_TOKENS, KEY_TOKENS), CPU)
    partial, full = blocks(table.num_partial, table.partial), blocks(table.num_full, table.full)

    allowed = allowed_pairs(layout, tokens, 2, CPU)
    allowed = torch.ones(1, 1, num_queries, NUM_KEYS).bool() if allowed is None else allowed
    padded = pad(allowed, (0, -NUM_KEYS % KEY_TOKENS, 0, -num_queries % QUERY_TOKENS))
    squares = padded.unflatten(-2, (-1, QUERY_TOKENS)).unflatten(-1, (-1, KEY_TOKENS))
    assert not (partial & full).any()
    assert torch.equal((partial | full) | squares.any((-3, -1)), partial | full)
    assert torch.equal(full & squares.all((-3, -1)), full)
    if tokens.is_empty:
        # of the patterns here, intervals tell all
        assert torch.equal(full, squares.all((-3, -1)))
        assert torch.equal(partial | full, squares.any((-3, -1)))


@pytest.mark.parametrize("tokens", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_with_global_tokens_first(causal: bool, tokens: TokenMask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_efficient_attn.layout.block_table.MOST", 1)
    pattern = Band(9, 4) | GlobalTokens([7, 20, 21, 63])
    layout = Layout(pattern.causal() if causal else pattern, 2, NUM_KEYS, NUM_KEYS)
    documents = tuple(tokens.documents(2, NUM_KEYS))
    order = globals_first(layout, documents)
    assert order is not None
    table = block_table(layout, documents, (QUERY_TOKENS, KEY_TOKENS), CPU, order)
    partial, full = blocks(table.num_partial, table.partial), blocks(table.num_full, table.full)
    allowed = allowed_pairs(layout, tokens, 2, CPU)
    assert allowed is not None
    places = order.positions()
    padded = pad(allowed[..., places, :][..., places], (0, -NUM_KEYS % KEY_TOKENS, 0, -NUM_KEYS % QUERY_TOKENS))
    squares = padded.unflatten(-2, (-1, QUERY_TOKENS)).unflatten(-1, (-1, KEY_TOKENS))
    assert not (partial & full).any()
    assert torch.equal((partial | full) | squares.any((-3, -1)), partial | full)
    assert torch.equal(full & squares.all((-3, -1)), full)


def test_global_tokens_fill_few_blocks_once_they_come_first() -> None:
    layout = Layout(Band(256, 256) | GlobalTokens(range(0, 32_768, 2048)), 1, 32_768, 32_768)
    documents = ((Document(0, 32_768),),)
    tables = [
        block_table(layout, documents, (128, 128), CPU, each) for each in (None, globals_first(layout, documents))
    ]
    scattered, first = (int((each.num_partial + each.num_full).sum()) for each in tables)
    assert scattered > 8000
    assert first < 2000


@pytest.mark.parametrize("positions", [[], [0, 1, 2], range(0, 64, 2)])
def test_an_order_is_for_few_scattered_global_tokens(positions: Sequence[int]) -> None:
    layout = Layout(Band(3, 3) | GlobalTokens(positions), 1, 64, 64)
    assert globals_first(layout, ((Document(0, 64),),)) is None


def test_the_first_tokens_of_documents_stay_where_they_are() -> None:
    """Of packed texts and beside padding, too: moved, they would fill blocks of the examples that begin elsewhere."""
    layout = Layout(Band(9, 0) | GlobalTokens([0, 1]).causal(), 1, 64, 64)
    packed = (Document(0, 20), Document(20, 64)), (Document(0, 35), Document(35, 64)), (Document(7, 64),)
    assert globals_first(layout, packed) is None
    scattered = Document(7, 64, global_positions=(30,))
    assert globals_first(layout, (*packed, (scattered,))) == GlobalsFirst((7, 8, 37), 64)


def test_numbers_of_blocks_and_coordinates_of_a_grid_are_no_positions() -> None:
    blocks, grid = Blocks(GlobalTokens([0, 3]), 16), SizedGrid([1, 64], [Full(), GlobalTokens([0, 50])])
    for pattern in (blocks, grid, bigbird(block_tokens=16)):
        assert globals_first(Layout(pattern, 1, 64, 64), ((Document(0, 20), Document(20, 64)),)) is None


def test_no_work_for_all_pairs() -> None:
    """131,072 tokens: 1,024 rows of blocks, five blocks each."""
    table = block_table(Layout(Band(256, 256), 1, 131_072, 131_072), None, (128, 128), CPU)
    assert (table.num_partial + table.num_full)[0, 0, 2:-2].unique().tolist() == [5]
    assert table.num_full[0, 0, 2:-2].unique().tolist() == [3]
