"""The tiles of tokens that are listed for each query: their sizes, and what they compute in every size."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.listed_keys import NEIGHBOURS, STRETCH, ChosenTokens, neighbours, token_tiles
from hf_efficient_attn.layout.selected_keys import Sizes
from hf_efficient_attn.patterns import Band, Causal, Full

NUM_TOKENS = STRETCH + 200
MANY = 1 << 60


def drawn(num_tokens: int = NUM_TOKENS, count: int = 40) -> Tensor:
    """Return tokens that are drawn for every query from all of them and some numbers out of range."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-9, num_tokens + 9, (num_tokens, count), generator=generator)


def recent(num_tokens: int = NUM_TOKENS, count: int = 40) -> Tensor:
    """Return the last tokens of every query, of which the first queries have fewer."""
    return torch.arange(num_tokens)[:, None] - torch.arange(count)


def blocks(num_tokens: int = NUM_TOKENS, count: int = 40) -> Tensor:
    """Return the tokens of a block of neighbours, alike for all of them and far from those of others."""
    own = torch.arange(num_tokens)[:, None] // NEIGHBOURS * 97 % (num_tokens - count)
    return own + torch.arange(count)


def test_queries_that_read_alike_share_a_tile_and_others_take_large_ones() -> None:
    sizes = Sizes(1, 1, 1, MANY, key_cost=80.0)
    lengths = {}
    for choice, count in ((drawn, 40), (recent, 200), (blocks, 40)):
        found = neighbours(choice(4 * STRETCH, count)[STRETCH : 2 * STRETCH], STRETCH, 4 * STRETCH, 1, sizes)
        lengths[choice] = {tile.stop - tile.first for tile in found}
    assert lengths == {drawn: {STRETCH}, recent: {2 * NEIGHBOURS}, blocks: {NEIGHBOURS}}


@pytest.mark.parametrize("choice", [drawn, recent, blocks])
@pytest.mark.parametrize(("heads", "most_pairs"), [((4, 2), MANY), ((2, 2), 1 << 15)])
def test_every_listed_pair_is_in_one_tile(
    choice: Callable[[], Tensor], heads: tuple[int, int], most_pairs: int
) -> None:
    tokens = choice()
    sizes, layout = Sizes(1, *heads, most_pairs, key_cost=80.0), Layout(Causal(), heads[0], NUM_TOKENS, NUM_TOKENS)
    total = torch.zeros(heads[0], NUM_TOKENS, NUM_TOKENS, dtype=torch.long)
    for tiles in token_tiles(tokens[None, None], layout, sizes):
        members = tiles.members()
        assert members is not None
        total[tiles.heads[..., None], tiles.queries[..., None], tiles.keys[:, None, None]] += members.long()
    expected = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.long)
    is_token = (tokens >= 0) & (tokens < NUM_TOKENS)
    expected[torch.nonzero(is_token)[:, 0], tokens[is_token]] = 1
    assert (total == expected).all()


# every pair of a choice, a pattern and numbers of heads; all three of them are thorough
@pytest.mark.parametrize(
    ("choice", "pattern", "heads"),
    [
        pytest.param(choice, pattern, heads, marks=[pytest.mark.thorough] * ((i + j + k) % 3 > 0))
        for i, choice in enumerate([drawn, recent, blocks])
        for j, pattern in enumerate([Causal(), Full(), Band(100, 3)])
        for k, heads in enumerate([(4, 2), (2, 2), (2, 1)])
    ],
)
def test_long_texts_against_the_formula(
    choice: Callable[[], Tensor], pattern: hea.patterns.Pattern, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(4)
    num_heads, num_key_heads = heads
    shapes = [(1, each, NUM_TOKENS, 8) for each in (num_heads, num_key_heads, num_key_heads)]
    leaves = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    gradient = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    key_mask = torch.ones(1, NUM_TOKENS, dtype=torch.bool)
    key_mask[:, :5] = key_mask[:, 300:310] = False
    found = []
    for backend in ("reference", "gathered"):
        out = hea.attention(
            *leaves, pattern, chosen=ChosenTokens(choice()[None, None]), key_mask=key_mask, backend=backend
        )
        found.append([out, *torch.autograd.grad(out, leaves, gradient)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
