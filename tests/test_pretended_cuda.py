"""Backends and families on a pretended GPU: nothing mixes devices, and a forward pass seldom waits for the device."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import models_cases
import pytest
import torch
from backends_cases import Case
from backends_contract import check
from device_waits import Waits
from families import BY_NAME
from pretended_cuda import move_model, on_cuda, pretended_cuda, unwrap
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_efficient_attn as hea
from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.layout.terms import Distance, SoftSpan

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
CASES = [
    Case("band", 90, "left"),
    Case("globals", 90, "documents", label=Distance(-3, 6)),
    Case("dilated", 90, "holes"),
    Case("random", 90, "globals"),
    Case("per head", 90, num_queries=40),
    Case("causal band", 90, "right", torch.bfloat16, label=SoftSpan(ramp=20, num_inner=5)),
]
# of every kind of choice one
CHOSEN = [Case("causal", 90, "left", choice=choice) for choice in ("tokens", "blocks", "groups", "order")]
MODELS = (
    "simplified-sas_p",
    "sparse-longformer",
    "sparse-longformer-causal-global",
    "sparse-sliding-grouped",
    "span-adaptive",
    "span-dynamic",
    "span-modern-frozen",
    "simplified-sas-span",
)
# How often a forward pass may wait for the device: once for all masks, positions and learned spans, whatever the number
# of layers. What tokens choose (dynamic spans) is known only layer by layer.
MAX_WAITS = 1
MORE_WAITS = {"span-dynamic": models_cases.TINY["num_hidden_layers"]}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", [blocked, sdpa, reference], ids=lambda backend: backend.NAME)
def test_backends_stay_on_the_device(backend: ModuleType, case: Case) -> None:
    with pretended_cuda():
        check(case, backend, "cuda")


@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.parametrize("backend", [gathered, sdpa, reference], ids=lambda backend: backend.NAME)
def test_chosen_keys_stay_on_the_device(backend: ModuleType, case: Case) -> None:
    with pretended_cuda():
        check(case, backend, "cuda")


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
    case = BY_NAME[name]
    loss, gradients, waits = loss_of(case, backend)
    assert waits.of_package().total() <= MAX_WAITS + MORE_WAITS.get(name, 0), dict(waits)
    model = case.model()
    expected = model(**inputs_of(case, lambda given: given)).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **TOLERANCE)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, **TOLERANCE, msg=key)


TOKENS = 40
PADDED = torch.ones(2, TOKENS, dtype=torch.long)
PADDED[1, :7] = 0
PACKED = torch.cat((torch.arange(25), torch.arange(TOKENS - 25))).expand(2, -1).clone()


def llama() -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=60, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return hea.sparsify(LlamaForCausalLM(config), hea.patterns.Band(8, 0)).eval()


def family(name: str) -> Callable[[], torch.nn.Module]:
    return lambda: BY_NAME[name].model().eval()


# a model, what it is called with besides tokens, and how often that waits at most
PATHS = {
    "sparsified": (llama, {}, 0),
    "sparsified, padding": (llama, {"attention_mask": PADDED}, 1),
    "sparsified, packed": (llama, {"position_ids": PACKED, "use_cache": False}, 1),
    "no mask": (family("sparse-sliding-grouped"), {}, 0),
    "packed": (family("sparse-sliding-grouped"), {"position_ids": PACKED, "use_cache": False}, 1),
    "packed, padding": (family("sparse-longformer-causal"), {"position_ids": PACKED, "attention_mask": PADDED}, 1),
    "chosen globals": (
        family("sparse-longformer"),
        {"global_attention_mask": (PACKED == 3).long(), "attention_mask": PADDED},
        1,
    ),
    "packed spans": (family("span-adaptive"), {"position_ids": PACKED, "use_cache": False}, 1),
    "encoder and decoder": (
        family("seq2seq-led"),
        {"attention_mask": PADDED, "decoder_input_ids": PADDED + 5, "decoder_attention_mask": PADDED},
        1,
    ),
}


def waits_of_second_forward(path: str, is_inference: bool) -> Waits:
    build, options, _ = PATHS[path]
    model = move_model(build())
    ids = torch.randint(5, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with pretended_cuda() as waits, hea.use_backend("blocked"), torch.inference_mode(is_inference), torch.no_grad():
        for _ in range(2):
            # masks of their own, of which nothing is kept
            inputs = {
                name: on_cuda(given) if isinstance(given, Tensor) else given
                for name, given in {"input_ids": ids, **options}.items()
            }
            waits.clear()
            model(**inputs)
    return waits.of_package()


@pytest.mark.parametrize("path", PATHS)
def test_a_forward_seldom_waits(path: str) -> None:
    waits = waits_of_second_forward(path, is_inference=False)
    assert waits.total() <= PATHS[path][2], dict(waits)


@pytest.mark.parametrize(("path", "limit"), [("sparsified, padding", 1), ("packed, padding", 4)])
def test_no_layer_waits_in_inference_mode(path: str, limit: int) -> None:
    """Of inputs made in inference mode no copy can be kept: every check of them waits, but no layer does."""
    waits = waits_of_second_forward(path, is_inference=True)
    assert waits.total() <= limit, dict(waits)


@pytest.mark.parametrize("name", ["sparsified", "sparse-longformer-causal", "span-adaptive", "simplified-sas-span"])
def test_a_step_of_generation_waits_once(name: str) -> None:
    model = move_model(llama() if name == "sparsified" else family(name)())
    ids = torch.randint(5, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    counted: list[Waits] = []
    with pretended_cuda() as waits, torch.no_grad():
        plain_forward = model.forward

        @functools.wraps(plain_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            waits.clear()
            output = plain_forward(*args, **kwargs)
            counted.append(waits.of_package())
            return output

        model.forward = forward
        model.generate(on_cuda(ids), attention_mask=on_cuda(PADDED), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [each.total() <= MAX_WAITS for each in counted] == [True] * 4, counted


def test_devices_do_not_mix() -> None:
    with pretended_cuda(), pytest.raises(RuntimeError, match="same device"):
        on_cuda(torch.ones(3)) + torch.ones(3)


def test_waits_are_counted() -> None:
    with pretended_cuda() as waits:
        bool(on_cuda(torch.ones(3)).any())
        on_cuda(torch.ones(3)).cpu()
    assert waits.total() == 2
