"""Batches of documents with aligned sentences, and `Seq2SeqTrainer` that trains, evaluates and generates with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import BY_NAME
from seq2seq_cases import random_ids
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

END = 7


def item(source: list[int], target: list[int], kind: Any = list) -> dict[str, Any]:
    """Return a document of sentences of so many tokens, and its translation."""
    found: dict[str, Any] = {}
    for ids, numbers, lengths in (("input_ids", "sentence_ids", source), ("labels", "decoder_sentence_ids", target)):
        found[ids] = kind(random_ids(1, sum(lengths), seed=sum(lengths))[0].tolist())
        found[numbers] = kind([number for number, length in enumerate(lengths) for _ in range(length)])
    return found


def tokenizer(side: str) -> Any:
    found = word_tokenizer(61)
    found.padding_side = side
    return found


# of labels in arrays, by transformers
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_are_padded_with_their_tokens(side: str, kind: Any) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM")
    items = [item([2, 3], [1, 3], kind), item([1, 2, 1], [2], kind)]
    collator = hea.AlignedSentencesCollator(tokenizer(side), model=model, pad_to_multiple_of=3)
    batch = collator(items)
    assert batch["sentence_ids"].shape == (2, 6)
    assert batch["decoder_sentence_ids"].shape == (2, 6)
    for row, own in enumerate(items):
        for name, is_token in (
            ("sentence_ids", batch["attention_mask"][row] == 1),
            ("decoder_sentence_ids", batch["labels"][row] != -100),
        ):
            assert batch[name][row][is_token].tolist() == list(own[name])
            assert (batch[name][row][~is_token] == -1).all()
    without = {"sentence_ids", "decoder_sentence_ids"}
    plain = [{name: each for name, each in own.items() if name not in without} for own in items]
    padded = {
        each: transformers.DataCollatorForSeq2Seq(tokenizer(each), model=model, pad_to_multiple_of=3)(plain)
        for each in ("right", side)
    }
    # a decoder would read padding before its labels
    expected = {**padded[side], **{name: padded["right"][name] for name in ("labels", "decoder_input_ids")}}
    assert batch.keys() - without == expected.keys() == collator(plain).keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_sources_without_labels_have_the_numbers_of_their_own() -> None:
    items = [item([2, 3], [1]), item([1, 2], [1])]
    batch = hea.AlignedSentencesCollator(tokenizer("left"))(
        [{name: own[name] for name in ("input_ids", "sentence_ids")} for own in items]
    )
    assert "decoder_sentence_ids" not in batch
    assert batch["sentence_ids"].tolist() == [[0, 0, 1, 1, 1], [-1, -1, 0, 1, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    """The logits of a document beside a longer one are those that it has alone."""
    model = BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM")
    items = [item([2, 3], [1, 3]), item([4, 2, 3], [2, 4])]
    collator = hea.AlignedSentencesCollator(tokenizer(side))
    with torch.no_grad():
        logits = model(**collator(items)).logits
        for row, own in enumerate(items):
            alone = model(**collator([own])).logits[0]
            torch.testing.assert_close(logits[row, : len(alone)], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_model", [True, False])
def test_trainer_trains_evaluates_and_generates(has_model: bool, tmp_path: Path) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM", sentence_end_token_id=END)
    items = [item([2, 3], [1, 3]), item([1, 2, 1], [2]), item([4], [1, 1, 1, 2]), item([2, 2], [2, 3])]
    # the first sentence of a source need not be its 0th
    items[3]["sentence_ids"] = [5, 5, 6, 6]
    items[3]["decoder_sentence_ids"] = [5, 5, 6, 6, 6]
    written = []

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        written.append(prediction.predictions)
        return {"tokens": float((prediction.predictions > 2).sum())}

    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        predict_with_generate=True,
        generation_max_length=8,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    collator = hea.AlignedSentencesCollator(tokenizer("right"), model=model if has_model else None)
    trainer = transformers.Seq2SeqTrainer(
        model, args, train_dataset=items, eval_dataset=items, data_collator=collator, compute_metrics=metrics
    )
    assert np.isfinite(trainer.train().training_loss)
    measured = trainer.evaluate()
    model.eval()
    # generation knows the sentences of the sources alone
    batch = collator(items)
    named = {name: batch[name] for name in ("input_ids", "attention_mask", "sentence_ids")}
    expected = model.generate(**named, max_length=8, do_sample=False)
    assert np.array_equal(written[0][:, : expected.shape[1]], expected.numpy())
    with torch.no_grad():
        assert measured["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sentence_ids": None}, "decoder_sentence_ids"),
        ({"sentence_ids": None, "decoder_sentence_ids": None}, "sentence_ids"),
        ({"sentence_ids": [0] * 4}, "sentence_ids"),
        ({"sentence_ids": [0.0] * 5}, "sentence_ids"),
        ({"decoder_sentence_ids": 3}, "decoder_sentence_ids=3"),
    ],
)
def test_what_is_no_number_of_each_token(change: dict[str, Any], message: str) -> None:
    items = [item([2, 3], [1, 3]), item([2, 3], [1, 3]) | change]
    with pytest.raises(hea.InputError, match=message):
        hea.AlignedSentencesCollator(tokenizer("right"))(items)
