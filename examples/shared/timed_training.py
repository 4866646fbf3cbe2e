"""Training for so many seconds: models that cost different times a step are compared at equal time.

Each model is trained by `Trainer` on endless batches of about equally many tokens until its seconds are spent. Its
learning rate follows the clock, not the steps: it warms up and falls to zero within the time, however many steps that
is. Only training steps count, no data preparation, evaluation or saving.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import hf_efficient_attn as hea
from shared.arguments import UsageError
from shared.token_batches import TokenBatches
from shared.training_callbacks import StepClock

NO_LIMIT_OF_STEPS = 10_000_000


@dataclass
class TimedTrainingArguments(TrainingArguments):
    """`TrainingArguments` of a run that ends by the clock."""

    seconds_per_model: float = field(
        default=60.0, metadata={"help": "Training time of each model, in seconds of training steps."}
    )
    tokens_per_step: int = field(
        default=4096, metadata={"help": "Tokens of a batch, padding included; one example may have more."}
    )
    max_steps: int = field(
        default=NO_LIMIT_OF_STEPS, metadata={"help": "End after so many steps if the time is not spent by then."}
    )
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Share of the training time that the rate takes to rise."}
    )
    save_strategy: str = "no"
    eval_strategy: str = "no"
    logging_strategy: str = "no"
    dataloader_pin_memory: bool = torch.cuda.is_available()
    report_to: None | str | list[str] = "none"

    def __post_init__(self) -> None:
        self.include_num_input_tokens_seen = "non_padding"
        super().__post_init__()
        if self.seconds_per_model <= 0:
            raise UsageError(f"--seconds_per_model {self.seconds_per_model:g} must be above 0.")
        if self.tokens_per_step < 1 or self.max_steps < 1:
            raise UsageError(
                f"--tokens_per_step {self.tokens_per_step} and --max_steps {self.max_steps} must be at least 1."
            )
        if not 0 <= self.warmup_steps < 1:
            raise UsageError(
                f"--warmup_steps {self.warmup_steps:g} is a share of the training time here: 0 up to, without, 1."
            )
        if self.gradient_accumulation_steps != 1:
            raise UsageError("--gradient_accumulation_steps has no meaning here: raise --tokens_per_step.")


class TimeBudget(StepClock):
    """Ends training when the seconds are spent, shows a bar of them, and keeps the loss of every step with its time."""

    def __init__(self, seconds: float, max_steps: int, title: str, show_bar: bool) -> None:
        super().__init__()
        self.limit, self.max_steps, self.title, self.show_bar = seconds, max_steps, title, show_bar
        self.losses: list[tuple[float, float]] = []

    def share(self, steps: int) -> float:
        """Return the share of the training that is over: of the time, or of the steps if those end first."""
        return min(1.0, max(self.seconds / self.limit, steps / self.max_steps))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s of training{postfix}"
        self._bar = tqdm(total=self.limit, desc=self.title, bar_format=form, disable=not self.show_bar)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        before = self.seconds
        super().on_step_end(args, state, control, **kwargs)
        self._bar.update(min(self.seconds, self.limit) - min(before, self.limit))
        if self.losses:
            self._bar.set_postfix(loss=f"{self.losses[-1][1]:.3f}", steps=state.global_step)
        if self.seconds >= self.limit:
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._bar.close()


class TimedTrainer(Trainer):
    """`Trainer` on `TokenBatches`, with a rate that follows the clock; `budget` holds seconds and losses."""

    def __init__(self, model: PreTrainedModel, args: TimedTrainingArguments, batches: TokenBatches, title: str) -> None:
        self.budget = TimeBudget(args.seconds_per_model, args.max_steps, title, not args.disable_tqdm)
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        optimizer = optimizer_class(hea.optimizer_groups(model, args.weight_decay), **options)
        scheduler = LambdaLR(optimizer, lambda steps: _warm_up_then_fall(self.budget.share(steps), args.warmup_steps))
        super().__init__(model=model, args=args, train_dataset=batches, optimizers=(optimizer, scheduler))
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        self.add_callback(self.budget)
        self.add_callback(_finite := hea.StopOnNonFiniteLoss())
        self._finite = _finite

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.budget.losses.append((self.budget.seconds, loss.item()))
        return loss

    def run(self) -> dict[str, Any]:
        """Train and return what was done: seconds, steps, tokens, and why it stopped early, if it did."""
        self.train()
        seconds, tokens = self.budget.seconds, int(self.state.num_input_tokens_seen)
        return {
            "train_seconds": seconds,
            "num_steps": self.state.global_step,
            "train_tokens": tokens,
            "train_examples": self.train_dataset.examples_served,
            "train_tokens_per_second": tokens / seconds,
            "stopped": self._finite.reason,
        }


def _warm_up_then_fall(share: float, warmup: float) -> float:
    """Return the factor of the learning rate: up in a line, then down to 0.

    >>> [_warm_up_then_fall(share, 0.2) for share in (0.05, 0.1, 0.2, 0.6, 1.0)]
    [0.25, 0.5, 1.0, 0.5, 0.0]
    """
    # the first step must not be lost at a rate of 0
    return max(share, 0.01) / warmup if share < warmup else (1 - share) / (1 - warmup)
