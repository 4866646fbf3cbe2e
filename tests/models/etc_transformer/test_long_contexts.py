"""Long tokens that read those of their own context alone, against the formula and in every way of computing it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.etc_transformer.dense_etc import Text, chunked, dense_etc
from models.etc_transformer.tiny_models import build, random_ids
from models.shared_checks import check_compiled_training, check_exported
from models_cases import trainer_arguments
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import BlockLocal, Dilated, PerHead

# of unlike lengths, the longest beyond the band of 3; the last has the number of the first, and is another one
CONTEXTS = [4] * 5 + [0] + [1] * 3 + [4] * 2
SIZE, NUM_GLOBAL = len(CONTEXTS), 3
FORMS: dict[str, dict[str, Any]] = {
    "band": {},
    "one set of maps, hard masks": {
        "share_qkv_projections": True,
        "hard_global_to_long": True,
        "hard_long_to_global": True,
    },
    "wide band": {"local_radius": 30, "max_relative_distance": 3, "relative_vocab_size": 10},
    "no labels": {"relative_vocab_size": None},
    "blocks and gaps": {"attention_pattern": PerHead([BlockLocal(2), Dilated(4, 4, 2)])},
}


def given(text: Text) -> dict[str, torch.Tensor]:
    """Return the inputs of one text."""
    links = torch.full((1, len(text.ids), 2), -1)
    for token, numbers in enumerate(text.links):
        for level, number in enumerate(sorted(numbers)):
            links[0, token, level] = number
    return {
        "input_ids": torch.tensor([text.ids]),
        "global_input_ids": torch.tensor([text.global_ids]),
        "long_to_global": links,
        "long_contexts": torch.tensor([text.long_contexts]),
    }


def text_of(seed: int) -> Text:
    torch.manual_seed(seed)
    links = [{int(number) for number in torch.randint(NUM_GLOBAL, (2,))} for _ in range(SIZE)]
    ids, global_ids = (random_ids(1, size)[0].tolist() for size in (SIZE, NUM_GLOBAL))
    return Text(ids, global_ids, links, long_contexts=CONTEXTS)


def gradients(model: Any, states: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(states[0].sin().sum() + states[1].cos().sum(), tuple(model.parameters()))


@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_formula(form: str) -> None:
    model, text = build(num_hidden_layers=2, num_attention_heads=2, **FORMS[form]).double(), text_of(0)
    out = model.train()(**given(text))
    found, expected = (out.last_hidden_state[0], out.global_hidden_state[0]), dense_etc(model, text)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(gradients(model, found), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)
    without = dense_etc(model, Text(text.ids, text.global_ids, text.links))
    assert not torch.allclose(without[0], expected[0])


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_padding_is_of_no_context(side: str, chunks: bool) -> None:
    """Whatever its number is: a masked token within a context does not divide it."""
    model, text = build(num_hidden_layers=2, num_attention_heads=2).double(), text_of(1)
    if chunks:
        text = Text(text.ids, *(getattr(chunked(text.ids, model.config), name) for name in ("global_ids", "links")))
        text.long_contexts = CONTEXTS
    inputs = given(text)
    if chunks:
        del inputs["global_input_ids"], inputs["long_to_global"]
    # two tokens: before all, behind all, or after the second token
    at = {"left": 0, "right": SIZE, "hole": 2}[side]
    for name, filling in (("input_ids", 7), ("long_to_global", 0), ("long_contexts", 9)):
        if name in inputs:
            whole = inputs[name]
            inputs[name] = torch.cat(
                (whole[:, :at], whole.new_full((1, 2, *whole.shape[2:]), filling), whole[:, at:]), 1
            )
    mask = torch.ones(1, SIZE + 2, dtype=torch.long)
    mask[:, at : at + 2] = 0
    with torch.no_grad():
        out, expected = model(**inputs, attention_mask=mask), dense_etc(model, text)
    if side != "hole":
        torch.testing.assert_close(out.last_hidden_state[mask.bool()], expected[0])
        torch.testing.assert_close(out.global_hidden_state[0][: len(text.global_ids)], expected[1])
        return
    # distances are counted over the hole, but its number says nothing
    inputs["long_contexts"][:, at : at + 2] = CONTEXTS[0]
    with torch.no_grad():
        assert torch.equal(model(**inputs, attention_mask=mask).last_hidden_state, out.last_hidden_state)


def batch(rows: int = 2, tokens: int = 21) -> dict[str, torch.Tensor]:
    """Return rows of unlike contexts, of which the first is padded."""
    ids, mask = random_ids(rows, tokens), torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :3] = 0
    contexts = torch.stack([torch.arange(tokens) // (4 + row) for row in range(rows)])
    return {"input_ids": ids, "attention_mask": mask, "long_contexts": contexts}


def test_every_implementation_computes_the_same() -> None:
    inputs, found = batch(), {}
    for name in ("efficient", "sdpa", "eager"):
        model = build(num_hidden_layers=1).double()
        model.set_attn_implementation(name)
        out = model(**inputs)
        states = (out.last_hidden_state[inputs["attention_mask"].bool()], out.global_hidden_state)
        found[name] = (states, gradients(model, states))
    torch.testing.assert_close(found["sdpa"], found["efficient"])
    torch.testing.assert_close(found["eager"], found["efficient"])


@pytest.mark.thorough
def test_compiles_without_graph_breaks_and_trains() -> None:
    inputs = {**batch(), "labels": random_ids(2, 21)}
    check_compiled_training(build("AutoModelForMaskedLM", num_hidden_layers=1), inputs)


def test_exports_with_any_batch_and_length() -> None:
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}

    def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
        return {**batch(rows, tokens), "labels": random_ids(rows, tokens)}

    model = build("AutoModelForMaskedLM", num_hidden_layers=1)
    check_exported(model, inputs, dict.fromkeys(inputs(1, 5), dims), [(3, 12), (2, 31), (1, 9)])


def test_packed_documents_have_contexts_too() -> None:
    """Each document of a row alone, with its own contexts."""
    model, ids = build(num_hidden_layers=2).double(), random_ids(1, 15)
    positions = torch.tensor([[*range(9), *range(6)]])
    # a context that goes on in the second document is another one there
    contexts = torch.tensor([[0] * 4 + [1] * 8 + [2] * 3])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, long_contexts=contexts).last_hidden_state
        alone = [model(ids[:, part], long_contexts=contexts[:, part]) for part in (slice(0, 9), slice(9, 15))]
    torch.testing.assert_close(packed, torch.cat([each.last_hidden_state for each in alone], 1))


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.long), "long_contexts"),
        (torch.zeros(2, 6), "long_contexts"),
        (np.zeros((2, 6), dtype=int), "long_contexts"),
    ],
)
def test_what_is_no_number_of_each_token(contexts: Any, message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        build()(random_ids(2, 6), long_contexts=contexts)


@pytest.mark.parametrize("side", ["left", "right"])
def test_contexts_of_texts(side: str) -> None:
    """w2 and the end are in no part; the question is a context of its own."""
    tokenizer = word_tokenizer(61, writes_end=True)
    tokenizer.padding_side = side
    text = "w1 w2\n\nw3 w4 w5"
    parts = [(0, 2), (7, 9), [(10, 12), (0, 2)]]
    given: dict[str, Any] = {"parts": [parts, [(0, 2)]], "contexts": [[6, 5, 9], [1]]}
    found = hea.structured_inputs(tokenizer, [("w9 w8", text), ("w9", "w7")], **given)
    real = found["attention_mask"].bool()
    assert [row[own].tolist() for row, own in zip(found["long_contexts"], real, strict=True)] == [
        [0, 0, 1, 1, 2, 2, 2, 2],
        [0, 1, 1],
    ]
    alone = hea.structured_inputs(tokenizer, [text], parts=given["parts"][:1], contexts=given["contexts"][:1])
    assert alone["long_contexts"].tolist() == [[0, 0, 1, 1, 1, 1]]
    # tokens before all parts are of the first context, not of the question
    late = hea.structured_inputs(tokenizer, [("w9", "w1 w2 w3")], parts=[[(3, 5), (6, 8)]], contexts=[[0, 1]])
    assert late["long_contexts"].tolist() == [[0, 1, 1, 2, 2]]
    assert "long_contexts" not in hea.structured_inputs(tokenizer, [text])


def test_candidates_are_of_the_context_where_they_are_listed() -> None:
    """WikiHop: candidates, then a text that mentions the first."""
    text = "w4 w5\n\nw7 w4 w8"
    parts = [[(0, 2), (10, 12)], [(3, 5)], (7, 15)]
    options: dict[str, Any] = {"parts": [parts], "candidates": [[0, 1]], "contexts": [[0, 1, 2]]}
    found = hea.structured_inputs(word_tokenizer(61), [("w1 w2", text)], **options)
    assert found["long_contexts"].tolist() == [[0, 0, 1, 2, 3, 3, 3]]
    with pytest.raises(hea.InputError, match="The character at 10 of a text is in parts of contexts 2 and 0"):
        hea.structured_inputs(
            word_tokenizer(61), [("w1 w2", text)], parts=[[(7, 15), (10, 12), (3, 5)]], contexts=[[2, 0, 1]]
        )


def test_the_collator_takes_contexts(tmp_path: Path) -> None:
    items = [{"text": "w1 w2 w3 w4", "parts": [(0, 5), (6, 11), [(3, 5), (6, 8)]], "contexts": [0, 1, 2]}] * 4
    collate = hea.SentenceMaskingCollator(word_tokenizer(61), cpc_share=0.5)
    inputs = collate(items)
    assert inputs["long_contexts"].tolist() == [[0, 0, 1, 1]] * 4
    assert inputs["global_contexts"].tolist() == [[0, 1, 2]] * 4
    with pytest.raises(hea.InputError, match="Some items of a batch have contexts, and others do not"):
        collate([items[0], {"text": "w1", "parts": [(0, 2)]}])
    args = trainer_arguments(tmp_path, max_steps=1, remove_unused_columns=False)
    model = build("AutoModelForMaskedLM", cpc_loss_weight=0.25, num_hidden_layers=1)
    running = transformers.Trainer(model, args, train_dataset=items, data_collator=collate)
    assert running.train().training_loss > 0
