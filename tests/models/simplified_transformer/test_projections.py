"""Closed forms 6 and 9: reparameterised W^V and W^P."""

from pathlib import Path

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import ReparameterizedLinear


def config(**fields: object) -> hea.SimplifiedTransformerConfig:
    return hea.SimplifiedTransformerConfig(**{**TINY, "block": "sas", "num_hidden_layers": 3, **fields})


def effective(module: torch.nn.Module | None) -> torch.Tensor:
    return torch.eye(TINY["hidden_size"]) if module is None else module.effective_weight().detach()


@pytest.mark.parametrize("matrix_init", ["identity", "orthogonal"])
def test_weight_is_a_times_start_plus_b_times_update(matrix_init: str) -> None:
    linear = ReparameterizedLinear(
        config(matrix_init=matrix_init, value_gain=0.3, first_value_gain=0.3, value_skip_gain=0.7), 0, "value"
    )
    linear.initialize()
    start = torch.eye(TINY["hidden_size"]) if matrix_init == "identity" else linear.initial_weight
    torch.testing.assert_close(linear.effective_weight(), 0.7 * start)
    with torch.no_grad():
        linear.weight.normal_()
    torch.testing.assert_close(linear.effective_weight(), 0.7 * start + 0.3 * linear.weight)
    x = torch.randn(2, 5, TINY["hidden_size"])
    torch.testing.assert_close(linear(x), x @ linear.effective_weight().T, atol=1e-5, rtol=1e-4)


def test_one_sgd_step_moves_the_weight_by_lr_b_squared() -> None:
    """Closed form 6: training ΔW at rate η moves W by η·b²·∂L/∂W."""
    fields = {"value_gain": 0.3, "first_value_gain": 0.3, "trainable_gains": []}
    linear = ReparameterizedLinear(config(**fields), 0, "value")
    x = torch.randn(4, TINY["hidden_size"])
    before = linear.effective_weight().detach()
    plain = before.clone().requires_grad_()
    (x @ plain.T).square().sum().backward()
    linear(x).square().sum().backward()
    torch.optim.SGD([linear.weight], lr=0.01).step()
    torch.testing.assert_close(linear.effective_weight().detach() - before, -0.01 * 0.3**2 * plain.grad)


@pytest.mark.parametrize("tie", ["last_layer", "all_layers"])
def test_tied_products_are_the_identity(tie: str) -> None:
    """Closed form 6, to 1e-4."""
    model = hea.SimplifiedTransformerModel(config(matrix_init="orthogonal", matrix_init_tie=tie, first_value_gain=0.0))
    product = torch.eye(TINY["hidden_size"])
    for layer in model.layers:
        value, projection = effective(layer.self_attn.v_proj), effective(layer.self_attn.o_proj)
        torch.testing.assert_close(value @ value.T, torch.eye(len(value)), atol=1e-5, rtol=0)
        product = projection @ value @ product
        if tie == "all_layers":
            torch.testing.assert_close(product, torch.eye(len(product)), atol=1e-4, rtol=0)
    torch.testing.assert_close(product, torch.eye(len(product)), atol=1e-4, rtol=0)


def test_layers_and_seeds_draw_different_matrices() -> None:
    models = [hea.SimplifiedTransformerModel(config(matrix_init="orthogonal", matrix_seed=seed)) for seed in (0, 0, 1)]
    first, again, other = ([layer.self_attn.o_proj.initial_weight for layer in model.layers] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.allclose(first[0], first[1])


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ReparameterizedLinear(config(matrix_init="orthogonal"), 0, "value").initialize()
    assert torch.equal(torch.rand(3), expected)


def test_loading_keeps_query_and_orthogonal_starts(tmp_path: Path) -> None:
    """Closed form 9: from_pretrained keeps a trained W^Q (not its zero start) and the saved orthogonal W_init."""
    model = hea.SimplifiedTransformerForCausalLM(config(matrix_init="orthogonal"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.normal_()
            layer.self_attn.o_proj.initial_weight.mul_(-1)
    model.save_pretrained(tmp_path)
    again = hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key


def test_identity_needs_no_module() -> None:
    model = hea.SimplifiedTransformerModel(config())
    assert [layer.self_attn.v_proj is None for layer in model.layers] == [False, True, True]
    assert all(layer.self_attn.o_proj is None for layer in model.layers)
