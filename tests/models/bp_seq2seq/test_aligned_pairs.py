"""Sentences of a translation that are computed one by one: the pairs of a sentence, and no others."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models.bp_seq2seq.translation_by_nodes import MASKS, Masks, check_translation
from seq2seq_cases import random_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention import functional
from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.encoder_decoder import stacks

# the source comes back to sentence 3, which the target reads whole, twice; it has no 8, and nothing reads its 5
SENTENCES = ([3, 3, 3, 4, 4, 5, 5, 6, 6, 3, 3], [3, 3, 6, 6, 4, 4, 3, 8, 8])
# of a source and of its translation
LENGTHS, PADDED = ((16, 10, 40, 24), (20, 8, 50, 30)), ((10, 25), (30, 11))


def build(**fields: Any) -> Any:
    return BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM", **fields)


@pytest.mark.parametrize("masks", MASKS, ids=["whole", "padded"])
@pytest.mark.parametrize("backend", ["blocked", "sdpa", "reference"])
def test_states_and_gradients_are_those_of_the_specification(backend: str, masks: Masks) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModel").double()
    named = zip(("sentence_ids", "decoder_sentence_ids"), SENTENCES, strict=True)
    with hea.use_backend(backend):
        check_translation(model, masks, SENTENCES, **{name: torch.tensor([each]) for name, each in named})


def document(lengths: tuple[tuple[int, ...], ...], sizes: tuple[int, int], side: str) -> dict[str, Tensor]:
    """Return a row of sentences of so many tokens, with padding that has numbers of sentences, too."""
    found = {}
    names = ("input_ids", "attention_mask", "sentence_ids")
    for side_of, own, size in zip(("", "decoder_"), lengths, sizes, strict=True):
        ids, mask, numbers = (f"{side_of}{name}" for name in names)
        count = size - sum(own)
        row = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))
        found[ids] = random_ids(1, size, seed=size + count)
        for name, tokens, padding in ((mask, torch.ones_like(row), 0), (numbers, row, 1)):
            filled = torch.full((count,), padding)
            found[name] = torch.cat((filled, tokens) if side == "left" else (tokens, filled))[None]
    return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_documents_compute_no_other_pairs(side: str, monkeypatch: Any) -> None:
    """Two rows of unequal numbers of sentences, one of them padded, as the dense model in float64 has them."""
    sizes = (sum(LENGTHS[0]), sum(LENGTHS[1]))
    rows = [document(LENGTHS, sizes, side), document(PADDED, sizes, side)]
    inputs = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    real, found = inputs["decoder_attention_mask"].bool(), []
    model = build(max_target_position_embeddings=512, max_position_embeddings=512).double()
    # as if documents always paid
    monkeypatch.setattr(functional, "WORK_PER_DOCUMENT", 0)
    for backend in ("reference", "auto"):
        with hea.use_backend(backend):
            logits = model(**inputs, use_cache=False).logits[real]
        loss = (logits * torch.arange(logits.numel()).view_as(logits).sin()).sum()
        found.append((logits.detach(), *torch.autograd.grad(loss, [*model.model.decoder.layers.parameters()])))
        # what computes all pairs is not called
        monkeypatch.setattr(sdpa, "attend", None)
        monkeypatch.setattr(reference, "attend", None)
        monkeypatch.delattr(stacks, "dense_attention", raising=False)
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize(("of_target", "is_worth_it"), [([64] * 32, True), ([2048], False), ([1] * 2048, False)])
def test_many_short_sentences_are_not_worth_it(of_target: list[int], is_worth_it: bool) -> None:
    """Nor is a single one, which is all of the text."""
    numbers = torch.repeat_interleave(torch.arange(len(of_target)), torch.tensor(of_target))[None]
    tokens = TokenMask(segment_ids=numbers, query_segment_ids=numbers)
    states = torch.empty(1, 8, 2048, 64)
    assert functional.do_documents_pay(states, states, tokens) is is_worth_it


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": True}, {"cache_implementation": "static"}])
def test_generation_reads_sentences_one_by_one(options: dict[str, Any]) -> None:
    """As all pairs under a mask, without a cache."""
    model = build(eos_token_id=None)
    ids, numbers = random_ids(2, 11), torch.tensor([SENTENCES[0], [0] * 4 + [1] * 7])
    given: dict[str, Any] = {"sentence_ids": numbers, "max_new_tokens": 6, "do_sample": False}
    beams = {"num_beams": options.get("num_beams", 1)}
    model.config.sentence_end_token_id = int(model.generate(ids, **given)[0, 2])
    with hea.use_backend("blocked"):
        found = model.generate(ids, **given, **options)
    with hea.use_backend("reference"):
        expected = model.generate(ids, **given, **beams, use_cache=False)
    assert torch.equal(found, expected)
