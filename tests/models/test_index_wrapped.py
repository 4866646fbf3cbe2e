"""Models with indexers whose forward others replace, before or after: the loss arrives, or a sentence says so."""

import copy
import pickle
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import transformers as tr
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import remove_hook_from_module
from accelerate.state import AcceleratorState
from attention_models import DECODER, build, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedBackendError

SIZES: dict[str, int] = {"top_k": 4, "num_heads": 2}


def sparse(model: Any) -> Any:
    return hea.index_stage(hea.index(model, **SIZES), "sparse").train()


def hooked(model: Any) -> Any:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


@pytest.fixture(autouse=True)
def _no_other_accelerator() -> Iterator[None]:
    """The settings of the first `Accelerator` of a process, as of a test that trains before, hold for all others."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def prepared(model: Any) -> Any:
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def unwrapped(model: Any) -> Any:
    return Accelerator(cpu=True).unwrap_model(model, keep_fp32_wrapper=False)


def in_a_file(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def steps(*functions: Callable[[Any], Any]) -> Any:
    """Return what a model becomes by these in turn."""
    model = build("llama")
    for function in functions:
        model = function(model)
    return model


WRAPPED = {
    "hooks before": (hooked, sparse),
    "hooks after": (sparse, hooked),
    "hooks before, and a copy": (hooked, sparse, copy.deepcopy),
    "hooks after, and taken away": (sparse, hooked, lambda model: remove_hook_from_module(model, recurse=True)),
    "autocast before": (prepared, sparse),
    "autocast after": (sparse, prepared),
    "autocast before, and taken away": (prepared, sparse, unwrapped),
    "autocast after, and taken away": (sparse, prepared, unwrapped),
    "a copy": (sparse, copy.deepcopy),
    "a file": (sparse, in_a_file),
    "a file of a copy, with hooks": (sparse, copy.deepcopy, in_a_file, hooked),
}


def learnt(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the indexers, and the gradients of all parameters."""
    ids = token_ids(2, 20)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    assert None not in gradients.values()
    return out.auxiliary_loss.detach(), gradients


@pytest.mark.parametrize("name", WRAPPED)
def test_the_loss_of_indexers_arrives(name: str) -> None:
    torch.manual_seed(1)
    expected = steps(sparse)
    model = steps(*WRAPPED[name])
    # indexers are drawn anew
    model.load_state_dict(expected.state_dict())
    is_narrow = name in ("autocast before", "autocast after")
    tolerances: dict[str, float] = {"rtol": 0.2, "atol": 0.01} if is_narrow else {}
    torch.testing.assert_close(learnt(model)[0], learnt(expected)[0], **tolerances)
    if not is_narrow:
        torch.testing.assert_close(learnt(model)[1], learnt(expected)[1])


def test_a_replica_computes_with_its_own_parameters() -> None:
    """As those that DataParallel makes."""
    model = steps(sparse)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    copies = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, child in module._modules.items():
            setattr(replicas[module], name, replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replicas[module], name, None if parameter is None else copies[f"{prefix}.{name}"])
    ids = token_ids(2, 20)
    out = replicas[model](input_ids=ids, labels=ids)
    out.loss.backward()
    loss, gradients = learnt(model)
    torch.testing.assert_close(out.auxiliary_loss, loss)
    torch.testing.assert_close({name: each.grad for name, each in copies.items()}, gradients)


def test_a_model_of_the_same_class_without_indexers_is_as_before() -> None:
    plain = tr.LlamaForCausalLM
    model, ids = steps(sparse), token_ids(1, 12)
    assert type(build("llama")) is plain
    assert type(model).__name__ == plain.__name__
    assert isinstance(model, plain)
    other = type(model)(tr.LlamaConfig(**DECODER)).train()
    assert not hasattr(other(ids, labels=ids), "auxiliary_loss")


@pytest.mark.parametrize("name", ["StableLm", "Nemotron"])
def test_layers_that_pass_no_arguments_on_are_refused(name: str) -> None:
    model = getattr(tr, f"{name}ForCausalLM")(getattr(tr, f"{name}Config")(**DECODER))
    with pytest.raises(UnsupportedBackendError, match=f"layers of {name}ForCausalLM do not pass keyword arguments on"):
        hea.index(model, **SIZES)
    assert not hasattr(model.config, "attention_indexer")


def without_options(layer: Any) -> None:
    forward = layer.forward

    def passing_nothing_on(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward(*inputs, **{name: each for name, each in options.items() if not name.startswith("index_")})

    layer.forward = MethodType(passing_nothing_on, layer)


class Skipped(torch.nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def test_a_loss_that_does_not_arrive_is_said() -> None:
    model, ids = steps(sparse), token_ids(1, 20)
    without_options(model.model.layers[1])
    with pytest.raises(UnsupportedBackendError, match="has an indexer .* whose loss would be lost"):
        model(ids, labels=ids)
    with pytest.raises(UnsupportedBackendError, match="LlamaForCausalLM"):
        hea.index_recall(model, input_ids=ids)
    model = steps(sparse)
    model.model.layers[1] = Skipped()
    with pytest.raises(UnsupportedBackendError, match="LlamaForCausalLM"):
        model(ids, labels=ids)
