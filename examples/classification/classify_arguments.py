"""The arguments of `classify_documents.py`."""

from dataclasses import dataclass, field

from corpora import spam_assassin, state_of_the_union
from shared.arguments import UsageError, check_window
from shared.own_data import Column
from shared.task_data import TaskDataArguments
from shared.task_tokenizer import special_token_ids
from shared.timed_training import TimedTrainingArguments
from transformers import PreTrainedTokenizerBase

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

CORPORA = {"spam_assassin": spam_assassin, "state_of_the_union": state_of_the_union}
TITLES = {
    "spam_assassin": "spam from the mails of SpamAssassin",
    "state_of_the_union": "the president's party from State of the Union addresses",
}


@dataclass
class ModelArguments:
    """The two models: one shape, two lengths."""

    max_length: int = field(default=8192, metadata={"help": "Tokens that the sparse model reads of a document."})
    train_length: int = field(
        default=8192,
        metadata={"help": "Tokens of the pieces that the sparse model is trained on: fewer of them, more steps."},
    )
    dense_length: int = field(default=512, metadata={"help": "Tokens that the dense model reads of a document."})
    attention_window: int = field(
        default=128, metadata={"help": "Tokens that a token of the sparse model reads around itself, both sides, even."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": 'Fields of both configs: "hidden_size=256,num_hidden_layers=6".'}
    )
    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the tokenizer that is trained on the corpus."})
    seeds: str = field(default="0,1,2", metadata={"help": "Train both models once with each of these seeds."})

    def __post_init__(self) -> None:
        check_window(self.attention_window)
        if not 4 <= self.dense_length <= self.max_length:
            raise UsageError(
                f"--dense_length {self.dense_length} must be from 4 to --max_length, which is {self.max_length}."
            )
        if not 4 <= self.train_length <= self.max_length:
            raise UsageError(
                f"--train_length {self.train_length} must be from 4 to --max_length, which is {self.max_length}."
            )
        self.seed_list()

    def seed_list(self) -> list[int]:
        """Return the seeds in order, each once."""
        try:
            seeds = list(dict.fromkeys(int(seed) for seed in self.seeds.split(",")))
        except ValueError:
            raise UsageError(f'--seeds {self.seeds}: integers with commas between them, such as "0,1,2".') from None
        if min(seeds) < 0:
            raise UsageError(f"--seeds {self.seeds}: seeds are 0 or larger.")
        return seeds

    def config(
        self, is_sparse: bool, labels: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> hea.SparseTransformerConfig:
        """Return the config of one model; the dense one differs by its missing pattern and its length alone."""
        side = self.attention_window // 2
        return hea.SparseTransformerConfig(
            attention_pattern=Band(side, side) if is_sparse else None,
            global_tokens="first" if is_sparse else None,
            max_position_embeddings=self.max_length if is_sparse else self.dense_length,
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            norm_position="pre",
            position_embedding_type="rope",
            embedding_dropout=0.1,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            classifier_dropout=0.1,
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
            **special_token_ids(tokenizer),
        )


@dataclass
class DataArguments(TaskDataArguments):
    """Which documents. With none named, a corpus of `examples/corpora`."""

    corpus: str = field(default="spam_assassin", metadata={"help": f"One of {', '.join(CORPORA)}."})
    text_column_name: str = field(default="text", metadata={"help": "The column of the document."})
    label_column_name: str = field(default="label", metadata={"help": "The column of its class, a number or a word."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corpus not in CORPORA:
            raise UsageError(f"--corpus {self.corpus} is unknown. Allowed: {', '.join(CORPORA)}.")

    def columns(self) -> list[Column]:
        """Return the columns that are read."""
        label = {"values": (str, int, float), "allowed": "a word or a number"}
        return [
            Column(self.text_column_name, "--text_column_name"),
            Column(self.label_column_name, "--label_column_name", **label),
        ]

    @property
    def title(self) -> str:
        return f"Classes of {self.source}" if self.source else f"Telling {TITLES[self.corpus]}"


@dataclass
class ClassifyTrainingArguments(TimedTrainingArguments):
    """A short run on a small machine as defaults."""

    output_dir: str | None = "outputs/classify_documents"
    learning_rate: float = 3e-3
    seconds_per_model: float = field(
        default=60.0, metadata={"help": "Training time of each model and seed, in seconds of training steps."}
    )
    tokens_per_eval_batch: int = field(default=65_536, metadata={"help": "Tokens of a batch in evaluation."})
