"""Train one kind of span on a run's text, and measure it on text that it has not seen."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from shared.arguments import UsageError
from shared.training_callbacks import BitsPerByteTrainer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import hf_efficient_attn as hea
from char_lm.char_lm_arguments import OPTIMIZERS, CharTrainingArguments
from hf_efficient_attn.models.spans.costs import span_flops
from hf_efficient_attn.training.clipped_adagrad import constant_after_warmup
from hf_efficient_attn.training.span_callback import span_log

BITS_OF_ONE_NAT = 1 / math.log(2)
HISTORY = ("step", "train_seconds", "loss", "eval_bits_per_byte", "average_span", "max_span")


class SpansOfEvaluation(TrainerCallback):
    """Keeps the spans after each batch of an evaluation, since dynamic ones differ from text to text."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seen.append(span_log(kwargs["model"]))

    def summary(self) -> dict[str, float]:
        """Return the average of the average spans, and the longest of all, in tokens."""
        averages = [entry["average_span"] for entry in self.seen]
        longest = max(entry["max_span"] for entry in self.seen)
        return {"average_span": sum(averages) / len(averages), "max_span": longest}


def train_kind(
    config: hea.AdaptiveSpanConfig, segments: dict[str, hea.TextSegments], training: CharTrainingArguments, folder: Path
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the trained model and what was measured.

    Args:
        segments: "train", "validation" and "test".

    Raises:
        UsageError: the loss became infinite or no number.
    """
    arguments = copy.copy(training)
    arguments.output_dir = str(folder)
    set_seed(arguments.seed)  # the same start and the same text for every kind
    model = hea.AdaptiveSpanForCausalLM(config)
    finite = hea.StopOnNonFiniteLoss()
    trainer = BitsPerByteTrainer(
        model=model,
        args=arguments,
        train_dataset=segments["train"],
        eval_dataset=segments["validation"],
        data_collator=hea.SegmentCollator(),
        optimizers=build_optimizer(model, arguments),
        callbacks=[hea.SpanCallback(), finite],
        bits_per_byte_of_one_nat=BITS_OF_ONE_NAT,
    )
    trainer.train()
    if finite.reason:
        raise UsageError(finite.reason)
    tokens = arguments.max_steps * arguments.train_batch_size * arguments.gradient_accumulation_steps
    tokens *= segments["train"].segment_tokens
    seconds = trainer.clock.seconds
    return model, {
        "parameters": model.num_parameters(),
        "num_steps": trainer.state.global_step,
        "train_tokens": tokens,
        "train_seconds": seconds,
        "train_tokens_per_second": tokens / seconds,
        **test(trainer, segments["test"]),
        "history": [{name: entry[name] for name in HISTORY if name in entry} for entry in trainer.state.log_history],
    }


def build_optimizer(
    model: PreTrainedModel, training: CharTrainingArguments
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Return the optimizer and its schedule, as Trainer takes them; None: the one that `--lr_scheduler_type` names."""
    span_lr = None if model.config.span == "fixed" else training.span_learning_rate
    groups = hea.optimizer_groups(model, training.weight_decay, span_lr)
    optimizer = OPTIMIZERS[training.optimizer](groups, lr=training.learning_rate)
    if training.optimizer == "adagrad":
        return optimizer, constant_after_warmup(optimizer, int(training.warmup_steps))
    return optimizer, None


def test(trainer: BitsPerByteTrainer, segments: hea.TextSegments) -> dict[str, Any]:
    """Return bits per byte of the test text, read in order with all that is remembered, and the spans on it."""
    spans = SpansOfEvaluation()
    trainer.add_callback(spans)
    metrics = trainer.evaluate(segments, metric_key_prefix="test")
    trainer.remove_callback(spans)
    summary = spans.summary()
    return {
        "bits_per_byte": metrics["test_loss"] * BITS_OF_ONE_NAT,
        "test_tokens_per_second": metrics["test_samples_per_second"] * segments.segment_tokens,
        **summary,
        "flops_per_token": span_flops(trainer.model.config, summary["average_span"]),
    }
