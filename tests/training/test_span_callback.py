"""SpanCallback in real Trainer runs: spans stay within their bounds after every step, and the log tells them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from training.span_runs import SEGMENT, SIZES, build_model, build_trainer, text

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.models.spans.training import span_flops
from hf_efficient_attn.training.span_callback import span_log

LIMIT, RAMP = SIZES["span_limit"], SIZES["span_ramp"]


class Ratios(transformers.TrainerCallback):
    """Keep the shares after every step, and what a callback that stands behind sees of the log."""

    def __init__(self) -> None:
        self.after_steps: list[torch.Tensor] = []
        self.logs: list[dict[str, Any]] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_steps.append(
            torch.stack([module.ratio.detach().clone() for module in span_modules(kwargs["model"])])
        )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


def train(folder: Path, callbacks: list[Any], rate: float = 5.0, **fields: Any) -> transformers.Trainer:
    """Train at a rate that throws every share out of its bounds."""
    model = build_model(**fields)
    optimizer = torch.optim.SGD(hea.optimizer_groups(model, 0.0, span_lr=rate), lr=0.01)
    trainer = build_trainer(folder, model, hea.TextSegments(text(90), 2, SEGMENT), optimizer, callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("penalty", "end"), [(1.0, 0.0), (0.0, None)])
def test_shares_are_clamped_after_every_step(tmp_path: Path, penalty: float, end: float | None) -> None:
    seen = Ratios()
    train(tmp_path, [hea.SpanCallback(), seen], span_init=0.5, span_penalty=penalty)
    after = torch.stack(seen.after_steps)
    assert after.shape == (4, 2, 2)
    assert ((after >= 0) & (after <= 1)).all()
    if end is not None:
        assert (after == end).all()


def test_without_the_callback_a_step_leaves_the_bounds(tmp_path: Path) -> None:
    """So the callback, and not the optimizer, keeps them; the model brings them back before it reads them."""
    seen = Ratios()
    trainer = train(tmp_path, [seen], span_init=0.5, span_penalty=1.0)
    assert (torch.stack(seen.after_steps) < 0).all()
    assert all((tensor >= 0).all() for name, tensor in trainer.model.state_dict().items() if name.endswith("ratio"))


def test_log_tells_spans_and_cost(tmp_path: Path) -> None:
    """Entries have the figures of the weights of their step, for what stands behind the callback as in the history."""
    seen = Ratios()
    trainer = train(tmp_path, [hea.SpanCallback(), seen], rate=0.5, span_init=0.4, span_penalty=1e-3)
    assert len(seen.logs) == 5
    history = trainer.state.log_history
    for entry, log, ratios in zip(history, seen.logs, seen.after_steps, strict=False):
        averages = [min(LIMIT, int(torch.ceil(LIMIT * layer.mean())) + RAMP) for layer in ratios]
        assert entry["average_span"] == log["average_span"] == sum(averages) / 2
        assert entry["max_span"] == min(LIMIT, int(torch.ceil(LIMIT * ratios.max())) + RAMP)
        assert entry["flops_per_token"] == span_flops(trainer.model.config, entry["average_span"])
    assert len({entry["average_span"] for entry in history}) > 1
    assert {"loss", "learning_rate"} <= history[0].keys()


def test_wrapped_models() -> None:
    """What a process group or a compiler wraps is found all the same."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = build_model(span_init=0.5)
    wrapped = torch.nn.DataParallel(model)
    assert (
        span_log(wrapped)
        == span_log(model)
        == {
            "average_span": LIMIT / 2 + RAMP,
            "max_span": LIMIT // 2 + RAMP,
            "flops_per_token": span_flops(model.config, LIMIT / 2 + RAMP),
        }
    )
    for module in span_modules(model):
        module.ratio.data.fill_(3.0)
    hea.SpanCallback().on_optimizer_step(None, None, None, model=Wrapper(model))
    assert all((module.ratio == 1).all() for module in span_modules(model))


def test_fixed_and_dynamic_spans_are_logged(tmp_path: Path) -> None:
    for span, average in (("fixed", LIMIT), ("dynamic", None)):
        model = build_model(span=span)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = build_trainer(
            tmp_path, model, hea.TextSegments(text(90), 2, SEGMENT), optimizer, [hea.SpanCallback()]
        )
        trainer.train()
        spans = [entry["average_span"] for entry in trainer.state.log_history]
        assert len(spans) == 5
        assert all(span == average if average else RAMP < span <= LIMIT for span in spans)


def test_a_model_without_spans_is_refused(tmp_path: Path) -> None:
    config = hea.SimplifiedTransformerConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = hea.SimplifiedTransformerForCausalLM(config)
    trainer = build_trainer(
        tmp_path,
        model,
        hea.TextSegments(text(90), 2, SEGMENT),
        torch.optim.SGD(model.parameters(), lr=0.01),
        [hea.SpanCallback()],
    )
    with pytest.raises(hea.InputError, match="SimplifiedTransformerForCausalLM has no attention spans"):
        trainer.train()


@pytest.mark.parametrize("span", ["adaptive", "dynamic"])
def test_training_resumes_in_the_middle_of_a_text(tmp_path: Path, span: str) -> None:
    """What was remembered comes back from the checkpoint: the weights end equal to the last bit."""
    ended = []
    for seed, resume in ((0, None), (1, str(tmp_path / "checkpoint-3"))):
        model = build_model(seed, span=span)
        optimizer = torch.optim.Adagrad(hea.optimizer_groups(model, 0.0), lr=0.07)
        segments = hea.TextSegments(text(2 * (6 * SEGMENT + 1)), 2, SEGMENT)
        saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        trainer = build_trainer(tmp_path, model, segments, optimizer, [hea.SpanCallback()], **saving)
        trainer.train(resume_from_checkpoint=resume)
        ended.append(model.state_dict())
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])
    (tmp_path / "checkpoint-3" / "segment_memory_0.pt").unlink()
    model.reset_memory()
    with pytest.raises(hea.CheckpointError, match="segment_memory_0.pt is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_label_smoothing_would_drop_the_penalty(tmp_path: Path) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = build_trainer(tmp_path, model, hea.TextSegments(text(90), 2, SEGMENT), optimizer, [hea.SpanCallback()])
    trainer.args.label_smoothing_factor = 0.1
    with pytest.raises(hea.InputError, match=r"label_smoothing_factor=0.1: .* without the penalty of the spans"):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_device_train_batch_size": 2},
            r"num_rows=4, but 2 rows are read at once \(2 x 1 processes\).*num_rows=2",
        ),
        ({"train_sampling_strategy": "random"}, "train_sampling_strategy='random' shuffles segments"),
    ],
)
def test_batches_that_do_not_go_on_are_refused_before_training(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    segments = hea.TextSegments(text(90), 4, SEGMENT)
    trainer = build_trainer(tmp_path, model, segments, optimizer, [hea.SpanCallback()], **changes)
    with pytest.raises(hea.InputError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
