"""Backends and families on a pretended GPU: nothing mixes devices, and a forward pass seldom waits for the device."""

from types import ModuleType
from typing import Any

import backends_contract as contract
import models_cases
import pytest
import torch
from pretended_cuda import Waits, move_model, on_cuda, pretended_cuda, unwrap
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.layout.terms import Distance, SoftSpan

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
CASES = [
    contract.Case("band", 90, "left"),
    contract.Case("globals", 90, "documents", label=Distance(-3, 6)),
    contract.Case("dilated", 90, "holes"),
    contract.Case("random", 90, "globals"),
    contract.Case("per head", 90, num_queries=40),
    contract.Case("causal band", 90, "right", torch.bfloat16, label=SoftSpan(ramp=20, num_inner=5)),
]
# model, and how often a forward pass may wait: for checks of its inputs, and once for the documents of its masks.
# Layers wait for nothing but learned spans.
MODELS = {
    "simplified-sas_p": 4,
    "sparse-longformer": 5,
    "sparse-longformer-causal-global": 5,
    "sparse-bigbird": 4,
    "sparse-sliding-grouped": 4,
    "span-adaptive": 3 + models_cases.TINY["num_hidden_layers"],
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", [blocked, sdpa, reference], ids=lambda backend: backend.NAME)
def test_backends_stay_on_the_device(backend: ModuleType, case: contract.Case) -> None:
    with pretended_cuda():
        contract.check(case, backend, "cuda")


def inputs_of(case: models_cases.Case, move: Any) -> dict[str, Tensor]:
    return {name: move(given) for name, given in models_cases.head_inputs(case.main_head, tokens=40).items()}


def loss_of(case: models_cases.Case, backend: str) -> tuple[Tensor, dict[str, Tensor], Waits]:
    """Return the loss and the gradients of a model on the pretended device, and how often its forward pass waited."""
    model = move_model(case.model())
    with pretended_cuda() as waits, hea.use_backend(backend):
        # what depends on lengths alone is kept from now on; the masks of the next call are other tensors
        model(**inputs_of(case, on_cuda))
        waits.clear()
        loss = model(**inputs_of(case, on_cuda)).loss
        forward_waits = Waits(waits)
        loss.backward()
    gradients = {name: unwrap(parameter.grad) for name, parameter in model.named_parameters()}
    return unwrap(loss.detach()), gradients, forward_waits


@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_families_stay_on_the_device_and_seldom_wait(name: str, backend: str) -> None:
    case = next(case for case in models_cases.CASES if case.name == name)
    loss, gradients, waits = loss_of(case, backend)
    assert waits.total() <= MODELS[name], dict(waits)
    model = case.model()
    expected = model(**inputs_of(case, lambda given: given)).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **TOLERANCE)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, **TOLERANCE, msg=key)


def test_devices_do_not_mix() -> None:
    with pretended_cuda(), pytest.raises(RuntimeError, match="same device"):
        on_cuda(torch.ones(3)) + torch.ones(3)


def test_waits_are_counted() -> None:
    with pretended_cuda() as waits:
        bool(on_cuda(torch.ones(3)).any())
        on_cuda(torch.ones(3)).cpu()
    assert waits.total() == 2
