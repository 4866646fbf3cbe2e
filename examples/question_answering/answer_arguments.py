"""The arguments of `answer_questions.py`."""

from dataclasses import dataclass, field

from shared.arguments import UsageError, check_window
from shared.task_data import TaskDataArguments
from shared.task_tokenizer import special_token_ids
from shared.timed_training import TimedTrainingArguments
from transformers import PreTrainedTokenizerBase

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

FOLDOC_SAMPLES = 2000  # as many as a short training gets to see


@dataclass
class ModelArguments:
    """One model, trained and asked twice: with the whole text, and with its start."""

    max_length: int = field(default=4096, metadata={"help": "Tokens of question and text that the model reads."})
    truncated_length: int = field(default=512, metadata={"help": "The same for the model that reads only the start."})
    attention_window: int = field(
        default=64, metadata={"help": "Tokens that a token reads around itself, both sides together, even."}
    )
    max_answer_tokens: int = field(default=100, metadata={"help": "Longest answer in tokens."})
    config_overrides: str | None = field(
        default=None, metadata={"help": 'Fields of the config: "hidden_size=256,num_hidden_layers=6".'}
    )
    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the tokenizer that is trained on the corpus."})

    def __post_init__(self) -> None:
        check_window(self.attention_window)
        if not 32 <= self.truncated_length <= self.max_length:
            raise UsageError(
                f"--truncated_length {self.truncated_length} must be from 32 to --max_length {self.max_length}."
            )
        if self.max_answer_tokens < 1:
            raise UsageError(f"--max_answer_tokens {self.max_answer_tokens} must be at least 1.")

    def config(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> hea.SparseTransformerConfig:
        """Return the config of a model that reads `max_length` tokens: a window, and global tokens in the question."""
        side = self.attention_window // 2
        return hea.SparseTransformerConfig(
            attention_pattern=Band(side, side),
            global_tokens="question",
            max_position_embeddings=max_length,
            vocab_size=len(tokenizer),
            type_vocab_size=2,  # marks the words of the question
            hidden_size=64,
            intermediate_size=256,
            initializer_range=0.1,  # about 1 / √hidden_size; the usual 0.02 is made for widths near 768
            num_hidden_layers=3,
            num_attention_heads=4,
            norm_position="pre",
            position_embedding_type="rope",
            embedding_dropout=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **special_token_ids(tokenizer),
        )


@dataclass
class DataArguments(TaskDataArguments):
    """Which questions, in SQuAD's form. With none named, about the entries of FOLDOC."""

    num_entries: int = field(default=16, metadata={"help": "Dictionary entries in the text of a FOLDOC question."})
    train_entries: int | None = field(
        default=None, metadata={"help": "The same in training. Default: as --num_entries."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": f"Train on at most so many. Default: {FOLDOC_SAMPLES:,} of FOLDOC, else all."}
    )
    max_eval_samples: int | None = field(default=256, metadata={"help": "Evaluate on at most so many questions."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None and self.max_train_samples is None:
            self.max_train_samples = FOLDOC_SAMPLES
        if self.train_entries is None:
            self.train_entries = self.num_entries
        for name in ("num_entries", "train_entries"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)} must be at least 1.")


@dataclass
class AnswerTrainingArguments(TimedTrainingArguments):
    """A short run on a small machine as defaults."""

    output_dir: str | None = "outputs/answer_questions"
    seconds_per_model: float = field(
        default=120.0, metadata={"help": "Training time of each model, in seconds of training steps."}
    )
    tokens_per_eval_batch: int = field(default=65_536, metadata={"help": "Tokens of a batch in evaluation."})
