"""Steps of decoding: checked once for all numbers of tokens, and computed as others."""

from typing import Any

import pytest
import torch
from attention_models import build, token_ids
from transformers import DynamicCache

import hf_efficient_attn as hea
from hf_efficient_attn import attention
from hf_efficient_attn.attention import dispatch
from hf_efficient_attn.attention.dispatch import _plans
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import (
    Band,
    BlockTopK,
    Causal,
    Dilated,
    GlobalTokens,
    Grid,
    PerHead,
    RandomBlocks,
)


def states(dtype: torch.dtype = torch.float32, tokens: int = 20, heads: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, heads, tokens, 8, dtype=dtype))


STEPS = {
    "causal": Causal(),
    "band": Band(6, 0),
    "wide": Band(500, 3),
    "first tokens": (Band(3, 0) | GlobalTokens([0, 1])).causal(),
    "dilated": Dilated(12, 0, 3),
    "heads": PerHead([Band(3, 0), Causal()] * 2),
    "random": RandomBlocks(4, 1) | Band(3, 0),
    "earlier tokens": Band(8, -1),
}


OPTIONS: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"scale": -0.3}]
BY_TURNS = [
    pytest.param(pattern, backend, OPTIONS[(number + turn) % 3], id=f"{name}-{backend}")
    for number, (name, pattern) in enumerate(STEPS.items())
    for turn, backend in enumerate(("auto", "blocked", "sdpa"))
]


@pytest.mark.parametrize(("pattern", "backend", "options"), BY_TURNS)
def test_steps_of_decoding_are_built_once(
    pattern: Any, backend: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _plans.clear()
    built: list[Any] = []
    build_call = dispatch.build_call
    monkeypatch.setattr(dispatch, "build_call", lambda *args: built.append(args) or build_call(*args))
    if backend == "sdpa" and "softcap" in options:
        for _ in range(2):
            with pytest.raises(hea.UnsupportedBackendError, match="softcap"):
                attention(*states(heads=4), pattern, backend=backend, **options)
        return
    for num_keys in (1, 5, 17, 40, 17):
        q, k, v = (each.requires_grad_() for each in states(torch.float64, num_keys, heads=4))
        for key, value in ((k, v), (k[:, ::2], v[:, ::2]), (k.flip(2), v.transpose(2, 3).clone().transpose(2, 3))):
            inputs = (q[:, :, -1:], key, value)
            out = attention(*inputs, pattern, backend=backend, **options)
            wanted, lse = attention(*inputs, pattern, backend="reference", return_lse=True, **options)
            torch.testing.assert_close(out, wanted)
            ours = attention(*inputs, pattern, backend=backend, return_lse=True, **options)
            torch.testing.assert_close(ours[0], wanted)
            torch.testing.assert_close(ours[1], lse)
            weights = torch.randn_like(out)
            mine, others = (torch.autograd.grad((each * weights).sum(), (q, k, v)) for each in (out, wanted))
            for gradient, other in zip(mine, others, strict=True):
                torch.testing.assert_close(gradient, other)
    # keys of all heads and of half of them, by two backends
    assert len(built) == 4


@pytest.mark.parametrize("backend", ["auto", "blocked", "sdpa"])
def test_padded_steps_with_sinks_and_terms_are_built_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _plans.clear()
    built: list[Any] = []
    build_call = dispatch.build_call
    monkeypatch.setattr(dispatch, "build_call", lambda *args: built.append(args) or build_call(*args))
    term = hea.Term(torch.randn(1, 4, 1, 6, dtype=torch.float64), hea.Distance(0, 5))
    for given in ({}, {"sinks": torch.randn(4, dtype=torch.float64)}, {"terms": (term,)}):
        built.clear()
        for num_keys in (5, 17, 40, 17):
            q, k, v = states(torch.float64, num_keys, heads=4)
            masks = {"key_mask": torch.arange(num_keys)[None] > 2, "segment_ids": torch.arange(num_keys)[None] // 20}
            out = attention(q[:, :, -1:], k, v, Band(6, 0), backend=backend, **masks, **given)
            wanted = attention(q[:, :, -1:], k, v, Band(6, 0), backend="reference", **masks, **given)
            torch.testing.assert_close(out, wanted)
        assert len(built) == 2


def test_steps_in_lower_precision_are_as_others() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for num_keys in (9, 30):
            q, k, v = states(dtype, num_keys, heads=4)
            out = attention(q[:, :, -1:], k[:, :2], v[:, :2], Band(6, 0))
            wanted = attention(*(each.double() for each in (q[:, :, -1:], k[:, :2], v[:, :2])), Band(6, 0))
            assert out.dtype == dtype  # type: ignore[union-attr]
            torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)  # type: ignore[union-attr]
            with torch.autocast("cpu", dtype):
                again = attention(q[:, :, -1:].float(), k[:, :2].float(), v[:, :2].float(), Band(6, 0))
            assert torch.equal(again, out)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "reference", "gathered"])
def test_steps_that_choose_by_content_choose_at_every_length(backend: str) -> None:
    pattern = BlockTopK(4, 2)
    q, k, v = states(torch.float64, 40)
    for num_keys in (8, 40, 3, 29):
        keys, values = k[:, :, :num_keys], v[:, :, :num_keys]
        wanted = attention(q[:, :, :num_keys], keys, values, pattern, backend="reference")[:, :, -1:]
        out = attention(q[:, :, num_keys - 1 : num_keys], keys, values, pattern, backend=backend)
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("pattern", [BlockTopK(4, 2), Band(5, 0), (Band(3, 0) | GlobalTokens([0])).causal()], ids=str)
def test_models_decode_as_without_a_cache_after_other_lengths(pattern: Any) -> None:
    model = hea.sparsify(build("llama"), pattern).eval().double()
    for num_prompt in (3, 30, 3):
        ids = token_ids(1, 40)
        with torch.no_grad():
            wanted = model(ids, use_cache=False).logits
            cache = DynamicCache()
            model(ids[:, :num_prompt], **{CACHE_ARGUMENT: cache})
            for place in range(num_prompt, 40):
                out = model(ids[:, place : place + 1], **{CACHE_ARGUMENT: cache}).logits
                torch.testing.assert_close(out[:, 0], wanted[:, place])


def test_wrong_steps_are_refused_when_others_have_plans() -> None:
    q, k, v = states()
    pattern = Grid([4, 5], [Band(1, 1), Band(1, 1)])
    attention(q[:, :, -1:], k, v, pattern)
    attention(q[:, :, -1:], k, v, Band(3, 0))
    with pytest.raises(hea.InputError, match="40 tokens"):
        attention(q[:, :, -1:], torch.cat([k, k], 2), torch.cat([v, v], 2), pattern)
    with pytest.raises(hea.InputError, match="v"):
        attention(q[:, :, -1:], k, v[:, :, 1:], Band(3, 0))
    for wrong in (v[..., 0], v[..., None]):
        with pytest.raises(hea.InputError, match="four dimensions"):
            attention(q[:, :, -1:], k, wrong, Band(3, 0))
    for backend in ("none", [], None):
        with pytest.raises(hea.UnsupportedBackendError, match="does not exist"):
            attention(q[:, :, -1:], k, v, Band(3, 0), backend=backend)  # type: ignore[arg-type]
