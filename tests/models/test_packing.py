"""Packed documents of every family beyond `position_ids`: flash attention's arguments, caches, and Ulysses."""

from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME, CASES, SEQ2SEQ_CASES
from models_cases import TOLERANCE, Case, case_param, first_tensor, random_ids
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.masks import Probe
from hf_efficient_attn.integration.packing import _mixing

ROUTES, SEQ2SEQ_ROUTES = (
    [case_param(case, is_thorough=not case.shows_a_route) for case in cases] for cases in (CASES, SEQ2SEQ_CASES)
)
routes = pytest.mark.parametrize("case", ROUTES)
CAUSAL = [case for case in CASES if case.is_causal]
LENGTHS = (5, 1, 9)
ENDS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
NUMBERS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize(
    ("case", "cache"),
    [(CAUSAL[0], "dynamic"), *((case, "static") for case in CAUSAL if case.shows_a_route)],
    ids=lambda each: getattr(each, "name", each),
)
@torch.no_grad()
def test_generate_tells_the_documents_of_a_prompt_apart_and_warns_of_later_tokens(case: Case, cache: str) -> None:
    _mixing.clear()
    model, ids = case.model(), random_ids(1, 15)
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "cache_implementation": cache, "output_logits": True}
    with pytest.warns(UserWarning, match="documents attend to each other"):
        packed = model.generate(ids, position_ids=POSITIONS, return_dict_in_generate=True, **options)
    alone = model(ids[:, -LENGTHS[-1] :]).logits[:, -1]
    torch.testing.assert_close(packed.logits[0], alone, atol=TOLERANCE, rtol=TOLERANCE)


@routes
@torch.no_grad()
def test_arguments_of_flash_attention_tell_documents_apart(case: Case) -> None:
    model, ids = case.model("AutoModel"), random_ids(1, 15)
    alone = torch.cat([first_tensor(model(part)) for part in ids.split(LENGTHS, 1)], 1)
    for arguments in ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 9}, {"seq_idx": NUMBERS}):
        for positions in (None, POSITIONS):
            packed = first_tensor(model(ids, position_ids=positions, **arguments))
            torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(hea.InputError, match="do not restart"):
        model(ids, position_ids=torch.arange(15)[None], cu_seq_lens_q=ENDS)


@pytest.mark.parametrize("name", ["sparse-sliding-grouped", "reformer-causal"])
@torch.no_grad()
def test_compiled_models_tell_documents_apart(name: str) -> None:
    """Of bands and of chosen keys: other documents in another call of the same graph, too."""
    case = BY_NAME[name]
    model, ids = case.model("AutoModel", **case.fewest_layers), random_ids(1, 15)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for lengths in (LENGTHS, (4, 9, 2)):
        numbers = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
        alone = torch.cat([first_tensor(model(part)) for part in ids.split(lengths, 1)], 1)
        packed = first_tensor(compiled(ids, seq_idx=numbers, use_cache=False))
        torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_documents_that_are_known_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask function: only those of transformers' own models must be asked."""
    monkeypatch.delattr(Probe, "allowed")
    case = BY_NAME["sparse-sliding-grouped"]
    case.model("AutoModel")(random_ids(1, 15), position_ids=POSITIONS)


@pytest.mark.parametrize("case", [case for case in CAUSAL if case.shows_a_route], ids=lambda case: case.name)
@torch.no_grad()
def test_documents_behind_cached_tokens_are_warned_of_and_padding_is_not(case: Case) -> None:
    model, ids = case.model(), random_ids(2, 15)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    positions = torch.tensor([[4, 5, 6, 0, 1, 2]])
    with pytest.warns(UserWarning, match="position_ids restart"):
        model(ids[:, 4:10], position_ids=positions, **{CACHE_ARGUMENT: cache})
    with pytest.raises(hea.InputError, match="cached tokens"):
        model(ids[:, 10:], **{CACHE_ARGUMENT: cache}, seq_idx=NUMBERS[:, :5])
    model = case.model()
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    cache = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
    positions = torch.tensor([[1, 1, 0, 1, 2], [4, 5, 6, 7, 8]])
    model(ids[:, 4:9], attention_mask=mask[:, :9], position_ids=positions, **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize("case", [*ROUTES, *SEQ2SEQ_ROUTES])
def test_replaced_attention_functions_are_refused(case: Any) -> None:
    """Where the layers never call it, or add to it what it knows nothing of; of parts, by DeepSpeed's Ulysses."""
    model, inputs = case.model(), case.inputs()
    name = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = lambda *args, **kwargs: None
    try:
        with pytest.raises(hea.UnsupportedBackendError, match="Another library has replaced.*Ulysses"):
            model(**inputs)
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
    model(**inputs)


@pytest.mark.parametrize("arguments", [{"cu_seq_lens_q": ENDS}, {"seq_idx": NUMBERS}], ids=["ends", "numbers"])
def test_encoder_decoders_refuse_packing(arguments: dict[str, Any]) -> None:
    model = SEQ2SEQ_CASES[0].model()
    with pytest.raises(hea.InputError, match="documents cannot be packed"):
        model(random_ids(1, 15), decoder_input_ids=random_ids(1, 3), **arguments)


def test_segments_of_texts_have_no_documents() -> None:
    model = BY_NAME["span-adaptive"].model()
    with pytest.raises(hea.InputError, match="segment_index"):
        model(random_ids(1, 15), segment_index=torch.zeros(1, dtype=torch.long), seq_idx=NUMBERS)


def test_collator_with_flattening_needs_no_positions() -> None:
    model = BY_NAME["sparse-longformer-causal"].model()
    rows = [{"input_ids": row[: 3 + index]} for index, row in enumerate(random_ids(4, 9).tolist())]
    collate = transformers.DataCollatorWithFlattening
    losses = [
        model(**collate(return_flash_attn_kwargs=not positions, return_position_ids=positions)(rows)).loss
        for positions in (True, False)
    ]
    torch.testing.assert_close(*losses)
