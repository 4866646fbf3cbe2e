"""Backends and families on a pretended GPU: nothing mixes devices, and a call waits for the device once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import seq2seq_cases
import torch
from backends_cases import Case
from backends_contract import check
from families import CASES, SEQ2SEQ_CASES
from flash_standin import standin
from models_cases import TINY, case_param, head_inputs, random_ids, switch_off_dropout
from pretended_cuda import move_model, on_cuda, pretended_cuda, unwrap, wrap
from sparsified_cases import SPARSIFIED
from torch.utils._pytree import tree_map

import hf_efficient_attn as hea
from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.flash import backend as flash
from hf_efficient_attn.backends.flash import library
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.layout.score_terms import Distance, SoftSpan

CALLS = [
    Case("band", 90, "left"),
    Case("globals", 90, "documents", label=Distance(-3, 6)),
    Case("dilated", 90, "holes"),
    Case("random", 90, "globals"),
    Case("per head", 90, num_queries=40),
    Case("causal band", 90, "right", torch.bfloat16, label=SoftSpan(ramp=20, num_inner=5)),
]
# of every kind of choice one
CHOSEN = [Case("causal", 90, "left", choice=choice) for choice in ("tokens", "blocks", "groups", "order")]
FLASH_CALLS = [Case("scattered globals", 200), Case("band", 90, "two texts"), Case("band", 90, has_sinks=True)]
# of the others, one each with terms, with padding in low precision, and with chosen keys
PAIRS = [*((blocked, call) for call in CALLS), *((gathered, call) for call in CHOSEN)]
PAIRS += [(backend, call) for backend in (sdpa, reference) for call in (CALLS[1], CALLS[4], CHOSEN[1])]
DOCUMENTS = (14, 10)
TOKENS, LAYERS = sum(DOCUMENTS), TINY["num_hidden_layers"]
# BART makes the masks of its two stacks, and between them, one after the other
IN_CALL = {"bart": 2}
# dynamic spans say layer by layer how many keys are computed
IN_LAYERS = dict.fromkeys(("span-dynamic", "span-modern-dynamic", "simplified-sas_p-span"), 1)
# a new token is read with the blocks that were drawn so far
IN_DECODING = {**IN_LAYERS, "sparse-bigbird-causal": 1}
# by how they tell documents apart: all others do as one of these
PACKED = ("sparse-longformer", "span-modern", "reformer-causal", "star-paper", "bp-causal", "compressed-linear-causal")


@pytest.mark.parametrize(("backend", "call"), PAIRS, ids=lambda each: getattr(each, "NAME", str(each)))
def test_backends_stay_on_the_device(backend: ModuleType, call: Case) -> None:
    with pretended_cuda():
        check(call, backend, "cuda")


@pytest.mark.parametrize("call", [*FLASH_CALLS, *(replace(each, label=None) for each in CALLS)], ids=str)
def test_flash_stays_on_the_device(call: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are stand-ins, which alone look at the data."""

    def on_the_device(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: tree_map(wrap, function(*tree_map(unwrap, args), **tree_map(unwrap, options)))

    own = standin()
    functions = own._replace(**{name: on_the_device(getattr(own, name)) for name in ("forward", "backward", "combine")})
    monkeypatch.setattr(library, "library", lambda: functions)
    with pretended_cuda():
        if flash._refused_layout(call.call("cuda")) is None:
            check(call, flash, "cuda")


# of every family and direction
ROUTES = [case for case in (*CASES, *SEQ2SEQ_CASES) if case.shows_a_route]
FIRST = [*{(case.config_class, case.main_head): case for case in reversed(ROUTES)}.values()]


def ways_to_train() -> Iterator[Any]:
    for case in (*CASES, *SEQ2SEQ_CASES, *SPARSIFIED.cases):
        # masks, positions and spans are the same along the other routes of a family
        is_thorough = case not in FIRST and case not in SPARSIFIED.cases
        yield case_param(case, "padded", name=f"{case.name}-padded", is_thorough=is_thorough)
        # encoder-decoders refuse packed documents, and models of transformers take them without a cache alone
        if case in CASES:
            yield case_param(case, "packed", name=f"{case.name}-packed", is_thorough=case.name not in PACKED)


def inputs_of(case: Any, way: str) -> dict[str, Any]:
    """Return inputs on the device, of which nothing is known to the host."""
    if case.main_head == "AutoModelForSeq2SeqLM":
        inputs = seq2seq_cases.head_inputs(case.main_head)
    else:
        inputs = head_inputs(case.main_head, rows=2, tokens=TOKENS)
    if way == "packed":
        del inputs["attention_mask"]
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1)
    return {name: on_cuda(each) for name, each in inputs.items()}


@pytest.mark.parametrize(("case", "way"), [*ways_to_train()])
def test_a_step_of_training_waits_once(case: Any, way: str) -> None:
    """Where lengths are known from an earlier one: for all masks, positions and learned spans together."""
    model = case.model().train()
    switch_off_dropout(model)
    # layers that choose keys are not computed by every backend
    backend = "auto" if case.name.startswith(("reformer", "routing")) else "blocked"
    with pretended_cuda() as waits, hea.use_backend(backend):
        move_model(model)(**inputs_of(case, way))
        waits.clear()
        loss = model(**inputs_of(case, way)).loss
        forward = waits.of_package()
        waits.clear()
        loss.backward()
    # sums over a text read each packed document as a row of its own, of tokens whose places are a copy
    once = 1 + IN_CALL.get(case.name, 0) + (way == "packed" and case.name.startswith("compressed"))
    assert forward.total() <= once + LAYERS * IN_LAYERS.get(case.name, 0), dict(forward)
    assert waits.of_package().total() == 0, dict(waits)


def decoders() -> Iterator[Any]:
    for case in (*(case for case in CASES if case.is_causal), SPARSIFIED.cases[0]):
        yield case_param(case, name=case.name, is_thorough=case not in FIRST and case not in SPARSIFIED.cases)


@pytest.mark.parametrize("case", [*decoders()])
@torch.no_grad()
def test_a_token_of_generation_waits_once(case: Any) -> None:
    model, ids = move_model(case.model()), random_ids(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with pretended_cuda() as waits:
        cache = None
        for start, stop in ((0, 20), (20, 21), (21, 22)):
            waits.clear()
            options = {CACHE_ARGUMENT: cache, "use_cache": True, "attention_mask": on_cuda(mask[:, :stop])}
            cache = model(on_cuda(ids[:, start:stop]), **options).past_key_values
    found = waits.of_package()
    assert found.total() <= 1 + LAYERS * IN_DECODING.get(case.name, 0), dict(found)


def test_devices_do_not_mix_and_waits_are_counted() -> None:
    with pretended_cuda() as waits:
        with pytest.raises(RuntimeError, match="same device"):
            on_cuda(torch.ones(3)) + torch.ones(3)
        bool(on_cuda(torch.ones(3)).any())
        on_cuda(torch.ones(3)).cpu()
    assert waits.total() == 2
