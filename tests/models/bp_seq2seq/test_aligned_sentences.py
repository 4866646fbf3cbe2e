"""Translation of documents whose sentences are aligned: a target token reads its own sentence of the source alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME
from models.bp_seq2seq.translation_by_nodes import MASKS, Masks, check_translation
from models.shared_checks import check_compiled_training
from models_cases import switch_off_dropout
from seq2seq_cases import TINY, random_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

START, END, NEW_TOKENS = TINY["decoder_start_token_id"], 7, 6
SENTENCES = [3] * 4 + [5] * 2 + [4] * 5
# the second sentence of the source comes last
OF_TARGET = [3] * 3 + [4] * 4 + [5] * 2


def build(**fields: Any) -> Any:
    return BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM", **fields)


def sentences(rows: int = 1) -> dict[str, Tensor]:
    named = {"sentence_ids": SENTENCES, "decoder_sentence_ids": OF_TARGET}
    return {name: torch.tensor([numbers] * rows) for name, numbers in named.items()}


@pytest.mark.parametrize("masks", MASKS, ids=["whole", "padded"])
def test_states_and_gradients_are_those_of_the_specification(masks: Masks) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModel").double()
    check_translation(model, masks, (SENTENCES, OF_TARGET), **sentences())


def test_one_sentence_is_the_whole_source() -> None:
    model, ids, target = build(), random_ids(2, 11), random_ids(2, 9)
    one = {name: torch.full_like(each, 4) for name, each in sentences(2).items()}
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, decoder_input_ids=target, **one).logits, model(ids, decoder_input_ids=target).logits
        )


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_a_sentence_that_the_source_has_not_reads_nothing_across() -> None:
    model, inputs = build(), sentences()
    inputs["decoder_sentence_ids"][0, 5:] = 9
    out = model(random_ids(1, 11), decoder_input_ids=random_ids(1, 9), output_attentions=True, **inputs)
    allowed = inputs["decoder_sentence_ids"][0][:, None] == inputs["sentence_ids"][0]
    for weights in out.cross_attentions:
        assert ((weights[0] > 0) == allowed).all()
        torch.testing.assert_close(weights[0].sum(-1), allowed.any(-1).float().expand(weights.shape[1], -1))
    out.logits.sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("steps", [(5, 1, 1, 1, 1), (1, 4, 4)])
def test_steps_with_a_cache_compute_what_the_whole_target_does(steps: tuple[int, ...]) -> None:
    model, ids, target, given = build().double(), random_ids(2, 11), random_ids(2, 9), sentences(2)
    with torch.no_grad():
        expected, cache, found = model(ids, decoder_input_ids=target, **given).logits, None, []
        for new, of_new in zip(target.split(steps, 1), given["decoder_sentence_ids"].split(steps, 1), strict=True):
            options = {CACHE_ARGUMENT: cache, "use_cache": True, "sentence_ids": given["sentence_ids"]}
            out = model(ids, decoder_input_ids=new, decoder_sentence_ids=of_new, **options)
            cache = out[CACHE_ARGUMENT]
            found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected)


def by_hand(model: Any, ids: Tensor, numbers: Tensor, prompt: list[int], of_prompt: list[int]) -> list[int]:
    """Return the greedy translation of one text without a cache, each token's sentence counted."""
    written, of_written = list(prompt), list(of_prompt)
    for _ in range(NEW_TOKENS):
        given = {"decoder_input_ids": torch.tensor([written]), "decoder_sentence_ids": torch.tensor([of_written])}
        with torch.no_grad():
            logits = model(ids, sentence_ids=numbers, use_cache=False, **given).logits
        written.append(int(logits[0, -1].argmax()))
        of_written.append(of_written[-1] + (written[-1] == model.config.sentence_end_token_id))
    return written


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("given", [False, True])
def test_generation_goes_on_to_the_next_sentence(given: bool, cache: str | None) -> None:
    """Prompts padded on either side; without numbers of theirs, they begin with the first sentence of the source."""
    model, ids, mask = build(eos_token_id=None), random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :2] = 0
    numbers = torch.tensor([[9] * 2 + [1] * 3 + [2] * 3 + [3] * 3, [0] * 4 + [1] * 4 + [2] * 3])
    prompts = torch.tensor([[START, 0, 0, 5, 6], [START, 8, 9, 0, 0]])
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": mask}
    options |= {"sentence_ids": numbers, "use_cache": cache is not None, "decoder_input_ids": prompts}
    options |= {"decoder_attention_mask": (prompts > 0).long()} | ({"cache_implementation": cache} if cache else {})
    if given:
        options["decoder_sentence_ids"] = torch.tensor([[2, 9, 9, 2, 3], [0, 1, 1, 9, 9]])
    before = model.generate(ids, **options)
    # what the second row writes first ends a sentence, and so does the end of its prompt
    model.config.sentence_end_token_id = end = int(before[1, 5])
    if not given:
        prompts[1, 2] = end
    found = model.generate(ids, **options)
    for row, prompt in enumerate(([START, 5, 6], [START, 8, int(prompts[1, 2])])):
        own = [[2, 2, 3], [0, 1, 1]][row] if given else [[1, 1, 1], [0, 0, 1]][row]
        kept = mask[row].bool()
        assert found[row, 2:].tolist() == by_hand(
            model, ids[row : row + 1, kept], numbers[row : row + 1, kept], prompt, own
        )
    assert given is False or not torch.equal(found, before)


