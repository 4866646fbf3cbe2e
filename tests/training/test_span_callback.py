"""SpanCallback and the penalty of spans under Trainer, on one process and on two."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_distributed
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


def train_with_callbacks(folder: Path, callbacks: list[Any], rate: float = 5.0, **fields: Any) -> transformers.Trainer:
    """Train at a rate that throws every share out of its bounds."""
    model = build_model(**fields)
    optimizer = torch.optim.SGD(hea.optimizer_groups(model, 0.0, span_lr=rate), lr=0.01)
    trainer = build_trainer(folder, model, hea.TextSegments(text(90), 2, SEGMENT), optimizer, callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("penalty", "end"), [(1.0, 0.0), (0.0, None)])
def test_shares_are_clamped_after_every_step(tmp_path: Path, penalty: float, end: float | None) -> None:
    seen = Ratios()
    train_with_callbacks(tmp_path, [hea.SpanCallback(), seen], span_init=0.5, span_penalty=penalty)
    after = torch.stack(seen.after_steps)
    assert after.shape == (4, 2, 2)
    assert ((after >= 0) & (after <= 1)).all()
    if end is not None:
        assert (after == end).all()


def test_log_tells_spans_and_cost(tmp_path: Path) -> None:
    """Entries have the figures of the weights of their step, for what stands behind the callback as in the history."""
    seen = Ratios()
    trainer = train_with_callbacks(tmp_path, [hea.SpanCallback(), seen], rate=0.5, span_init=0.4, span_penalty=1e-3)
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
    # a checkpoint of the same step, of another training, stands where this training saves
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "named" / "checkpoint-3")
    shutil.copy(tmp_path / "checkpoint-6" / "segment_memory_0.pt", tmp_path / "checkpoint-3")
    with pytest.raises(hea.CheckpointError, match="of another training"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "named" / "checkpoint-3"))
    (tmp_path / "checkpoint-3" / "segment_memory_0.pt").unlink()
    model.reset_memory()
    with pytest.raises(hea.CheckpointError, match="segment_memory_0.pt, one of 1 memory files .* is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_label_smoothing_would_drop_the_penalty(tmp_path: Path) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = build_trainer(tmp_path, model, hea.TextSegments(text(90), 2, SEGMENT), optimizer, [hea.SpanCallback()])
    trainer.args.label_smoothing_factor = 0.1
    with pytest.raises(hea.InputError, match=r"label_smoothing_factor=0.1, .* without the penalty of the spans"):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_device_train_batch_size": 2},
            r"num_rows=4, but a batch of all processes has 2 rows \(2 x 1 processes\).*num_rows=2",
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


# spans of 2.4 tokens: the ramp ends within a segment, so the text has its say
PENALTY, SHARE, ROWS = 0.01, 0.1, 4
HEADS, LAYERS = SIZES["num_attention_heads"], SIZES["num_hidden_layers"]
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


SCRIPT = Path(__file__).parent / "ddp_spans_script.py"
PROCESSES = (1, 2)
KINDS = ("adaptive", "dynamic")
# the same numbers added in another order, at each of six steps; the steps move weights by up to 0.07 each
TOLERANCE = 5e-6

Load = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Run everything once; return a function from kind, texts and process to what was saved."""
    folder = tmp_path_factory.mktemp("spans")
    for processes in PROCESSES:
        (folder / str(processes)).mkdir()
        run_distributed(SCRIPT, folder / str(processes), world_size=processes)

    def saved(kind: str, texts: str, processes: int, process: int = 0) -> dict[str, torch.Tensor]:
        weights = torch.load(folder / str(processes) / f"{kind}-{texts}-{process}.pt")
        assert int(weights.pop("world_size")) == processes
        return weights

    return saved


def spans_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if ".spans." in name}


@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_hold_the_same_spans(load: Load, kind: str) -> None:
    first, second = (load(kind, "AB", 2, process) for process in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first if name != "average_span")


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_on_two_texts_are_one_on_both(load: Load, kind: str) -> None:
    """Each process reads on in its own rows, and the penalty counts once: up to rounding the run of one process."""
    one, two, other = load(kind, "AB", 1), load(kind, "AB", 2), load(kind, "A", 1)
    for name in spans_of(one):
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=TOLERANCE)
        assert (one[name] - other[name]).abs().max() > 100 * TOLERANCE
