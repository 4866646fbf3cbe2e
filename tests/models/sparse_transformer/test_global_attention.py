"""Longformer's attention against its dense definition in float64, gradients included; and its projections."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models.sparse_transformer.dense_longformer import dense_longformer
from models_cases import TINY, randomize

import hf_efficient_attn as hea

Config = hea.SparseTransformerConfig
TOKENS = 19


def model_of(**fields: Any) -> Any:
    torch.manual_seed(0)
    config = Config.longformer(**{**TINY, "attention_window": 6, "num_hidden_layers": 1, "pad_token_id": 0, **fields})
    return randomize(hea.SparseTransformerModel(config).eval()).double()


def inputs_of(hidden_size: int = TINY["hidden_size"]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, TOKENS, hidden_size, dtype=torch.float64, generator=generator)
    is_token = torch.ones(3, TOKENS, dtype=torch.bool)
    is_token[0, 15:] = is_token[1, :4] = False
    is_global = torch.zeros_like(is_token)
    is_global[0, [0, 9]] = is_global[1, 4] = is_global[2, [1, 2, 7, 16]] = True
    return hidden, is_token, is_global


def attended(model: Any, hidden: torch.Tensor, is_token: torch.Tensor, is_global: torch.Tensor) -> torch.Tensor:
    """Return what the only layer's attention gives for these hidden states, as the model calls it."""
    seen = {}

    def take(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)

    handle = model.layers[0].self_attn.register_forward_pre_hook(take, with_kwargs=True)
    model(inputs_embeds=hidden, attention_mask=is_token.long(), global_attention_mask=is_global.long())
    handle.remove()
    return model.layers[0].self_attn(hidden, **seen)[0]


# 4 heads of 8: with 16 heads of 2 the keys of all tokens are made, with 1 head of 32 they are not
@pytest.mark.parametrize("num_heads", [1, 4, 16])
@pytest.mark.parametrize("step", [1, 2])
def test_equals_the_definition(num_heads: int, step: int) -> None:
    model = model_of(num_attention_heads=num_heads, attention_dilation=step)
    attention = model.layers[0].self_attn
    hidden, is_token, is_global = inputs_of()
    expected = dense_longformer(attention, hidden.requires_grad_(), 3, is_token, is_global, step)
    direction = torch.randn(expected.shape, dtype=torch.float64) * is_token[..., None]
    parameters = [hidden, *attention.parameters()]
    expected_gradients = torch.autograd.grad((expected * direction).sum(), parameters)
    actual = attended(model, hidden, is_token, is_global)
    torch.testing.assert_close(actual[is_token], expected[is_token], atol=1e-10, rtol=1e-10)
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad((actual * direction).sum(), parameters), expected_gradients, strict=True
    ):
        torch.testing.assert_close(actual_gradient, expected_gradient, atol=1e-9, rtol=1e-9)


def test_projections_start_as_copies_and_can_be_copied_again() -> None:
    model = hea.SparseTransformerModel(Config.longformer(**{**TINY, "attention_window": 6}))
    for layer in model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            local, copied = getattr(attention, name), getattr(attention.global_attention, name)
            assert torch.equal(local.weight, copied.weight)
            assert local.weight.data_ptr() != copied.weight.data_ptr()
            with torch.no_grad():
                local.weight.add_(1.0)
            assert not torch.equal(local.weight, copied.weight)
    model.copy_local_to_global()
    attention = model.layers[1].self_attn
    assert torch.equal(attention.k_proj.weight, attention.global_attention.k_proj.weight)


def test_checkpoint_without_global_projections_gets_copies(tmp_path: Any) -> None:
    fields = {**TINY, "attention_window": 6}
    without = randomize(hea.SparseTransformerModel(Config.longformer(**fields, global_projections=False)))
    without.save_pretrained(tmp_path)
    model = hea.SparseTransformerModel.from_pretrained(tmp_path, global_projections=True)
    attention = model.layers[0].self_attn
    assert torch.equal(attention.global_attention.v_proj.weight, without.layers[0].self_attn.v_proj.weight)
    assert torch.equal(attention.global_attention.v_proj.bias, attention.v_proj.bias)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_on_global_projections_are_used() -> None:
    """A wrapped projection is called, not bypassed by the short cut for few global tokens."""
    peft = pytest.importorskip("peft")
    model = model_of(num_attention_heads=1).float()
    ids = torch.randint(3, 60, (2, 12))
    globals_ = torch.zeros_like(ids)
    globals_[:, 0] = 1
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r".*global_attention\.[kv]_proj"))
    before = adapted(ids, global_attention_mask=globals_).last_hidden_state
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    after = adapted(ids, global_attention_mask=globals_).last_hidden_state
    assert not torch.allclose(before, after, atol=1e-3)
    after.sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_projections_are_copied_behind_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = hea.SparseTransformerModel(Config.longformer(**{**TINY, "attention_window": 6}))
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.k_proj.weight.normal_()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    adapted.base_model.model.copy_local_to_global()
    attention = adapted.base_model.model.layers[0].self_attn
    copied = attention.global_attention.k_proj.base_layer.weight
    assert torch.equal(copied, attention.k_proj.base_layer.weight)


class OnlyLinear(torch.Tensor):
    """A weight that can do nothing but map, as quantised ones."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            plain = [each.as_subclass(torch.Tensor) if isinstance(each, cls) else each for each in args]
            return function(*plain, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("__get__", "requires_grad_", "detach", "__repr__"):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise NotImplementedError(f"{function} of a quantised weight")


def test_special_weights_are_asked_for_nothing_but_their_map() -> None:
    """Quantised by torchao, the module stays what it was, and its weight is of another type."""
    model: Any = BY_NAME["sparse-longformer-first"].model()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for layer in model.model.layers:
            for projection in (layer.self_attn.global_attention.k_proj, layer.self_attn.global_attention.v_proj):
                projection.weight = torch.nn.Parameter(projection.weight.data.as_subclass(OnlyLinear), False)
                assert type(projection.weight) is OnlyLinear
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
