"""What kernels do with weights that are nearly 0."""

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.backends.kernels import Explicit, exp_
from hf_efficient_attn.patterns.bands import Full

# far keys, as a prior by distance makes them
FAR = -torch.linspace(0, 100, 400)


def test_weights_become_0_only_far_below_rounding() -> None:
    scores = FAR.double()
    weights = exp_(scores.clone())
    assert (weights == 0).any()
    assert (weights - scores.exp()).abs().max() < 1e-5 * torch.finfo(torch.float64).eps


def test_no_gradient_of_a_score_is_denormal() -> None:
    """Products of matrices that hold many denormal numbers take ten times as long, and more."""
    torch.manual_seed(0)
    q, grad = torch.zeros(1, 1, 8, 16), 1e-9 * torch.randn(1, 1, 8, 16)
    k, v = torch.randn(2, 1, 1, len(FAR), 16).unbind()
    kernel = Explicit(1.0, [FAR])
    out, lse = kernel.forward(q, k, v, None)
    sizes = kernel.backward(grad, q, k, v, out, lse, None)[3].abs()
    assert (sizes == 0).any()
    assert sizes[sizes > 0].min() > torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("backend", ["blocked", "gathered"])
def test_gradients_of_rows_whose_sink_has_most_of_the_weight(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 9, 4, dtype=torch.float64).unbind()
    leaves = [each.requires_grad_() for each in (q, k, v)]
    sinks = torch.tensor([60.0, -60.0], dtype=torch.float64)
    chosen = hea.ChosenTokens(torch.arange(9).expand(1, 2, 9, 9)) if backend == "gathered" else None
    out = hea.attention(q, k, v, Full(), sinks=sinks, softcap=9.0, chosen=chosen, backend=backend)
    scores = torch.tanh(q @ k.mT / 2 / 9) * 9
    weights = torch.cat([scores, sinks[:, None, None].expand(1, 2, 9, 1)], -1).softmax(-1)
    expected = weights[..., :-1] @ v
    for found, correct in zip(*(torch.autograd.grad(each, leaves, grad) for each in (out, expected)), strict=True):
        torch.testing.assert_close(found, correct, rtol=1e-10, atol=0.0)