def test_beams_and_a_prompt_without_a_start_token() -> None:
    """Whose beams all have the numbers of their prompt; the start token has that of the first."""
    model = build(eos_token_id=None, sentence_end_token_id=END)
    ids, numbers = random_ids(2, 11), torch.tensor([SENTENCES] * 2)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "sentence_ids": numbers}
    prompt, of_prompt = torch.tensor([[5, 6]] * 2), torch.tensor([[3, 4]] * 2)
    found = model.generate(ids, decoder_input_ids=prompt, decoder_sentence_ids=of_prompt, **options)
    whole = torch.cat((torch.full((2, 1), START), prompt), 1)
    of_whole = torch.tensor([[3, 3, 4]] * 2)
    assert torch.equal(
        found, model.generate(ids, decoder_input_ids=whole, decoder_sentence_ids=of_whole, use_cache=False, **options)
    )
    assert found.shape == (2, 8)


@pytest.mark.parametrize("of_padding", [0, -1, 7])
def test_a_start_token_has_the_number_of_the_first_token_of_a_padded_prompt(of_padding: int) -> None:
    """Not that of the padding before it."""
    model, ids = build(eos_token_id=None), random_ids(2, 11)
    numbers = torch.tensor([SENTENCES] * 2)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    prompt = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    padded = model.generate(
        ids,
        sentence_ids=numbers,
        decoder_input_ids=prompt,
        decoder_sentence_ids=torch.tensor([[1, 1, 1, 2], [of_padding, of_padding, 3, 3]]),
        decoder_attention_mask=(prompt != 0).long(),
        **options,
    )
    alone = model.generate(
        ids[1:],
        sentence_ids=numbers[1:],
        decoder_input_ids=prompt[1:, 2:],
        decoder_sentence_ids=torch.tensor([[3, 3]]),
        **options,
    )
    for found, expected in zip(padded.logits, alone.logits, strict=True):
        torch.testing.assert_close(found[1], expected[0], atol=1e-5, rtol=1e-5)


def test_compiles_and_is_near_to_float32_under_autocast() -> None:
    inputs = {"input_ids": random_ids(2, 11), "labels": random_ids(2, 9), **sentences(2)}
    model = build().train()
    switch_off_dropout(model)
    check_compiled_training(model, {**inputs, "use_cache": False})
    model = build()
    with torch.no_grad():
        expected = model(**inputs).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(**inputs).logits
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.1)


def test_trainer_passes_the_numbers_on(tmp_path: Path) -> None:
    item = {"input_ids": random_ids(1, 11)[0], "labels": random_ids(1, 9)[0]}
    item |= {name: each[0] for name, each in sentences().items()}
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    model, seen = build(), []
    model.model.decoder.register_forward_pre_hook(lambda module, args, named: seen.append(named), with_kwargs=True)
    transformers.Trainer(model, args, train_dataset=[item] * 2).train()
    assert {name: each[0].tolist() for name, each in seen[0].items() if "sentence" in name} == {
        "sentence_ids": SENTENCES,
        "decoder_sentence_ids": OF_TARGET,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sentence_ids": torch.zeros(2, 11).long()}, "sentence_ids is given without decoder_sentence_ids"),
        ({"decoder_sentence_ids": torch.zeros(2, 9).long()}, "decoder_sentence_ids is given without sentence_ids"),
        ({"sentence_ids": torch.zeros(2, 11)}, "sentence_ids is of torch.float32; it must hold the numbers"),
        ({"sentence_ids": [[0] * 11] * 2}, r"sentence_ids is of type list; pass a tensor, as torch.as_tensor\(sent"),
        ({"sentence_ids": torch.zeros(2, 9).long()}, r"sentence_ids has shape \[2, 9\]; .* source tokens\] = "),
        ({"decoder_sentence_ids": torch.zeros(9).long()}, r"has shape \[9\]; .* new target tokens\] = \[2, 9\]"),
    ],
)
def test_what_is_no_number_of_each_token(given: dict[str, Any], message: str) -> None:
    alone = "without" in message
    with pytest.raises(hea.InputError, match=message):
        build()(random_ids(2, 11), labels=random_ids(2, 9), **{**({} if alone else sentences(2)), **given})


def test_what_generate_refuses() -> None:
    model, ids, numbers = build(), random_ids(2, 11), torch.tensor([SENTENCES] * 2)
    options: dict[str, Any] = {"max_new_tokens": 2, "sentence_ids": numbers}
    with pytest.raises(hea.InputError, match="decoder_sentence_ids"):
        model.generate(ids, decoder_sentence_ids=numbers[:, :3], **options)
    with pytest.raises(hea.InputError, match="sentence_ids"):
        model.generate(ids, **{**options, "sentence_ids": numbers.float()})
    with pytest.raises(hea.InputError, match="sentence_ids"):
        model.generate(ids, **{**options, "sentence_ids": numbers.flatten()})
    with pytest.raises(hea.InputError, match="decoder_sentence_ids"):
        model.generate(ids, decoder_sentence_ids=numbers[:, :1], max_new_tokens=2)


def test_generate_goes_on_to_the_next_number_alone() -> None:
    model = build(sentence_end_token_id=END)
    ids, numbers = random_ids(1, 6), torch.tensor([[0, 0, 10, 10, 20, 20]])
    with pytest.raises(hea.InputError, match="row 0 are 3 numbers from 0 to 20.*number sentences one by one"):
        model.generate(ids, sentence_ids=numbers, max_new_tokens=2)
    # padding has no number
    padded = torch.tensor([[-9, -9, 3, 3, 4, 4]])
    model.generate(ids, attention_mask=(padded > 0).long(), sentence_ids=padded, max_new_tokens=2)
