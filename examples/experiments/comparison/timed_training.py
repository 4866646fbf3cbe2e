"""Training for a number of seconds, so that models whose steps cost different times are compared at equal time."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import hf_efficient_attn as hea
from comparison.training import FiniteTrainer, StepClock, training_arguments

WARMUP = 0.1
ENDLESS = 1_000_000


class TimeBudget(StepClock):
    """Ends training when the seconds are spent, and shows them in a progress bar."""

    def __init__(self, seconds: float, title: str) -> None:
        super().__init__()
        self.limit = seconds
        form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s of training{postfix}"
        self._bar = tqdm(total=seconds, desc=title, bar_format=form)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        self._bar.update(min(self.seconds, self.limit) - self._bar.n)
        self._bar.set_postfix(steps=state.global_step)
        control.should_training_stop = control.should_training_stop or self.seconds >= self.limit

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._bar.close()


class TimedTrainer(FiniteTrainer):
    """`Trainer` for a number of seconds. Only training steps count, no data preparation and no evaluation.

    The learning rate follows the clock, not the steps: it warms up and falls to 0 within the time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Dataset,
        collate: Any,
        folder: Path,
        seconds: float,
        title: str,
        **fields: Any,
    ) -> None:
        training = training_arguments(
            folder, max_steps=ENDLESS, logging_strategy="no", include_num_input_tokens_seen="non_padding", **fields
        )
        self.budget = TimeBudget(seconds, title)
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(training, model)
        optimizer = optimizer_class(hea.optimizer_groups(model, training.weight_decay), **options)
        scheduler = LambdaLR(optimizer, lambda step: warm_up_then_fall(self.budget.seconds / seconds))
        super().__init__(model, training, collate, rows, optimizers=(optimizer, scheduler))
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)
        self.add_callback(self.budget)

    def run(self) -> dict[str, Any]:
        """Train and return what was done: seconds, steps, tokens, and why it stopped early, if it did."""
        self.train()
        seconds, steps = self.budget.seconds, self.state.global_step
        tokens = int(self.state.num_input_tokens_seen)
        return {"train_seconds": seconds, "num_steps": steps, "train_tokens": tokens, "stopped": self.stopped}


def warm_up_then_fall(share: float) -> float:
    """Return the factor of the learning rate: linear warm-up, then linear decay to 0.

    >>> [round(warm_up_then_fall(share), 2) for share in (0.05, 0.1, 0.55, 1.0, 1.1)]
    [0.5, 1.0, 0.5, 0.0, 0.0]
    """
    # a first step with a rate of 0 would be lost
    return max(share, 0.01) / WARMUP if share < WARMUP else max(0.0, (1 - share) / (1 - WARMUP))
