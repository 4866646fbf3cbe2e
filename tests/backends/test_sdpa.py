"""SDPA: no mask where none is needed, one mask for many calls, lse from every path."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.layout import decode_keys, dense_mask
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.decode_keys import maskless
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal, Dilated, Full
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.blocks import BlockLocal
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern


def call_of(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> AttentionCall:
    return AttentionCall(layout, inputs_of(q, k, v), scale=0.3, **options)


def draw(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, num_queries, 8), torch.randn(2, 2, num_keys, 8), torch.randn(2, 2, num_keys, 8)


@pytest.mark.parametrize(
    ("pattern", "num_queries", "expected"),
    [
        (Full(), 10, (0, 10, False)),
        (Full(), 3, (0, 10, False)),
        (Causal(), 10, (0, 10, True)),
        (Band(9, 0), 10, (0, 10, True)),
        (Causal() | Band(2, 0), 10, (0, 10, True)),
        (Causal(), 1, (0, 10, False)),
        (Band(3, 0), 1, (6, 10, False)),
        (BlockLocal(4), 2, (8, 10, False)),
        (Causal(), 2, None),
        (Band(3, 0), 10, None),
        (PerHead([Full(), Causal()]), 10, None),
        (Band(0, 0) | GlobalTokens([0]), 1, None),
    ],
)
def test_when_no_mask_is_needed(pattern: Pattern, num_queries: int, expected: tuple[int, int, bool] | None) -> None:
    layout = Layout(pattern, 2, num_queries, 10, 10 - num_queries)
    assert maskless(layout) == expected


@pytest.mark.parametrize("need_lse", [True, False])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Band(3, 2)], ids=str)
def test_masks_are_built_once_if_at_all(pattern: Pattern, need_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(17, 17)
    layout = Layout(pattern, 4, 17, 17)
    first, _ = sdpa.attend(q, k, v, call_of(q, k, v, layout), need_lse)
    monkeypatch.setattr(dense_mask, "allowed_pairs", None)
    again, _ = sdpa.attend(q, k, v, call_of(q, k, v, layout), need_lse)
    assert torch.equal(first, again)


ROW = 200
ROW_TOKENS = {
    "none": TokenMask(),
    "left padding": TokenMask(torch.arange(ROW) >= torch.tensor([[0], [90]])),
    "holes, and a masked query": TokenMask((torch.arange(2 * ROW).reshape(2, ROW) + 1) % 7 != 0),
    "an empty example": TokenMask(torch.tensor([[True], [False]]).expand(2, ROW)),
    "documents, and chosen tokens": TokenMask(
        None, torch.arange(ROW) // torch.tensor([[150], [70]]), (torch.arange(ROW) % 145 == 0).expand(2, ROW)
    ),
}
ROW_PATTERNS = {
    "band": Band(20, 0),
    "globals": Band(20, 0) | GlobalTokens([0, 100]),
    "scattered": Dilated(60, 0, 3),
    "heads": PerHead([Band(20, 0) | GlobalTokens([1]), GlobalTokens([90], attends_to_all=False)]),
    "random": (Band(8, 0) | RandomBlocks(1, 4)).causal(),
    "nothing": GlobalTokens([5], attended_by_all=False),
}


# together, and of two patterns each its own: those of every head, and those of every example
ROWS = [(name, 0.0) for name in ROW_PATTERNS] + [("heads", 1.0), ("globals", 1.0)]


@pytest.mark.parametrize("tokens", ROW_TOKENS.values(), ids=ROW_TOKENS.keys())
@pytest.mark.parametrize(("name", "own_part"), ROWS)
def test_a_single_query_reads_its_keys_only(
    name: str, own_part: float, tokens: TokenMask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without gradients, of heads that share keys; gaps are masked, copied around, or between two calls. Heads
    that read other keys read them together, or each its own.
    """
    forget_single_queries()
    monkeypatch.setattr(decode_keys, "OWN_PART", own_part)
    monkeypatch.setattr(decode_keys, "MAX_GAP_READS", 4 * 10)
    q, k, v = (tensor.double().requires_grad_() for tensor in draw(1, ROW))
    layout = Layout(ROW_PATTERNS[name], 4, 1, ROW, ROW - 1)
    call = call_of(q, k, v, layout, tokens=tokens)
    expected = reference.attend(q, k, v, call)
    wanted = torch.autograd.grad(expected[0].square().sum(), (q, k, v))
    monkeypatch.setattr(sdpa, "additive_mask", None)
    out, lse = sdpa.attend(q, k, v, call)
    torch.testing.assert_close((out, lse), expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted)
    for gap, largest in ((4 * 10, sdpa.MAX_COPIED), (4 * 10, 0), (4 * ROW, 0)):
        forget_single_queries()
        monkeypatch.setattr(decode_keys, "MAX_GAP_READS", gap)
        monkeypatch.setattr(sdpa, "MAX_COPIED", largest)
        check_without_gradients(q.detach(), k.detach(), v.detach(), layout, tokens)
    forget_single_queries()


