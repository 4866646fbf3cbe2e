"""The span of a soft mask in every backend: its gradient, rows that it closes, and spans longer than all keys."""

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, SoftSpan, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.bands import Band

with_each_backend = pytest.mark.parametrize("backend", [reference, sdpa, blocked], ids=lambda module: module.NAME)
BATCH, HEADS, TOKENS, WIDTH, SCALE = 2, 3, 150, 8, 0.4
SHAPES = {"a head": (1, HEADS, 1, 1), "a token": (BATCH, HEADS, TOKENS, 1)}
LABEL = SoftSpan(ramp=12, shift=1, num_inner=4)
# without the token itself: the first has no key
LAYOUT = Layout(Band(60, -1), HEADS, TOKENS, TOKENS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def out_of(backend: Backend, terms: tuple[Term, ...], tokens: TokenMask | None = None) -> Tensor:
    """Return the output of the same random q, k and v."""
    q, k, v = (draw(BATCH, HEADS, TOKENS, WIDTH, seed=seed) for seed in range(3))
    call = AttentionCall(LAYOUT, inputs_of(q, k, v), tokens or TokenMask(), terms, scale=SCALE)
    return backend.attend(q, k, v, call)[0]


@pytest.mark.parametrize("has_distances", [False, True], ids=["alone", "with distances"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradient_is_that_of_finite_differences(shape: tuple[int, ...], has_distances: bool) -> None:
    """Of `reference`, with which the others are compared: here beside distances, alone in `test_contract.py`."""
    # a quarter beyond whole numbers of tokens, where the mask has corners
    spans = (3.25 + (20 * torch.rand(shape, generator=torch.Generator().manual_seed(3))).floor()).double()
    more = (Term(draw(BATCH, HEADS, TOKENS, 60), Distance(1, 60)),) if has_distances else ()
    direction = draw(BATCH, HEADS, TOKENS, WIDTH, seed=4)

    def loss(spans: Tensor, backend: Backend = reference) -> Tensor:
        return (out_of(backend, (*more, Term(spans, LABEL))) * direction).sum()

    (gradient,) = torch.autograd.grad(loss(spans.requires_grad_()), spans)
    for backend in (sdpa, blocked) if has_distances else ():
        (other,) = torch.autograd.grad(loss(spans, backend), spans)
        torch.testing.assert_close(other, gradient, atol=1e-9, rtol=1e-6)
    assert gradient.shape == shape
    # every span of a few tokens in turn: each is one number of the gradient
    for place in [(0, head, token, 0) for head in range(HEADS) for token in {0, 1, 77, TOKENS - 1} if token < shape[2]]:
        step = torch.zeros(shape, dtype=torch.float64)
        step[place] = 1e-5
        with torch.no_grad():
            expected = (loss(spans + step) - loss(spans - step)) / 2e-5
        assert gradient[place].item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@with_each_backend
def test_rows_without_keys_are_zero(backend: Backend, shape: tuple[int, ...]) -> None:
    """Where padding leaves a token nothing, or only keys beyond its ramp: neither NaN nor a gradient."""
    spans = torch.full(shape, 4.5, dtype=torch.float64, requires_grad=True)
    key_mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    key_mask[0] = False
    # the keys that token 60 reads with any weight are the 17 before it
    key_mask[1, 40:60] = False
    values = draw(1, HEADS, 1, 60).requires_grad_()
    out = out_of(backend, (Term(values, Distance(1, 60)), Term(spans, LABEL)), TokenMask(key_mask=key_mask))
    assert not out[0].any()
    assert not out[1, :, [0, 60]].any()
    assert out[1, :, 61:].any(-1).all()
    gradients = torch.autograd.grad(out.square().sum(), (values, spans))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    if shape[2] > 1:
        assert not gradients[1][0].any()
        assert not gradients[1][1, :, [0, 60]].any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@with_each_backend
def test_spans_beyond_all_keys_change_nothing(backend: Backend, shape: tuple[int, ...]) -> None:
    spans = torch.full(shape, 1e4, dtype=torch.float64, requires_grad=True)
    out = out_of(backend, (Term(spans, LABEL),))
    torch.testing.assert_close(out, out_of(backend, ()), atol=1e-12, rtol=1e-12)
    (gradient,) = torch.autograd.grad(out.square().sum(), spans)
    assert not gradient.any()
