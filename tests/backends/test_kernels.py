"""What kernels do with weights that are nearly 0."""

import torch

from hf_efficient_attn.backends.kernels import Explicit, exp_

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
