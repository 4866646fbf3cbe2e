"""StopOnNonFiniteLoss in real Trainer runs: training stops, and what is kept is the last good step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from training.tiny_models import two_blocks

import hf_efficient_attn as hea

STEPS, BAD_STEP = 6, 4
BATCH, EPOCH_STEPS = 2, 8


class Snapshots(transformers.TrainerCallback):
    """Keep a copy of the weights after every step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def poison_forward(model: torch.nn.Module, bad_forward: int, value: float = float("nan")) -> Any:
    """Multiply the loss of forward number `bad_forward`, counted from 1, by `value`; return the hook's handle."""
    forwards = iter(range(1, 1000))

    def spoil(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        if next(forwards) == bad_forward:
            outputs["loss"] = outputs["loss"] * value
        return outputs

    return model.register_forward_hook(spoil)


def build_model() -> hea.SimplifiedTransformerForCausalLM:
    torch.manual_seed(0)
    return two_blocks("sas_p_no_norm")


def build_trainer(folder: Path, lr: float = 0.01, **arguments: Any) -> transformers.Trainer:
    """Return a Trainer that saves every second step, with Snapshots and StopOnNonFiniteLoss.

    Its AdamW would move the weights (by momentum and decay) even if the gradients of a bad step were set to 0.
    """
    model = build_model()
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, weight_decay=0.1), lr=lr)
    defaults = {
        "max_steps": STEPS,
        "save_steps": 2,
        "per_device_train_batch_size": BATCH,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = torch.randint(0, 64, (BATCH * EPOCH_STEPS, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(folder), **{**defaults, **arguments}),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=transformers.default_data_collator,
        optimizers=(optimizer, None),
        callbacks=[Snapshots(), hea.StopOnNonFiniteLoss()],
    )


def callbacks(trainer: transformers.Trainer) -> tuple[Snapshots, hea.StopOnNonFiniteLoss]:
    own = [
        each for each in trainer.callback_handler.callbacks if isinstance(each, (Snapshots, hea.StopOnNonFiniteLoss))
    ]
    return own[0], own[1]


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    different = [name for name in weights if not torch.equal(weights[name], expected[name])]
    assert not different


@pytest.mark.parametrize(
    ("accumulation", "bad_forward", "value"),
    [
        pytest.param(1, BAD_STEP, float("nan"), id="one-batch-a-step"),
        pytest.param(2, 2 * BAD_STEP - 1, float("nan"), id="first-of-two"),
        pytest.param(2, 2 * BAD_STEP, float("inf"), id="second-of-two"),
    ],
)
def test_stops_with_the_weights_of_the_last_good_step(
    tmp_path: Path, accumulation: int, bad_forward: int, value: float
) -> None:
    """One bad loss, in any micro-batch of the step: nothing is updated, nothing is saved, and the reason says where."""
    trainer = build_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    poison_forward(trainer.model, bad_forward, value)
    trainer.train()

    snapshots, stop = callbacks(trainer)
    assert max(snapshots.weights) == BAD_STEP, "training stopped there"
    assert_equal(trainer.model.state_dict(), snapshots.weights[BAD_STEP - 1])
    assert saved_steps(tmp_path) == ["checkpoint-2"], "step 4 would have been saved"
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "checkpoint-2/model.safetensors").values())
    for part in (f"at step {BAD_STEP}.", f"weights of step {BAD_STEP - 1},", str(tmp_path / "checkpoint-2")):
        assert part in stop.reason


def test_training_resumes_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    """After the cause is gone, resume_from_checkpoint=True goes on as if nothing had happened."""
    whole = build_trainer(tmp_path / "whole")
    whole.train()
    stopped = build_trainer(tmp_path / "stopped")
    poison = poison_forward(stopped.model, BAD_STEP)
    stopped.train()
    poison.remove()
    stopped.train(resume_from_checkpoint=True)

    assert callbacks(stopped)[1].reason is None
    assert stopped.state.global_step == STEPS
    assert_equal(stopped.model.state_dict(), whole.model.state_dict())


def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    """With finite losses the callback changes no weight and no checkpoint, and leaves no hook on the model."""
    watched, free = build_trainer(tmp_path / "watched"), build_trainer(tmp_path / "free")
    free.remove_callback(hea.StopOnNonFiniteLoss)
    for trainer in (watched, free):
        trainer.train()
    assert watched.state.global_step == STEPS
    assert callbacks(watched)[1].reason is None
    assert_equal(watched.model.state_dict(), free.model.state_dict())
    assert saved_steps(tmp_path / "watched") == saved_steps(tmp_path / "free") == [f"checkpoint-{n}" for n in (2, 4, 6)]
    assert not watched.model._forward_hooks


def test_nothing_is_saved_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    """save_strategy="epoch" saves whenever an epoch ends, also one that was cut off: not after a bad loss."""
    trainer = build_trainer(tmp_path, save_strategy="epoch", max_steps=-1, num_train_epochs=2)
    poison_forward(trainer.model, EPOCH_STEPS + 2)
    trainer.train()
    assert callbacks(trainer)[1].reason is not None
    assert saved_steps(tmp_path) == [f"checkpoint-{EPOCH_STEPS}"]


@pytest.mark.parametrize(
    "lr",
    [
        100.0,
        1e4,
    ],
)
def test_real_overflow_leaves_finite_weights(tmp_path: Path, lr: float) -> None:
    """Learning rates that blow a norm-free block up: gradients can overflow a step before the loss does."""
    trainer = build_trainer(tmp_path, lr=lr, save_steps=1, max_steps=8)
    trainer.train()
    snapshots, stop = callbacks(trainer)
    last = max(snapshots.weights)
    assert stop.reason is not None
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())
    assert_equal(trainer.model.state_dict(), snapshots.weights[last - 1])
    for saved in tmp_path.glob("checkpoint-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(saved).values()), saved.parent.name


def test_a_loss_that_trainer_computes_is_watched(tmp_path: Path) -> None:
    """With label smoothing Trainer takes the labels away and computes the loss itself from the logits."""
    trainer = build_trainer(tmp_path, label_smoothing_factor=0.1)
    forwards = iter(range(1, 1000))

    def spoil(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        if next(forwards) == BAD_STEP:
            outputs["logits"] = outputs["logits"] * float("nan")
        return outputs

    trainer.model.register_forward_hook(spoil)
    trainer.train()
    snapshots, stop = callbacks(trainer)
    assert stop.reason is not None
    assert_equal(trainer.model.state_dict(), snapshots.weights[BAD_STEP - 1])


def test_loss_scaling_without_clipping(tmp_path: Path) -> None:
    """An fp16 loss scaler that looks at the gradients only in its own step must still find some there."""
    trainer = build_trainer(tmp_path, max_grad_norm=0.0)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    poison_forward(trainer.model, BAD_STEP)
    trainer.train()
    snapshots, stop = callbacks(trainer)
    assert stop.reason is not None
    assert_equal(trainer.model.state_dict(), snapshots.weights[BAD_STEP - 1])
