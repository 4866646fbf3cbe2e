"""Label smoothing, Trainer's own smoothing, and `Seq2SeqTrainer` that generates."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME
from models_cases import trainer_arguments
from seq2seq_cases import TINY, head_inputs, random_ids
from tokenizers import Tokenizer, models
from torch.utils.data import Dataset

import hf_efficient_attn as hea
from hf_efficient_attn.models.encoder_decoder.heads import smoothed_loss

VANILLA = BY_NAME["seq2seq-vanilla"]
LED = BY_NAME["seq2seq-led"]
NO_DROPOUT = {"embedding_dropout": 0.0, "hidden_dropout": 0.0}


class Reversals(Dataset[dict[str, Any]]):
    """Sources and what they read backwards, of unequal lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = random_ids(1, 4 + index % 3, seed=index)[0].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [*ids[::-1], TINY["eos_token_id"]]}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(("[PAD]", "[BOS]", "[EOS]", "[UNK]"))}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]")


def test_loss_is_smoothed_by_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100, 0], [6, -100, 3, 3]])
    log_probabilities = logits.log_softmax(-1)
    total = 0.0
    for row, column in (labels != -100).nonzero().tolist():
        own = log_probabilities[row, column]
        target = torch.full((7,), 0.1 / 7, dtype=torch.float64)
        target[labels[row, column]] += 0.9
        total -= float(target @ own)
    assert smoothed_loss(logits, labels, 0.1).item() == pytest.approx(total / 6, rel=1e-12)
    assert smoothed_loss(logits, labels, 0.1, num_items_in_batch=5).item() == pytest.approx(total / 5, rel=1e-12)


def test_smoothed_in_training_and_plain_in_evaluation() -> None:
    model = VANILLA.model(**NO_DROPOUT)
    inputs = head_inputs("AutoModelForSeq2SeqLM")
    with torch.no_grad():
        out = model(**inputs)
        assert out.loss == smoothed_loss(out.logits, inputs["labels"], 0.0)
        assert model.train()(**inputs).loss == smoothed_loss(out.logits, inputs["labels"], 0.1)


def trainer(model: Any, folder: Path, **options: Any) -> transformers.Seq2SeqTrainer:
    arguments = trainer_arguments(
        folder,
        transformers.Seq2SeqTrainingArguments,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        **options,
    )
    collator = transformers.DataCollatorForSeq2Seq(tokenizer(), model=model)
    return transformers.Seq2SeqTrainer(
        model, arguments, train_dataset=Reversals(), eval_dataset=Reversals(), data_collator=collator
    )


def test_smoothing_of_trainer_is_the_same_and_not_doubled(tmp_path: Path) -> None:
    """Trainer takes the labels away before the model sees them, and smooths by its own argument alone."""
    ours = VANILLA.model(**NO_DROPOUT, label_smoothing=0.1).train()
    batch = trainer(ours, tmp_path).data_collator([Reversals()[index] for index in range(4)])
    losses = []
    for in_model, in_trainer in ((0.1, 0.0), (0.0, 0.1), (0.1, 0.1)):
        model = VANILLA.model(**NO_DROPOUT, label_smoothing=in_model).train()
        running = trainer(model, tmp_path, label_smoothing_factor=in_trainer)
        losses.append(running.compute_loss(model, dict(batch)).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_trainer_trains_evaluates_and_generates(tmp_path: Path) -> None:
    seen = []

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {"tokens": float((prediction.predictions > 2).sum())}

    options = {"max_steps": 3, "predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": 2}
    running = trainer(LED.model(), tmp_path, **options)
    running.compute_metrics = metrics
    result = running.train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    measured = running.evaluate()
    assert {"eval_loss", "eval_tokens"} <= measured.keys()
    assert seen[0][0] == 12
    running.save_model(tmp_path / "saved")
    again = hea.SparseSeq2SeqForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.lm_head.weight, running.model.lm_head.weight)


def test_a_trainer_without_decoder_inputs_is_told_what_to_do(tmp_path: Path) -> None:
    model = VANILLA.model()
    running = trainer(model, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(hea.InputError, match="DataCollatorForSeq2Seq"):
        running.compute_loss(model, head_inputs("AutoModelForSeq2SeqLM"))
