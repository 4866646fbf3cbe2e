"""Reversible layers against plain autograd: gradients, memory, random states, precision, and whoever asks for them."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models.shared_checks import kept_bytes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hf_efficient_attn as hea
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.models.efficient_reformer import modeling_efficient_reformer as modeling
from hf_efficient_attn.models.efficient_reformer.reversible import ReversibleStack, Streams, stretches_of

CASE = BY_NAME["reformer-masked"]
DROPOUT = {f"{name}_dropout": 0.2 for name in ("hidden", "attention", "activation", "embedding")}


class PlainStack(ReversibleStack):
    """Computes the same, and leaves everything to autograd."""

    def run(self, function: Any, states: Tensor, modules: Any = (), stretch_tokens: int = 0) -> Tensor:
        return torch.cat([function(states[:, tokens]) for tokens in stretches_of(states.shape[1], stretch_tokens)], 1)


def gradients(model: Any, inputs: Any, plain: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setattr(modeling, "ReversibleStack", PlainStack if plain else ReversibleStack)
    torch.manual_seed(5)
    return list(torch.autograd.grad(model(**inputs).loss, [each for each in model.parameters() if each.requires_grad]))


@pytest.mark.parametrize(
    "fields", [{}, DROPOUT, {"chunk_size_feed_forward": 5, **DROPOUT}], ids=["", "drop", "stretches"]
)
def test_gradients_are_those_of_plain_autograd(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CASE.model(num_hidden_layers=6, **fields).double().train(), CASE.inputs()
    found, expected = (gradients(model, inputs, plain, monkeypatch) for plain in (False, True))
    assert max(float(each.abs().max()) for each in expected) > 1e-2
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize(("layer", "stream"), [(0, 0), (1, 1), (3, 0)])
def test_gradients_where_a_hook_changes_what_a_layer_returns(
    layer: int, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where activations are steered: by a vector that is learned here, beside a hook that changes all streams."""
    model, inputs = CASE.model(num_hidden_layers=4).double().train(), CASE.inputs()
    model.steering = torch.nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.double))

    def steer(module: Any, given: Any, out: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [each + model.steering if number == stream else each for number, each in enumerate(out)]

    model.model.layers[layer].register_forward_hook(steer)
    model.model.layers[2].register_forward_hook(lambda module, given, out: tuple(1.5 * each for each in out))
    found, expected = (gradients(model, inputs, plain, monkeypatch) for plain in (False, True))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-9)


def test_gradients_where_a_hook_before_a_layer_gives_it_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CASE.model(num_hidden_layers=4).double().train(), CASE.inputs()

    def steer(module: Any, given: Any) -> Any:
        streams = Streams(given[1].first, 2.0 * given[1].second)
        return given[0], streams, *given[2:]

    for layer in model.model.layers[::2]:
        layer.register_forward_pre_hook(steer)
    found, expected = (gradients(model, inputs, plain, monkeypatch) for plain in (False, True))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-9)


def test_gradients_where_dropout_is_left_on_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CASE.model(num_hidden_layers=4, **DROPOUT).double().eval(), CASE.inputs()
    for module in model.modules():
        module.train(isinstance(module, torch.nn.Dropout))
    found, expected = (gradients(model, inputs, plain, monkeypatch) for plain in (False, True))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-9)


def test_weights_that_change_before_the_backward_pass_are_refused() -> None:
    model, inputs = CASE.model(num_hidden_layers=2).train(), CASE.inputs()
    first, second = model(**inputs).loss, model(**inputs).loss
    first.backward()
    torch.optim.SGD(model.model.layers[1].parameters(), lr=0.1).step()
    with pytest.raises(hea.EfficientAttentionError, match="weights of layer 1 of a Reformer have changed since"):
        second.backward()


def test_hooks_that_would_be_lost_are_refused() -> None:
    """Written into what is computed again, or into what nobody reads."""
    model, inputs = CASE.model(num_hidden_layers=4).train(), CASE.inputs()
    layer = model.model.layers[1]

    def write(module: Any, given: Any) -> None:
        given[1].second.mul_(2.0)

    before = model.model.layers[2].register_forward_pre_hook(write)
    with pytest.raises(hea.EfficientAttentionError, match="written into the output of layer 1 of a Reformer"):
        model(**inputs)
    before.remove()
    hook = layer.register_forward_hook(lambda module, given, out: (out[0].add_(1.0), out[1]))
    with pytest.raises(hea.EfficientAttentionError, match="written into the output of layer 1 of a Reformer"):
        model(**inputs)
    hook.remove()
    layer.register_forward_pre_hook(lambda module, given: (given[0] + 1.0, *given[1:]))
    for mode in (model.train(), model.eval()):
        with pytest.raises(hea.EfficientAttentionError, match="replaced `states`, but a layer of a Reformer only"):
            mode(**inputs)


