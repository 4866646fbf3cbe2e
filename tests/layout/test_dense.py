"""The dense view against `Pattern.allowed` on integers, document by document; its cache; lse and terms of all pairs."""

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.layout import dense_mask
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

CPU = torch.device("cpu")
NUM_KEYS = 12
PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "band with globals": Band(2, 1) | GlobalTokens([0, -1]),
    "per head": PerHead([Band(1, 1), Causal()]),
    "random": Band(0, 0) | RandomBlocks(1, 2, seed=3),
    "causal random": Band(1, 0) | RandomBlocks(1, 2, is_causal=True),
}


def bits(*rows: str) -> Tensor:
    return torch.tensor([[char == "x" for char in row] for row in rows])


MASKS = {
    "none": TokenMask(),
    "padding": TokenMask(key_mask=bits("...xxxxxxxxx", "xxxxxxx.....")),
    "holes": TokenMask(key_mask=bits(".xx.xxx.xxx.", "............")),
    "documents": TokenMask(
        segment_ids=torch.tensor([[0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], [5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6]])
    ),
    "all": TokenMask(
        key_mask=bits("..xxxxx.xx..", "xxxxxxxxx.x."),
        segment_ids=torch.tensor([[0] * 6 + [1] * 6, [0] * 3 + [1] * 8 + [2]]),
        global_mask=bits("..x.......x.", "......x....x"),
    ),
}


def by_hand(layout: Layout, tokens: TokenMask, batch_size: int) -> Tensor:
    """One pair of integers after the other."""
    allowed = torch.zeros(batch_size, layout.num_heads, layout.num_keys, layout.num_keys, dtype=torch.bool)
    for row, documents in enumerate(tokens.documents(batch_size, layout.num_keys)):
        for document in documents:
            whole = Layout(layout.pattern, layout.num_heads, layout.num_keys, layout.num_keys, layer=layout.layer)
            own = whole.of_document(document)
            for head, pattern in enumerate(own.head_patterns()):
                for query in range(own.num_keys):
                    for key in range(own.num_keys):
                        here = (row, head, document.start + query, document.start + key)
                        allowed[here] = pattern.allowed(query, key)
    if tokens.key_mask is not None:
        allowed &= tokens.key_mask[:, None, None, :] & tokens.key_mask[:, None, :, None]
    return allowed[:, :, layout.query_offset : layout.query_offset + layout.num_queries]


@pytest.mark.parametrize("num_queries", [NUM_KEYS, 5], ids=["all queries", "last queries"])
@pytest.mark.parametrize("tokens", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_allowed_pairs(pattern: Pattern, tokens: TokenMask, num_queries: int) -> None:
    layout = Layout(pattern, 4, num_queries, NUM_KEYS, NUM_KEYS - num_queries, layer=2)
    expected = by_hand(layout, tokens, 2)
    allowed = dense_mask.allowed_pairs(layout, tokens, 2, CPU)
    found = torch.ones_like(expected) if allowed is None else allowed.expand_as(expected)
    assert torch.equal(found, expected)

    mask, keyless = dense_mask.additive_mask(layout, tokens, 2, CPU, torch.float32)
    if mask is None:
        assert expected.all()
    else:
        empty = torch.zeros(()).bool() if keyless is None else keyless
        assert torch.equal((mask == 0).expand_as(expected), expected | empty)
        assert torch.equal(empty.expand(*expected.shape[:3], 1)[..., 0], ~expected.any(-1))


def test_no_mask_where_everything_is_allowed() -> None:
    layout = Layout(Full(), 2, 3, 5, 1)
    assert dense_mask.allowed_pairs(layout, TokenMask(), 2, CPU) is None
    assert dense_mask.allowed_pairs(layout, TokenMask(key_mask=torch.ones(2, 5).bool()), 2, CPU) is None
    assert dense_mask.allowed_pairs(Layout(Band(4, 4), 2, 5, 5), TokenMask(), 2, CPU) is None
    assert dense_mask.allowed_pairs(Layout(Band(3, 4), 2, 5, 5), TokenMask(), 2, CPU) is not None


def test_masks_made_in_inference_mode_may_be_trained_with() -> None:
    with torch.inference_mode():
        mask, _ = dense_mask.additive_mask(Layout(Band(1, 3), 2, 9, 9), TokenMask(), 1, CPU, torch.float32)
    assert mask is not None
    assert not mask.is_inference()


def test_layers_share_the_masks_of_their_examples() -> None:
    key_mask = torch.arange(18).reshape(2, 9) % 4 != 0

    def mask_of(layer: int) -> Tensor:
        layout = Layout(Band(1, 2), 2, 9, 9, layer=layer)
        mask, _ = dense_mask.additive_mask(layout, TokenMask(key_mask=key_mask), 2, CPU, torch.float32)
        assert mask is not None
        return mask

    first = mask_of(0)
    assert mask_of(1) is first
    key_mask[0, 1] = False
    assert not torch.equal(mask_of(2), first)


def test_masks_go_with_their_examples() -> None:
    dense_mask._masks.clear()
    key_mask = torch.arange(18).reshape(2, 9) % 4 != 0
    dense_mask.additive_mask(Layout(Band(1, 2), 2, 9, 9), TokenMask(key_mask=key_mask), 2, CPU, torch.float32)
    assert len(dense_mask._masks) == 1
    del key_mask
    assert len(dense_mask._masks) == dense_mask._masks.num_bytes == 0


def test_row_lse_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_mask, "CHUNK_QUERIES", 5)
    q, k = torch.randn(2, 4, 9, 3), torch.randn(2, 2, NUM_KEYS, 3)
    values = torch.randn(2, 1, 9, 4)
    layout, tokens = Layout(PATTERNS["per head"], 4, 9, NUM_KEYS, 3), MASKS["all"]
    distances = (torch.arange(3, 12)[:, None] - torch.arange(NUM_KEYS)).clamp(-1, 2) + 1
    bias = torch.stack([values[:, :, row, label] for row, label in enumerate(distances)], 2)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.5 + bias
    allowed = dense_mask.allowed_pairs(layout, tokens, 2, CPU)
    assert allowed is not None
    expected = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    call = AttentionCall(layout, inputs_of(q, k, k), tokens, (Term(values, Distance(-1, 2)),), scale=0.5)
    torch.testing.assert_close(dense_mask.row_lse(q, k, call), expected)
