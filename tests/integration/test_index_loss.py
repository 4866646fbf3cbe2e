"""What an indexer chooses, and how it learns: against the dense formulas in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.integration import indexer as module
from hf_efficient_attn.integration.indexer import Target, index_loss, index_recall
from hf_efficient_attn.layout import top_k
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import choose_tokens

NUM_TOKENS, CHOSEN = 13, 4


def states(num_queries: int = NUM_TOKENS) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return queries, keys and weights of an indexer, and queries and keys of attention."""
    torch.manual_seed(0)
    draw: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    indexer = [torch.randn(2, num_queries, 3, 8, **draw), torch.randn(2, NUM_TOKENS, 8, **draw)]
    indexer.append(torch.randn(2, num_queries, 3, **draw))
    return indexer, torch.randn(2, 4, num_queries, 8, **draw), torch.randn(2, 2, NUM_TOKENS, 8, **draw)


def packed() -> TokenMask:
    """Return a padded example, and one of two documents."""
    key_mask = torch.ones(2, NUM_TOKENS, dtype=torch.bool)
    key_mask[0, :3] = False
    return TokenMask(key_mask, torch.tensor([[0] * NUM_TOKENS, [0] * 6 + [1] * 7]))


def may_read(tokens: TokenMask, num_queries: int) -> Tensor:
    """Return which pairs are open, by the definition: [2, queries, keys]."""
    open_ = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril().expand(2, -1, -1)
    if tokens.key_mask is not None and tokens.segment_ids is not None:
        open_ = open_ & tokens.key_mask[:, None] & tokens.key_mask[:, :, None]
        open_ = open_ & (tokens.segment_ids[:, None] == tokens.segment_ids[:, :, None])
    return open_[:, -num_queries:]


def dense_scores(indexer: list[Tensor]) -> Tensor:
    queries, keys, weights = indexer
    return torch.einsum("bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", queries, keys).relu())


def dense_loss(indexer: list[Tensor], query: Tensor, key: Tensor, is_open: Tensor) -> Tensor:
    """Return equations 3 and 4 of DeepSeek-V3.2 over all pairs."""
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 3
    read = scores.masked_fill(~is_open[:, None], -torch.inf).softmax(-1).nan_to_num(0).sum(1).detach()
    read = read / read.sum(-1, keepdim=True).clamp(min=1e-30)
    some = is_open.any(-1)
    found = dense_scores(indexer)[some].masked_fill(~is_open[some], -1e30).log_softmax(-1)
    return torch.nn.functional.kl_div(found, read[some], reduction="sum") / some.sum()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NUMBERS", 400)
    monkeypatch.setattr(top_k, "MAX_SCORES", 200)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("tokens", "num_queries"), [(TokenMask(), 13), (packed(), 13), (TokenMask(), 5)])
def test_loss_and_gradients_are_those_of_the_dense_formula(
    tokens: TokenMask, num_queries: int, is_sparse: bool
) -> None:
    indexer, query, key = states(num_queries)
    is_open, offset = may_read(tokens, num_queries), NUM_TOKENS - num_queries
    read = None
    if is_sparse:
        read = choose_tokens(*(each.detach() for each in indexer), list(tokens.tensors), CHOSEN, offset, None)[:, 0]
        places = torch.zeros(2, num_queries, NUM_TOKENS + 1, dtype=torch.bool)
        is_open = places.scatter(2, read.long().where(read >= 0, NUM_TOKENS), True)[..., :NUM_TOKENS]
    documents = token_locations(tokens, NUM_TOKENS, query.device).documents
    found = index_loss(*indexer, Target(query, key, 1 / 3, documents, offset, read))
    expected = dense_loss(indexer, query, key, is_open)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    slopes, wanted = (torch.autograd.grad(3 * each, indexer) for each in (found, expected))
    for own, other in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=1e-12)
    assert not found.requires_grad or torch.autograd.grad(found, query, allow_unused=True)[0] is None


@pytest.mark.parametrize("tokens", [TokenMask(), packed()])
def test_choice_is_the_highest_open_scores_and_the_first_of_equal_ones(tokens: TokenMask) -> None:
    indexer, query, key = states()
    with torch.no_grad():
        # many scores are 0
        indexer[2].clamp_(max=0.1).round_()
        chosen = choose_tokens(*indexer, list(tokens.tensors), CHOSEN, 0, None)[:, 0]
    is_open = may_read(tokens, NUM_TOKENS)
    scores = dense_scores(indexer).masked_fill(~is_open, -torch.inf)
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True)
    for example in range(2):
        for row in range(NUM_TOKENS):
            best = ranked.indices[example, row, :CHOSEN][ranked.values[example, row, :CHOSEN] > -torch.inf]
            listed = chosen[example, row]
            assert listed[listed >= 0].tolist() == sorted(best.tolist())
    documents = token_locations(tokens, NUM_TOKENS, query.device).documents
    recall = index_recall(Target(query, key, 1 / 3, documents, 0), chosen)
    few = is_open.sum(-1) <= CHOSEN
    assert torch.allclose(recall[few], is_open.any(-1)[few].double())
    assert bool((recall[~few] < 1).all())


def test_autocast_changes_neither_choice_nor_loss() -> None:
    indexer, query, key = states()
    narrow = [each.detach().float().requires_grad_() for each in indexer]
    target = Target(
        query.float(), key.float(), 1 / 3, token_locations(packed(), NUM_TOKENS, torch.device("cpu")).documents, 0
    )
    masks = list(packed().tensors)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            chosen = choose_tokens(*narrow, masks, CHOSEN, 0, None)
            loss = index_loss(*narrow, target)
        found.append((chosen, loss.detach(), *torch.autograd.grad(loss, narrow), index_recall(target, chosen[:, 0])))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)
