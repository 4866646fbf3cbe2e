"""Learned attention spans under `Trainer`: kept within their bounds, and in the log."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model

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

    Raises:
        InputError: at the start of training, if the model has no spans.

    Source: Sukhbaatar et al. (arXiv:1905.07799) and the authors' code, which clamps after every step.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not span_modules(kwargs["model"]):
            raise InputError(
                f"{type(unwrap_model(kwargs['model'])).__name__} has no attention spans. Leave SpanCallback out, or "
                "build a model that has them, such as AdaptiveSpanForCausalLM."
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for spans in span_modules(kwargs["model"]):
            spans.clamp_()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        entry = span_log(kwargs["model"])
        # Trainer keeps a copy in its history, and hands the original to the callbacks that follow
        kwargs["logs"].update(entry)
        state.log_history[-1].update(entry)


def span_log(model: nn.Module) -> dict[str, float]:
    """Return `average_span` and `max_span` in tokens, and `flops_per_token` in multiply-adds."""
    average = average_span(model)
    return {
        "average_span": average,
        "max_span": max_span(model),
        "flops_per_token": span_flops(unwrap_model(model).config, average),
    }