def test_gradients_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass runs outside of autocast, and computes layers again inside."""
    model, inputs = CASE.model(num_hidden_layers=4).train(), CASE.inputs()
    results = []
    for plain in (False, True):
        monkeypatch.setattr(modeling, "ReversibleStack", PlainStack if plain else ReversibleStack)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**inputs).loss
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    for actual, wanted in zip(*results, strict=True):
        # streams are computed again in float32, to 1e-7, which rounds a few numbers of bfloat16 otherwise
        assert float((actual - wanted).norm()) <= 1e-2 * float(wanted.norm()) + 1e-6


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_gradients_under_mixed_precision_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """It narrows what layers read to the dtype of their weights, but not the streams."""
    results, seen = [], []
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        for plain in (False, True):
            monkeypatch.setattr(modeling, "ReversibleStack", PlainStack if plain else ReversibleStack)
            model, inputs = CASE.model(num_hidden_layers=6).train(), CASE.inputs()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
            model.model.layers[1].register_forward_pre_hook(lambda layer, given: seen.append(given[1].second.dtype))
            model(**inputs).loss.backward()
            results.append([each.grad.full_tensor() for each in model.parameters()])
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [torch.float32] * 2
    for actual, wanted in zip(*results, strict=True):
        assert float((actual - wanted).norm()) <= 1e-2 * float(wanted.norm()) + 1e-6


def test_some_parameters_are_frozen_and_the_graph_is_used_twice() -> None:
    model, inputs = CASE.model(num_hidden_layers=4).double().train(), CASE.inputs()
    model.requires_grad_(False)
    weights = [model.model.layers[index].mlp.up_proj.weight.requires_grad_(True) for index in (1, 3)]
    loss = model(**inputs).loss
    last = torch.autograd.grad(loss, weights[1], retain_graph=True)[0]
    first, again = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(again, last)
    assert first.any()


def saved_bytes(num_layers: int) -> int:
    """Return the bytes that autograd keeps for a backward pass, without those of parameters."""
    model, inputs = CASE.model(num_hidden_layers=num_layers).train(), CASE.inputs()
    return kept_bytes(lambda: model(**inputs).loss, model.parameters())


def test_memory_does_not_grow_with_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_bytes(2) == saved_bytes(8)
    monkeypatch.setattr(modeling, "ReversibleStack", PlainStack)
    assert saved_bytes(8) > 3 * saved_bytes(2)


def test_under_zero_3_activations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights that DeepSpeed releases behind a layer, nothing can be computed again (`test_deepspeed.py`)."""
    monkeypatch.delattr(modeling, "ReversibleStack")
    model, inputs = CASE.model().train(), CASE.inputs()
    for parameter in model.parameters():
        # as DeepSpeed numbers those that it holds in shards
        parameter.ds_id = 0
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="ZeRO-3 releases a layer's weights"):
        model(**inputs).loss.backward()
    assert model.model.embed_tokens.weight.grad.any()


def test_a_layer_that_computes_something_else_the_second_time_is_refused() -> None:
    model, inputs = CASE.model().train(), CASE.inputs()
    loss = model(**inputs).loss
    model.model.layers[1].mlp.act_fn = torch.nn.Identity()
    with pytest.raises(hea.EfficientAttentionError, match="when the backward pass recomputed it"):
        loss.backward()


@pytest.mark.parametrize("name", ["reformer-masked", "reformer-causal"])
def test_loss_in_slices_is_the_loss(name: str) -> None:
    case = BY_NAME[name]
    results = []
    for size in (0, 5):
        model = case.model(chunk_size_lm_head=size).double().train()
        output = model(**case.inputs(), num_items_in_batch=17)
        mean = model(**case.inputs()).loss
        inputs = case.inputs()
        inputs["labels"][inputs["labels"] == -100] = 7
        other = model(**inputs, ignore_index=7).loss
        assert (output.logits is None) is (size > 0)
        assert model.eval()(**case.inputs()).logits is not None
        results.append((output.loss, mean, other, *torch.autograd.grad(output.loss + mean, list(model.parameters()))))
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-5)
