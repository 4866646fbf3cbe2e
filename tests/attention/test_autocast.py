"""Mixed precision: `attention` under autocast is what torch's SDPA is there, and sparsified models follow."""

from typing import Any

import pytest
import torch
from attention_models import CAUSAL, PATTERN, SEQ2SEQS, SPARSE, build, inputs_of, outputs_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.attention.layer import dense_attention
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.patterns import Band, Full, GlobalTokens

AUTOCAST_BACKENDS = ("blocked", "reference", "sdpa")
BFLOAT, HALF = torch.bfloat16, torch.float16


def states(dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> list[Tensor]:
    """Return queries, keys and values of 40 tokens, with gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 40, 8, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]


@pytest.mark.parametrize("backend", AUTOCAST_BACKENDS)
@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
@pytest.mark.parametrize("given", [(torch.float32, torch.float32, BFLOAT), (HALF, BFLOAT, torch.float32)])
def test_autocast_casts_once_and_leaves_the_rest_as_wide_as_without_it(
    backend: str, dtype: torch.dtype, given: tuple[torch.dtype, ...]
) -> None:
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 30:] = False
    term = Term(torch.randn(1, 4, 40, 5), Distance(-2, 2))
    options: dict[str, Any] = {"key_mask": mask, "terms": (term,), "backend": backend, "return_lse": True}
    results = []
    for is_cast, within in ((False, False), (True, False), (True, True)):
        leaves = states(given)
        if is_cast:
            with torch.autocast("cpu", dtype=dtype):
                out, lse = hea.attention(*leaves, Band(5, 3) | GlobalTokens([0]), **options)
        else:
            out, lse = hea.attention(*(each.to(dtype) for each in leaves), Band(5, 3) | GlobalTokens([0]), **options)
        # torch's own matrix products are cast in the backward pass, too; the operator of "blocked" is ours
        with torch.autocast("cpu", dtype=dtype, enabled=within and backend == "blocked"):
            out.float().square().sum().backward()
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert [each.grad.dtype for each in leaves] == list(given)
        results.append([out, lse, *(each.grad for each in leaves)])
    for expected, *others in zip(*results, strict=True):
        for other in others:
            assert torch.equal(other, expected)


@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast_of_attention_over_a_matrix(need_weights: bool) -> None:
    bias = torch.randn(1, 4, 40, 40)
    low = [each.bfloat16() for each in states()]
    expected, expected_weights = dense_attention(*low, None, bias, 0.5, 0.0, need_weights)
    with torch.autocast("cpu", dtype=BFLOAT):
        out, weights = dense_attention(*states(), None, bias, 0.5, 0.0, need_weights)
    assert torch.equal(out, expected)
    assert weights is None if expected_weights is None else torch.equal(weights, expected_weights)


def test_float64_is_not_cast_as_in_torch() -> None:
    wide = states((torch.float64,) * 3)
    mixed = states((torch.float64, torch.float32, torch.float32))
    with torch.autocast("cpu", dtype=BFLOAT):
        assert scaled_dot_product_attention(*wide).dtype == torch.float64
        torch.testing.assert_close(hea.attention(*wide, Band(3, 3)), hea.attention(*wide, Band(3, 3), backend="sdpa"))
        with pytest.raises(RuntimeError, match="same dtype"):
            scaled_dot_product_attention(*mixed)
        with pytest.raises(hea.InputError, match=r"float64, torch.bfloat16 .* must be equal"):
            hea.attention(*mixed, Band(3, 3))


def test_unequal_dtypes_are_refused_without_autocast_of_their_own_device() -> None:
    mixed = states((torch.float32, torch.float32, BFLOAT))
    torch.set_autocast_enabled("cuda", True)
    try:
        assert hea.attention(*states(), Band(3, 3)).dtype == torch.float32
        with pytest.raises(hea.InputError, match="must be equal"):
            hea.attention(*mixed, Band(3, 3))
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_tensors_without_data_know_no_autocast() -> None:
    with torch.autocast("cpu", dtype=BFLOAT):
        assert hea.attention(*(each.to("meta") for each in states()), Full()).is_meta


@pytest.mark.parametrize("dtype", [BFLOAT, pytest.param(HALF, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_are_as_near_to_float32_as_their_own_attention(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name), inputs_of(name, "right")
    own = outputs_of(model, inputs)
    with torch.autocast("cpu", dtype=dtype):
        limit = 2 * (outputs_of(model, inputs).float() - own).norm()
    hea.sparsify(model, PATTERN)
    expected = outputs_of(model, inputs)
    for use_cache in (False, True) if name in CAUSAL or name in SEQ2SEQS else (None,):
        options = {} if use_cache is None else {"use_cache": use_cache}
        with torch.autocast("cpu", dtype=dtype):
            assert 0 < (outputs_of(model, {**inputs, **options}).float() - expected).norm() < limit


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_train_under_autocast(name: str) -> None:
    model = hea.sparsify(build(name), PATTERN).train()
    with torch.autocast("cpu", dtype=BFLOAT):
        logits = model(**inputs_of(name, "left")).logits
    logits.float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(each.dtype == torch.float32 and each.isfinite().all() for each in gradients)


@pytest.mark.parametrize("name", CAUSAL[:2])
def test_sparse_models_generate_under_autocast(name: str) -> None:
    model, inputs = hea.sparsify(build(name), PATTERN), inputs_of(name, "left", tokens=6)
    for use_cache in (False, True):
        with torch.autocast("cpu", dtype=BFLOAT):
            out = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, use_cache=use_cache)
        assert out.shape == (2, 9)
