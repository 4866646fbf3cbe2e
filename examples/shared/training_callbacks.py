"""What a training run here adds to `Trainer`: bits per byte, a clock that survives a resume, and a kind Ctrl-C."""

import os
import signal
import time
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class StepClock(TrainerCallback):
    """Counts the seconds spent in training steps: no evaluation, no saving, no start-up.

    `BitsPerByteTrainer` writes them into every log entry, and `Trainer` keeps the log in each checkpoint, so a resumed
    run continues the count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._step_start = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.continue_from(state)

    def continue_from(self, state: TrainerState) -> None:
        """Set the clock to the last entry of the log."""
        self.seconds = max((entry.get("train_seconds", 0.0) for entry in state.log_history), default=0.0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._step_start
        if control.should_save:
            control.should_log = True  # the checkpoint then knows the clock of its own step


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C ends training after the current step with a checkpoint; a second one, a second later, at once.

    With several processes all of them stop at the same step. A launcher may deliver one key press twice, hence the
    pause before the second counts.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._first_time = 0.0
        self._previous_handler: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._process = os.getpid()
        self._previous_handler = signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data loading process: the main one decides
        if not self.interrupted:
            self.interrupted, self._first_time = True, time.monotonic()
            print("\nCtrl-C: saving after this step. Once more to stop at once.", flush=True)
        elif time.monotonic() - self._first_time > 1:
            signal.signal(signal.SIGINT, self._previous_handler)
            raise KeyboardInterrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.interrupted = self._on_any_process(args.device)
        if self.interrupted:
            control.should_log = control.should_save = control.should_training_stop = True

    def _on_any_process(self, device: torch.device) -> bool:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self.interrupted
        flag = torch.tensor(int(self.interrupted), device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.interrupted = self._on_any_process(args.device)
        signal.signal(signal.SIGINT, self._previous_handler)


class ReadableProgress(ProgressCallback):
    """Trainer's progress bars, with the loss beside the bar and one line per evaluation."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        if "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")
        if "eval_loss" in logs:
            self.training_bar.write(
                f"  step {state.global_step:>6,}   {logs['train_seconds']:7.1f} s of training   "
                f"held-out loss {logs['eval_loss']:.4f}   {logs['eval_bits_per_byte']:.4f} bits per byte"
            )


class BitsPerByteTrainer(Trainer):
    """`Trainer` that logs bits per byte beside the evaluation loss, and the training seconds in every entry."""

    def __init__(self, *args: Any, bits_per_byte_of_one_nat: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bits_per_byte_of_one_nat = bits_per_byte_of_one_nat
        self.clock = StepClock()
        self.add_callback(self.clock)
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(ReadableProgress())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "eval_loss" in logs:
            logs["eval_bits_per_byte"] = logs["eval_loss"] * self.bits_per_byte_of_one_nat
        logs["train_seconds"] = self.clock.seconds
        super().log(logs, start_time)

    def history(self) -> list[dict[str, float]]:
        """Return step, training seconds and loss or evaluation loss of every entry of the log, in order."""
        names = ("step", "train_seconds", "loss", "eval_loss", "eval_bits_per_byte")
        entries = [{name: entry[name] for name in names if name in entry} for entry in self.state.log_history]
        return [entry for entry in entries if "loss" in entry or "eval_loss" in entry]
