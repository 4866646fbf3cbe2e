"""The penalty of spans under Trainer: λ · Σ over layers of the mean span, once an optimizer step, in training only."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from training.span_runs import SEGMENT, SIZES, build_model, build_trainer, text

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

# spans of 2.4 tokens: the ramp ends within a segment, so the text has its say
PENALTY, SHARE, ROWS = 0.01, 0.1, 4
LIMIT, HEADS, LAYERS = SIZES["span_limit"], SIZES["num_attention_heads"], SIZES["num_hidden_layers"]
# λ · S · mean over heads: the slope of the penalty for one head's share
SLOPE = PENALTY * LIMIT / HEADS


class Gradients(transformers.TrainerCallback):
    """Keep the gradient of the shares before every optimizer step, [layers, heads]."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(torch.stack([module.ratio.grad.clone() for module in span_modules(kwargs["model"])]))


def train(
    folder: Path, penalty: float, rows: int = ROWS, accumulation: int = 1, silent: bool = False, **fields: Any
) -> tuple[transformers.Trainer, torch.Tensor]:
    """Train on ROWS rows of one segment; return the trainer and the first gradient of the shares.

    Args:
        rows: of a batch; accumulation: batches of an optimizer step.
        silent: every value vector is 0, so that attention, and with it every span, has no say in the text's loss.
    """
    model = build_model(span_init=SHARE, span_penalty=penalty, **fields)
    if silent:
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
    seen = Gradients()
    segments = hea.TextSegments(text(ROWS * (SEGMENT + 1)), ROWS, SEGMENT)
    # single segments, so that a batch of fewer rows needs no memory of its own rows
    items = [{name: item[name] for name in ("input_ids", "labels")} for item in segments]
    optimizer = torch.optim.SGD(hea.optimizer_groups(model, 0.0), lr=0.1)
    trainer = build_trainer(
        folder,
        model,
        segments,
        optimizer,
        [seen, hea.SpanCallback()],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
    )
    trainer.train_dataset = trainer.eval_dataset = items
    trainer.train()
    return trainer, seen.seen[0]


@pytest.mark.parametrize(("rows", "accumulation"), [(4, 1), (1, 4)])
def test_slope_is_the_closed_form_whatever_is_accumulated(tmp_path: Path, rows: int, accumulation: int) -> None:
    """Where the text says nothing of the spans, a step has the slope λ · S / H for each share, once."""
    _, slope = train(tmp_path, PENALTY, rows, accumulation, silent=True)
    torch.testing.assert_close(slope, torch.full((LAYERS, HEADS), SLOPE))


def test_losses(tmp_path: Path) -> None:
    """Training logs the mean loss of a token plus λ · S · share a layer; evaluation the mean loss alone."""
    trainer, _ = train(tmp_path, PENALTY, silent=True)
    first = trainer.state.log_history[0]["loss"]
    without, _ = train(tmp_path, 0.0, silent=True)
    assert first - without.state.log_history[0]["loss"] == pytest.approx(PENALTY * LIMIT * SHARE * LAYERS, rel=1e-5)

    evaluated = trainer.evaluate()["eval_loss"]
    model, batch = trainer.model.eval(), hea.SegmentCollator()(trainer.eval_dataset)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
    assert evaluated == pytest.approx(float(nats), rel=1e-5)
