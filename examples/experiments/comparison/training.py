"""`Trainer` with bits per byte, readable progress, and a clock of training steps that a resumed run continues."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class StepClock(TrainerCallback):
    """Counts the seconds spent in training steps, without evaluation, saving and start-up.

    now: the clock. Default: process time if the process computes with one thread of a CPU, so that other programs on
        the machine do not count; otherwise wall time.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        is_alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
        self.seconds, self.now = 0.0, now or (time.process_time if is_alone else time.perf_counter)
        self._step_start = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds = max((entry.get("train_seconds", 0.0) for entry in state.log_history), default=0.0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_start = self.now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds += self.now() - self._step_start
        if control.should_save:
            # so that a checkpoint holds the clock of its own step
            control.should_log = True


class ReadableProgress(ProgressCallback):
    """Trainer's progress bars, with the loss next to the bar and one line per evaluation."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is None or not logs:
            return
        if "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")
        if "eval_loss" in logs:
            self.training_bar.write(
                f"  step {state.global_step:>6,}   {logs['train_seconds']:7.1f} s of training   "
                f"held-out loss {logs['eval_loss']:.4f}   {logs['eval_bits_per_byte']:.4f} bits per byte"
            )


class FiniteTrainer(Trainer):
    """`Trainer` that stops at the first loss that is not finite; the weights stay those of the step before.

    stopped: why training stopped early; None: it did not.
    """

    stopped: str | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            self.model.zero_grad()
            self.control.should_training_stop = True
            self.stopped = f"The loss is {loss.item()} at step {self.state.global_step + 1}: try a lower learning rate."
        return loss


class ClockedTrainer(FiniteTrainer):
    """`FiniteTrainer` with a clock of training steps."""

    def __init__(self, *args: Any, callbacks: Sequence[TrainerCallback] = (), **kwargs: Any) -> None:
        self.clock = StepClock()
        super().__init__(*args, callbacks=[*callbacks, self.clock], **kwargs)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The logged losses of training, each with its step."""
        return [(entry["step"], entry["loss"]) for entry in self.state.log_history if "loss" in entry]

    def run(self) -> None:
        """Train to the end.

        Raises:
            SystemExit: a loss was not finite.
        """
        self.train()
        if self.stopped:
            raise SystemExit(self.stopped)


class BitsPerByteTrainer(ClockedTrainer):
    """`Trainer` that logs bits per byte with the evaluation loss, and the training seconds in every entry."""

    def __init__(self, *args: Any, bits_per_byte_of_one_nat: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bits_per_byte_of_one_nat = bits_per_byte_of_one_nat
        self.remove_callback(ProgressCallback)
        self.add_callback(ReadableProgress())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "eval_loss" in logs:
            logs["eval_bits_per_byte"] = logs["eval_loss"] * self.bits_per_byte_of_one_nat
        logs["train_seconds"] = self.clock.seconds
        super().log(logs, start_time)

    def history(self, *names: str) -> list[dict[str, float]]:
        """Return step, training seconds and the named values of each entry of the log that has one of these values."""
        entries = [entry for entry in self.state.log_history if any(name in entry for name in names)]
        kept = ("step", "train_seconds", *names)
        return [{name: entry[name] for name in kept if name in entry} for entry in entries]


def training_arguments(folder: Path, seed: int, **fields: Any) -> TrainingArguments:
    """Return arguments of Trainer that report nothing, and save nothing unless fields say so."""
    usual = {
        "save_strategy": "no",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cpu": not torch.accelerator.is_available(),
        "report_to": "none",
    }
    return TrainingArguments(output_dir=str(folder), seed=seed, **{**usual, **fields})


def share(num_steps: int, of_all: float) -> int:
    """Return a share of the steps, at least one."""
    return max(1, -int(-num_steps * of_all // 1))
