"""The arguments of `continue_mlm.py`."""

from dataclasses import dataclass, field

import torch
from conversion.pretrained_bert import PACKAGE
from shared.arguments import UsageError, check_window
from shared.task_data import TaskDataArguments
from transformers import TrainingArguments


@dataclass
class ModelArguments:
    """Which checkpoint, and how long it becomes."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": f"A BERT or RoBERTa, by folder or Hub name. Default: that of {PACKAGE.name}."}
    )
    max_length: int = field(default=4096, metadata={"help": "Positions of the long model."})
    attention_window: int = field(
        default=512, metadata={"help": "Tokens that a token of the long model reads around itself, even."}
    )
    source_steps: int = field(
        default=200, metadata={"help": "Steps that the source is trained for first; it learns the head that it lacks."}
    )
    source_batch_size: int = field(default=1, metadata={"help": "Short blocks in each of these steps."})
    source_learning_rate: float = field(default=3e-4, metadata={"help": "Learning rate of these steps."})
    train_source_on: bool = field(
        default=True, metadata={"help": "Train the source, too, on as many tokens as the long model, for comparison."}
    )

    def __post_init__(self) -> None:
        check_window(self.attention_window)
        if self.source_steps < 0 or self.source_batch_size < 1:
            raise UsageError(
                f"--source_steps {self.source_steps} and --source_batch_size {self.source_batch_size} must be at least "
                "0 and 1."
            )


@dataclass
class MlmDataArguments(TaskDataArguments):
    """Which texts. With none named, the documentation of Python."""

    text_column_name: str = field(default="text", metadata={"help": "Column of the texts."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens that are masked."})
    max_eval_blocks: int = field(default=8, metadata={"help": "Long blocks of held-out text, evenly spaced."})


@dataclass
class MlmTrainingArguments(TrainingArguments):
    """`TrainingArguments` with a short run on a small machine as defaults; they are those of the long model."""

    output_dir: str | None = "outputs/continue_mlm"
    max_steps: int = 12
    learning_rate: float = 2e-4
    warmup_steps: float = 0.1
    weight_decay: float = 0.01
    per_device_train_batch_size: int = 1
    save_strategy: str = "no"
    logging_steps: float = 0.1
    dataloader_pin_memory: bool = torch.cuda.is_available()
    report_to: None | str | list[str] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps < 1:
            raise UsageError(f"--max_steps {self.max_steps}: must be at least 1; passes over the text are not counted.")
