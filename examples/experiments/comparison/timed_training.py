"""Training for so many seconds: models that cost different times a step are compared at equal time.

Each model is trained by `Trainer` on endless batches of about equally many tokens until its seconds are spent. Its
learning rate follows the clock, not the steps: it warms up and falls to zero within the time, however many steps that
is. Only training steps count, no data preparation, evaluation or saving.
"""

import time
from collections.abc import Callable
from math import isinf
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import hf_efficient_attn as hea
from comparison.token_batches import TokenBatches
from comparison.training import FiniteTrainer, StepClock, training_arguments

WARMUP = 0.1


class TimeBudget(StepClock):
    """Ends training when the seconds are spent, shows a bar of them, and keeps the loss of every step with its time.

    Of endless seconds, `math.inf`, the steps are the end, and the bar is theirs.
    """

    def __init__(
        self, seconds: float, max_steps: int, title: str, now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(now)
        self.limit, self.max_steps, self.losses = seconds, max_steps, []
        self._is_endless = isinf(seconds)
        unit, total = ("steps", max_steps) if self._is_endless else ("s of training", seconds)
        form = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{n:.0f}}/{{total:.0f}} {unit}{{postfix}}"
        self._bar = tqdm(total=total, desc=title, bar_format=form)

    def share(self, steps: int) -> float:
        """Return the share of the training that is over: of the time, or of the steps if those end first."""
        return min(1.0, max(self.seconds / self.limit, steps / self.max_steps))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        before = self.seconds
        super().on_step_end(args, state, control, **kwargs)
        self._bar.update(1 if self._is_endless else min(self.seconds, self.limit) - min(before, self.limit))
        self._bar.set_postfix(loss=f"{self.losses[-1][1]:.3f}", steps=state.global_step)
        if self.seconds >= self.limit:
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._bar.close()


class TimedTrainer(FiniteTrainer):
    """`Trainer` on `TokenBatches`, with a rate that follows the clock.

    now: the clock; that of the processor is fair on a busy machine, with one thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: TokenBatches,
        folder: Path,
        seconds: float,
        max_steps: int,
        learning_rate: float,
        seed: int,
        title: str,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        training = training_arguments(
            folder,
            seed,
            max_steps=max_steps,
            learning_rate=learning_rate,
            weight_decay=0.01,
            logging_strategy="no",
            include_num_input_tokens_seen="non_padding",
        )
        self.budget = TimeBudget(seconds, max_steps, title, now)
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(training, model)
        optimizer = optimizer_class(hea.optimizer_groups(model, training.weight_decay), **options)
        scheduler = LambdaLR(optimizer, lambda steps: warm_up_then_fall(self.budget.share(steps)))
        super().__init__(model=model, args=training, train_dataset=batches, optimizers=(optimizer, scheduler))
        for callback in (ProgressCallback, PrinterCallback):
            self.remove_callback(callback)
        self.add_callback(self.budget)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.budget.losses.append((self.budget.seconds, loss.item()))
        return loss

    def run(self) -> dict[str, Any]:
        """Train and return what was done: seconds, steps, tokens, losses, and why it stopped early, if it did."""
        self.train()
        seconds, tokens = self.budget.seconds, int(self.state.num_input_tokens_seen)
        return {
            "train_seconds": seconds,
            "num_steps": self.state.global_step,
            "train_tokens": tokens,
            "train_examples": self.train_dataset.examples_served,
            "train_tokens_per_second": tokens / seconds,
            "stopped": self.stopped,
            "losses": self.budget.losses,
        }


def warm_up_then_fall(share: float) -> float:
    """Return the factor of the learning rate: up in a line, then down to 0.

    >>> [round(warm_up_then_fall(share), 2) for share in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    # the first step must not be lost at a rate of 0
    return max(share, 0.01) / WARMUP if share < WARMUP else (1 - share) / (1 - WARMUP)


def smoothed(losses: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the seconds and the running means of (second, loss) pairs, each new loss weighing a tenth.

    >>> smoothed([(1.0, 5.0), (2.0, 5.0), (3.0, 4.0)])
    ([1.0, 2.0, 3.0], [5.0, 5.0, 4.9])
    """
    means = [losses[0][1]]
    for _, loss in losses[1:]:
        means.append(means[-1] + (loss - means[-1]) / 10)
    return [second for second, _ in losses], means