def forget_single_queries() -> None:
    decode_keys.keys_of_query.cache_clear()
    decode_keys._masked_of_layout.cache_clear()
    decode_keys._read.clear()


def check_without_gradients(q: Tensor, k: Tensor, v: Tensor, layout: Layout, tokens: TokenMask) -> None:
    with torch.no_grad():
        sinks = torch.randn(4, dtype=torch.double)
        call = call_of(q, k, v, layout, tokens=tokens, sinks=sinks)
        torch.testing.assert_close(sdpa.attend(q, k, v, call), reference.attend(q, k, v, call))


def test_heads_that_read_few_keys_of_their_own_get_these_alone() -> None:
    forget_single_queries()
    q, k, v = draw(1, ROW)
    own = PerHead([GlobalTokens(range(head, 3 * head + 1), attends_to_all=False) for head in range(4)])
    layout = Layout(own, 4, 1, ROW, ROW - 1)
    assert decode_keys.keys_of_query(layout).num_computed == 10
    layout = replace(layout, pattern=PerHead([GlobalTokens([9 * head], attends_to_all=False) for head in range(4)]))
    assert decode_keys.keys_of_query(layout).num_computed == 1
    read = decode_keys.read_keys(layout, NO_MASK, 2, q.dtype)
    assert read.places is not None
    torch.testing.assert_close(read.of(k), torch.stack([k[:, head // 2, read.places[0, head]] for head in range(4)], 1))
    forget_single_queries()


def test_a_single_query_of_another_sequence() -> None:
    q, k, v = draw(1, ROW)
    ids = torch.arange(ROW) // 10 % 5
    tokens = TokenMask(
        segment_ids=ids.expand(2, ROW),
        query_segment_ids=torch.tensor([[1, 2, 2], [0, 1, 3]]),
        query_mask=torch.tensor([[True] * 3, [True, True, False]]),
    )
    layout = Layout(Band(1, 4), 4, 1, ROW, 2, is_cross=True)
    call = call_of(q, k, v, layout, tokens=tokens)
    torch.testing.assert_close(sdpa.attend(q, k, v, call), reference.attend(q, k, v, call))


@pytest.mark.parametrize("learned", [True, False])
def test_lse_beside_paths_that_give_none(learned: bool) -> None:
    q, k, v = draw(9, 12)
    layout, tokens = Layout(Band(3, 1), 4, 9, 12, 3), TokenMask(key_mask=torch.arange(24).reshape(2, 12) % 5 != 0)
    terms = (Term(torch.randn(1, 4, 1, 5, requires_grad=learned), Distance(-2, 2)),)
    values = v[..., :8] if learned else v[..., :6]
    call = call_of(q, k, values, layout, tokens=tokens, terms=terms)
    _, lse = sdpa.attend(q, k, values, call)
    _, expected = reference.attend(q, k, values, call)
    assert lse is not None
    assert not lse.requires_grad
    torch.testing.assert_close(lse, expected)


def test_dropout_drops_weights() -> None:
    q, k, v = draw(300, 300)
    call = call_of(q, k, v, Layout(Causal(), 4, 300, 300), dropout=0.4)
    for backend in (sdpa, reference):
        out, _ = backend.attend(q, k, torch.ones_like(v), call)
        assert out.std() > 0.01
        assert abs(out.mean().item() - 1) < 0.02


COMPILED = {
    "full": Full(),
    "causal": Causal(),
    "globals": Band(2, 0) | GlobalTokens([0]),
    "random": Band(0, 0) | RandomBlocks(1, 4),
}
# what a graph has in it: no mask, that of a pattern, and that of tokens
OFTEN = (("full", False), ("random", False), ("globals", True))


@pytest.mark.parametrize(
    ("pattern", "has_tokens"),
    [
        pytest.param(
            pattern,
            has_tokens,
            id=f"{name}-{has_tokens}",
            marks=[pytest.mark.thorough] * ((name, has_tokens) not in OFTEN),
        )
        for name, pattern in COMPILED.items()
        for has_tokens in (True, False)
    ],
)
def test_compiles_whole(pattern: Pattern, has_tokens: bool) -> None:
    """In one graph, lse included."""
    q, k, v = draw(12, 16)
    key_mask = torch.arange(32).reshape(2, 16) % 5 != 0

    def call(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = TokenMask(key_mask if has_tokens else None)
        return sdpa.attend(q, k, v, call_of(q, k, v, Layout(pattern, 4, 12, 16, 4), tokens=tokens))

    expected = call(q, k, v, key_mask)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v, key_mask)
    torch.testing.assert_close(found, expected)
