"""Which blocks queries choose, against the paper's definition in loops over documents, queries and blocks."""

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import choose_blocks

BLOCK_TOKENS, NUM_TOKENS = 4, 30
PACKED = torch.tensor([[0] * 9 + [1] * 13 + [2] * 8, [5] * 30])
PADDED = torch.ones(2, NUM_TOKENS, dtype=torch.bool)
PADDED[0, :7], PADDED[1, -3:] = False, False
HOLES = torch.arange(60).reshape(2, 30) % 7 != 3
MASKS = {
    "none": TokenMask(),
    "padding": TokenMask(PADDED),
    "packed": TokenMask(None, PACKED),
    "packed with holes": TokenMask(HOLES, PACKED),
}


def states(num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(2, 4, num_tokens, 8, **draw), torch.randn(2, 2, num_tokens, 8, **draw)


def by_loops(q: Tensor, k: Tensor, tokens: TokenMask, num_chosen: int) -> list[list[int]]:
    """Return the blocks of every query of every head and example, sorted."""
    locations = token_locations(tokens, k.shape[2], k.device)
    documents, positions = (each.expand(2, -1) for each in (locations.documents, locations.positions))
    found = []
    for example, head, query in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        own = int(positions[example, query]) // BLOCK_TOKENS
        is_own = documents[example] == documents[example, query]
        if documents[example, query] == NO_DOCUMENT:
            found.append([])
            continue
        keys, scored = k[example, head // 2], []
        for block in range(own):
            mean = keys[is_own & (positions[example] // BLOCK_TOKENS == block)].mean(0)
            scored.append((-float(q[example, head, query] @ mean), block))
        found.append(sorted([own, *(block for _, block in sorted(scored)[: num_chosen - 1])]))
    return found


@pytest.mark.parametrize("num_chosen", [1, 3, 12])
@pytest.mark.parametrize("case", MASKS)
def test_against_loops(case: str, num_chosen: int) -> None:
    tokens, (q, k) = MASKS[case], states()
    chosen = choose_blocks(q, k, list(tokens.tensors), BLOCK_TOKENS, num_chosen, 0, None)
    listed = [sorted(number for number in row if number >= 0) for row in chosen.flatten(0, 2).tolist()]
    assert listed == by_loops(q, k, tokens, num_chosen)
    # the last queries alone, as in cached decoding
    for start in (None, torch.tensor(NUM_TOKENS - 3)):
        offset = NUM_TOKENS - 3 if start is None else 0
        last = choose_blocks(q[:, :, -3:], k, list(tokens.tensors), BLOCK_TOKENS, num_chosen, offset, start)
        assert torch.equal(last, chosen[:, :, -3:])


def test_the_lowest_of_equal_blocks_is_chosen() -> None:
    q, k = states()
    k = k[:, :, :BLOCK_TOKENS].repeat(1, 1, 8, 1)[:, :, :NUM_TOKENS]
    chosen = choose_blocks(q, k, [None] * 5, BLOCK_TOKENS, 3, 0, None)
    assert chosen[:, :, -1].unique(dim=1).tolist() == [[[0, 1, 7]]] * 2


def test_keys_of_the_own_block_and_later_ones_change_nothing() -> None:
    q, k = states()
    chosen = choose_blocks(q, k, [None] * 5, BLOCK_TOKENS, 3, 0, None)
    changed = torch.cat([k[:, :, :12], torch.randn_like(k[:, :, 12:])], 2)
    assert torch.equal(choose_blocks(q, changed, [None] * 5, BLOCK_TOKENS, 3, 0, None)[:, :, :16], chosen[:, :, :16])


def test_scores_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = states()
    whole = choose_blocks(q, k, [None] * 5, BLOCK_TOKENS, 3, 0, None)
    monkeypatch.setattr("hf_efficient_attn.layout.top_k.MAX_SCORES", 1)
    assert torch.equal(choose_blocks(q, k, [None] * 5, BLOCK_TOKENS, 3, 0, None), whole)
