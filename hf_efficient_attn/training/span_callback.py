"""Learned attention spans under `Trainer`: kept within their bounds, logged, and resumed with what was remembered."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.span_costs import average_span, max_span, span_flops
from hf_efficient_attn.models.spans import span_modules


class SpanCallback(TrainerCallback):
    """Clamp the spans after every optimizer step, on every process, and log how far the heads read.

    An optimizer does not know that a span lies between 0 and the span limit; the clamp comes before anything sees the
    weights again. Every entry of the log gets `average_span` and `max_span`, in tokens, the ramp included, and
    `flops_per_token`, the multiply-adds of one token. Reports to TensorBoard and the like are written by callbacks in
    their order: for the spans to be in them, too, name them after this one,
    `Trainer(args with report_to="none", callbacks=[SpanCallback(), TensorBoardCallback()])`.

    Beside each checkpoint every process keeps what its model remembers of the segments before (`segment_index`), so
    that training resumes in the middle of a text, and ends with the same weights as without a break.

    Raises:
        InputError: at the start of training, if the model has no spans.

    Source: Sukhbaatar et al. (arXiv:1905.07799) and the authors' code, which clamps after every step.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = unwrap_model(kwargs["model"])
        if not span_modules(model):
            raise InputError(
                f"{type(model).__name__} has no attention spans. Leave SpanCallback out, or build a model that has "
                "them, such as AdaptiveSpanForCausalLM."
            )
        file = _memory_file(args, state)
        if state.global_step and file.is_file():
            vars(model.base_model.memory).update(torch.load(file, map_location=args.device))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for spans in span_modules(kwargs["model"]):
            spans.clamp_()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        memory = getattr(unwrap_model(kwargs["model"]).base_model, "memory", None)
        file = _memory_file(args, state)
        if memory is not None and file.parent.is_dir():
            torch.save(vars(memory), file)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        entry = span_log(kwargs["model"])
        # Trainer keeps a copy in its history, and hands the original to the callbacks that follow
        kwargs["logs"].update(entry)
        state.log_history[-1].update(entry)


def _memory_file(args: TrainingArguments, state: TrainerState) -> Path:
    checkpoint = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    return checkpoint / f"segment_memory_{args.process_index}.pt"


def span_log(model: nn.Module) -> dict[str, float]:
    """Return `average_span` and `max_span` in tokens, and `flops_per_token` in multiply-adds."""
    average = average_span(model)
    return {
        "average_span": average,
        "max_span": max_span(model),
        "flops_per_token": span_flops(unwrap_model(model).config, average),
    }
