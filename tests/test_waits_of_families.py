"""How often every family waits for its device when lengths are known from earlier calls: once a call, in no layer.

A wait is whatever stops the host until the device has computed: a number or a size that it needs, and every copy.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import seq2seq_cases
import torch
from device_waits import Waits
from families import BY_NAME, CASES, SEQ2SEQ_CASES
from models_cases import case_param, head_inputs, random_ids, switch_off_dropout
from pretended_cuda import move_model, on_cuda, pretended_cuda
from sparsified_cases import SPARSIFIED
from transformers import LlamaConfig, LlamaForCausalLM

import hf_efficient_attn as hea
from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT

DOCUMENTS = (14, 10)
TOKENS = sum(DOCUMENTS)
LAYERS = 2
# for all masks, positions and learned spans of a call together
MAX_WAITS = 1
# by case, how often a call waits besides: BART makes the masks of its two stacks, and between them, one after the other
IN_CALL = {"bart": 2}
# ... and each of its layers. Dynamic spans say how many keys a layer computes.
DYNAMIC = dict.fromkeys(("span-dynamic", "span-modern-dynamic", "simplified-sas_p-span"), 1)
# a new token is read with the blocks that were drawn so far
IN_DECODING = {**DYNAMIC, "sparse-bigbird-causal": 1}
# whose mechanisms read each packed document as a row of its own, of tokens whose places are a copy
OF_TEXTS = ("compressed",)
# by how they tell documents apart: all others do as one of these
PACKED = ("sparse-longformer", "span-modern", "reformer-causal", "star-paper", "bp-causal", "compressed-linear-causal")
# their layers choose keys, which one of the backends does not compute
OF_CONTENT = ("reformer", "routing")


def ways_to_train() -> Iterator[Any]:
    for case in (*CASES, *SEQ2SEQ_CASES, *SPARSIFIED.cases):
        is_thorough = not getattr(case, "shows_a_route", True)
        yield case_param(case, "padded", name=f"{case.name}-padded", is_thorough=is_thorough)
        # encoder-decoders refuse packed documents, and models of transformers take them without a cache alone
        if case in CASES:
            yield case_param(case, "packed", name=f"{case.name}-packed", is_thorough=case.name not in PACKED)


def is_seq2seq(case: Any) -> bool:
    return case.main_head == "AutoModelForSeq2SeqLM"


def backend_of(case: Any) -> str:
    return "auto" if case.name.startswith(OF_CONTENT) else "blocked"


def inputs_of(case: Any, way: str) -> dict[str, Any]:
    """Return inputs on the device, of which nothing is known to the host."""
    if is_seq2seq(case):
        inputs = seq2seq_cases.head_inputs(case.main_head)
    else:
        inputs = head_inputs(case.main_head, rows=2, tokens=TOKENS)
    if way == "packed":
        del inputs["attention_mask"]
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1)
    return {name: on_cuda(each) for name, each in inputs.items()}


def llama(pattern: hea.patterns.Pattern) -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return hea.sparsify(LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **sizes)), pattern)


def waits_of_training(model: torch.nn.Module, backend: str, *of_steps: dict[str, Any]) -> tuple[Waits, Waits]:
    """Return how often the forward and the backward pass of the last step waited."""
    switch_off_dropout(model.train())
    with pretended_cuda() as waits, hea.use_backend(backend):
        move_model(model)
        for inputs in of_steps:
            waits.clear()
            loss = model(**inputs).loss
            forward = waits.of_package()
            waits.clear()
            loss.backward()
    return forward, waits.of_package()


@pytest.mark.parametrize(("case", "way"), [*ways_to_train()])
def test_a_step_of_training_waits_once(case: Any, way: str) -> None:
    forward, backward = waits_of_training(case.model(), backend_of(case), *(inputs_of(case, way) for _ in range(2)))
    once = MAX_WAITS + IN_CALL.get(case.name, 0) + (way == "packed" and case.name.startswith(OF_TEXTS))
    assert forward.total() <= once + LAYERS * DYNAMIC.get(case.name, 0), dict(forward)
    assert backward.total() == 0, dict(backward)


def test_chosen_blocks_wait_once_a_layer_for_the_number_of_their_tiles() -> None:
    """Forward alone: the backward pass has the same tiles."""
    inputs = [{"input_ids": on_cuda(random_ids(2, TOKENS)), "labels": on_cuda(random_ids(2, TOKENS))} for _ in range(2)]
    forward, backward = waits_of_training(llama(hea.patterns.BlockTopK(4, 2)), "gathered", *inputs)
    assert (forward.total(), backward.total()) == (LAYERS, 0), (forward, backward)


def test_documents_of_new_lengths_cost_a_copy_each() -> None:
    """Whatever the number of layers and of masks in a layout."""
    ids = random_ids(1, TOKENS)
    steps = [
        {
            "input_ids": on_cuda(ids),
            "labels": on_cuda(ids),
            "position_ids": on_cuda(torch.cat([torch.arange(length) for length in lengths])[None]),
            "use_cache": False,
        }
        for lengths in (DOCUMENTS, (7, 17))
    ]
    pattern = hea.patterns.Band(5, 0) | hea.patterns.Dilated(12, 0, 3) | hea.patterns.GlobalTokens([0])
    forward, backward = waits_of_training(llama(pattern & hea.patterns.Causal()), "blocked", *steps)
    assert (forward.total(), backward.total()) == (MAX_WAITS + len(DOCUMENTS), 0), (forward, backward)


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_numbers_of_sentences_come_with_the_masks(backend: str) -> None:
    """Of those that a target token, and a source token, belong to."""
    case, steps = BY_NAME["bp-seq2seq"], []
    for _ in range(2):
        inputs = seq2seq_cases.head_inputs(case.main_head)
        for name, numbered in (("sentence_ids", "input_ids"), ("decoder_sentence_ids", "labels")):
            inputs[name] = torch.arange(inputs[numbered].shape[1]).expand(len(inputs[numbered]), -1) // 4
        steps.append({name: on_cuda(each) for name, each in inputs.items()})
    forward, backward = waits_of_training(case.model(), backend, *steps)
    assert (forward.total(), backward.total()) == (MAX_WAITS, 0), (forward, backward)


def decoders() -> Iterator[Any]:
    for case in (*(case for case in CASES if case.is_causal), SPARSIFIED.cases[0]):
        yield case_param(case, name=case.name, is_thorough=not getattr(case, "shows_a_route", True))


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
    assert found.total() <= MAX_WAITS + LAYERS * IN_DECODING.get(case.name, 0), dict(found)
