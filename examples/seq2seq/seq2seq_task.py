"""What the encoder-decoder examples share: rows of tokens, a Trainer that writes texts, a saved model that loads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Dataset
from shared.arguments import UsageError
from shared.saved_model import check_saved_model, save_model
from shared.training_callbacks import StepClock
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import hf_efficient_attn as hea

METRICS = Path(__file__).parents[1] / "metrics"
USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("{{folder}}")
tokenizer = AutoTokenizer.from_pretrained("{{folder}}")
written = model.generate(**tokenizer({shown!r}, return_tensors="pt"))
print(tokenizer.decode(written[0], skip_special_tokens=True))"""


@dataclass
class WritingTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` of a short run on a small machine that writes texts at each evaluation."""

    predict_with_generate: bool = True
    train_sampling_strategy: str = "group_by_length"
    eval_strategy: str = "steps"
    eval_steps: float | None = 0.125
    save_strategy: str = "no"
    logging_steps: float = 0.02
    generation_num_beams: int | None = 1  # at the evaluations during training
    dataloader_pin_memory: bool = torch.cuda.is_available()
    report_to: None | str | list[str] = "none"

    def __post_init__(self) -> None:
        if not self.predict_with_generate:
            raise UsageError("--predict_with_generate False: the scores are those of texts that the model writes.")
        super().__post_init__()


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int,
    max_target_length: int,
) -> Dataset:
    """Return `input_ids`, `labels` and `length` (tokens of the source) of each pair; what is too long is cut off."""
    sources, targets = zip(*pairs, strict=True)
    input_ids = tokenizer(list(sources), max_length=max_source_length, truncation=True).input_ids
    labels = tokenizer(list(targets), max_length=max_target_length, truncation=True).input_ids
    return Dataset.from_dict({"input_ids": input_ids, "labels": labels, "length": [len(row) for row in input_ids]})


def longest_first(rows: Dataset) -> np.ndarray:
    """Return the places of the rows by length of the source, so that batches of neighbours have little padding."""
    return np.argsort(-np.array(rows["length"]), kind="stable")


class WritingTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` that scores what the model writes, and logs the seconds spent in training steps.

    score: returns the metrics of (texts written, texts wanted).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: Seq2SeqTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        score: Callable[[list[str], list[str]], dict[str, float]],
        eval_dataset: Dataset,
        **options: Any,
    ) -> None:
        self.tokenizer, self.score = tokenizer, score
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            compute_metrics=self._metrics,
            eval_dataset=eval_dataset.select(longest_first(eval_dataset)),
            **options,
        )
        self.clock, self.finite = StepClock(), hea.StopOnNonFiniteLoss()
        self.add_callback(self.clock)
        self.add_callback(self.finite)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; raise UsageError if the loss or a gradient was not finite."""
        output = super().train(*args, **kwargs)
        if self.finite.reason:
            raise UsageError(self.finite.reason)
        return output

    def _metrics(self, prediction: Any) -> dict[str, float]:
        return self.score(self._texts(prediction.predictions), self._texts(prediction.label_ids))

    def _texts(self, ids: np.ndarray) -> list[str]:
        filled = np.where(ids == -100, self.tokenizer.pad_token_id, ids)
        return [text.strip() for text in self.tokenizer.batch_decode(filled, skip_special_tokens=True)]

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        # rows grouped by length, as in training, come shuffled: nobody could tell whose text is whose
        return SequentialSampler(eval_dataset)

    def write(self, rows: Dataset, **generation: Any) -> list[str]:
        """Return the text the model writes for each row; `generation` as in `generate`."""
        order = longest_first(rows)
        written = self._texts(self.predict(rows.select(order), **generation).predictions)
        return [written[place] for place in np.argsort(order, kind="stable")]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["train_seconds"] = self.clock.seconds
        super().log(logs, start_time)

    def history(self, *metrics: str) -> list[dict[str, float]]:
        """Return step, training seconds, losses and `metrics` of every entry of the log that has a loss."""
        names = ("step", "train_seconds", "loss", "eval_loss", *metrics)
        entries = [{name: entry[name] for name in names if name in entry} for entry in self.state.log_history]
        return [entry for entry in entries if "loss" in entry or "eval_loss" in entry]


def load_metric(name: str) -> Any:
    """Return the metric of `examples/metrics`."""
    return evaluate.load(str(METRICS / name))


def save_and_check(trainer: WritingTrainer, folder: Path, rows: Dataset, **card: str) -> dict[str, Any]:
    """Save model, tokenizer and card, and load them in a fresh process.

    Args:
        rows: a training batch, to compare the logits and to measure the memory of a step.
        card: see `saved_model.save_model`.

    Returns:
        "reload_difference" of the logits and "training_step_peak_mb", beyond the weights.
    """
    usage = USAGE.format(shown=card.pop("shown"))
    save_model(trainer.model, trainer.tokenizer, folder, pipeline_tag="text2text-generation", usage=usage, **card)
    columns = ("input_ids", "labels")
    batch = trainer.data_collator([{name: row[name] for name in columns} for row in rows])
    checked = check_saved_model(trainer.model, folder, dict(batch), ["logits"], "AutoModelForSeq2SeqLM")
    return {**checked, "training_step_peak_mb": checked["training_step_peak_bytes"] / 1e6}
