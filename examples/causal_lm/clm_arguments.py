"""The arguments of `train_clm.py`, and their reading into blocks, rates and config fields."""

import ast
import math
import platform
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from shared.arguments import UsageError, did_you_mean, parse_arguments, parse_json_file
from transformers import PreTrainedConfig, TrainingArguments

from hf_efficient_attn import SimplifiedTransformerConfig

# He & Hofmann (arXiv:2311.01906, appendix D): 1e-3, and 3e-4 for V-SkipInit. SAS-P without norms has no causal rate in
# the paper; its BERT takes 2e-3 where SAS-P takes 3e-3, and the same ratio is kept here.
PAPER_LEARNING_RATES = {
    "pre_ln": 1e-3,
    "parallel": 1e-3,
    "v_skipinit": 3e-4,
    "sas": 1e-3,
    "sas_p": 1e-3,
    "sas_p_no_norm": 6.7e-4,
}
DEFAULT_SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "position_embedding_type": "rope",  # reaches the same loss in half the steps of the family's sinusoids
}
HEAD_SIZE = 32
SET_ELSEWHERE = {
    "block": "--blocks",
    "vocab_size": "--vocab_size or --tokenizer_name",
    "is_causal": "this script",
    "pad_token_id": "the tokenizer",
    "bos_token_id": "the tokenizer",
    "eos_token_id": "the tokenizer",
}
DEFAULT_MAX_STEPS = 600


@dataclass
class ModelArguments:
    """Which models, and how fast they learn."""

    blocks: str = field(
        default="pre_ln,sas_p",
        metadata={"help": f"Blocks to train one after the other, of: {', '.join(PAPER_LEARNING_RATES)}."},
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": 'Fields of the config, for all blocks: "hidden_size=256,num_hidden_layers=6".'},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer to use, by folder or Hub name. Default: train one on the corpus."}
    )
    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the tokenizer that is trained."})
    learning_rates: str | None = field(
        default=None, metadata={"help": 'Rates of single blocks: "sas=2e-3,sas_p=2e-3". They win over --learning_rate.'}
    )
    learning_rate_grid: str | None = field(
        default=None,
        metadata={"help": 'Train each block at each of these rates, "5e-4,1e-3,2e-3", and keep the best.'},
    )

    def block_list(self) -> list[str]:
        """Return the blocks in order, each once."""
        blocks = list(dict.fromkeys(name.strip() for name in self.blocks.split(",") if name.strip()))
        for name in blocks:
            if name not in PAPER_LEARNING_RATES:
                raise UsageError(_unknown("block in --blocks", name, PAPER_LEARNING_RATES))
        if not blocks:
            raise UsageError(f"--blocks is empty. Allowed: {', '.join(PAPER_LEARNING_RATES)}.")
        return blocks

    def rates_of(self, block: str, learning_rate: float | None) -> list[float]:
        """Return the rates to train `block` at: the grid, its own, the common one, or the paper's."""
        if self.learning_rate_grid:
            return [_number("--learning_rate_grid", rate) for rate in self.learning_rate_grid.split(",")]
        own = _pairs("--learning_rates", self.learning_rates, PAPER_LEARNING_RATES)
        if block in own:
            return [_number("--learning_rates", own[block])]
        return [learning_rate if learning_rate is not None else PAPER_LEARNING_RATES[block]]

    def config_fields(self) -> dict[str, Any]:
        """Return the shape: `config_overrides` over the default one; MLP and heads follow a width given alone."""
        excluded = {*SET_ELSEWHERE, *(each.name for each in fields(PreTrainedConfig))}
        allowed = [each.name for each in fields(SimplifiedTransformerConfig) if each.name not in excluded]
        overrides = _pairs("--config_overrides", self.config_overrides, allowed)
        values = {name: _literal(value) for name, value in overrides.items()}
        if isinstance(width := values.get("hidden_size"), int):
            values = {"intermediate_size": 4 * width, "num_attention_heads": max(1, width // HEAD_SIZE), **values}
        return {**DEFAULT_SHAPE, **values}


@dataclass
class DataTrainingArguments:
    """Which text. With none named, the Python standard library's source."""

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of that dataset."})
    train_file: str | None = field(default=None, metadata={"help": "A .txt, .json or .jsonl file to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "A file of the same kind to evaluate on."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Share of the rows held out where there is no validation split or file."}
    )
    text_column_name: str | None = field(default=None, metadata={"help": "Default: `text`, else the first column."})
    block_size: int = field(default=128, metadata={"help": "Length of a training sequence in tokens."})
    max_train_bytes: int | None = field(
        default=None, metadata={"help": "Use at most this much text. Default: 8 MB of the standard library, else all."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use at most this many rows of text."})
    max_eval_samples: int | None = field(
        default=128, metadata={"help": "Evaluate on this many blocks, evenly spaced over the held-out text."}
    )
    prompt: str | None = field(
        default=None, metadata={"help": "What the sample continues. Default: the start of a held-out block."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise UsageError("Give --dataset_name or --train_file, not both.")
        if self.validation_file and not self.train_file:
            raise UsageError("--validation_file needs a --train_file of the same kind.")
        if self.block_size < 2:
            raise UsageError(f"--block_size {self.block_size} leaves nothing to predict; it must be at least 2.")
        if not 0 < self.validation_split_percentage < 100:
            raise UsageError(f"--validation_split_percentage {self.validation_split_percentage} must be 1 to 99.")
        for name in ("train_file", "validation_file"):
            value = getattr(self, name)
            if value and not Path(value).is_file():
                raise UsageError(f"--{name} {value}: no such file.")
            if value and Path(value).suffix not in (".txt", ".json", ".jsonl"):
                raise UsageError(f"--{name} {value}: must end in .txt, .json or .jsonl.")

    @property
    def uses_stdlib(self) -> bool:
        return not (self.dataset_name or self.train_file)

    @property
    def reads_lines(self) -> bool:
        """Whether a row is a line of a text file, and not a document of its own."""
        return self.train_file is not None and self.train_file.endswith(".txt")

    @property
    def source(self) -> str:
        """What the text is, in words for a report."""
        if self.uses_stdlib:
            return f"the standard library of Python {platform.python_version()}"
        return self.dataset_name or Path(self.train_file).name

    def source_settings(self) -> dict[str, Any]:
        """Return what decides the token blocks, to recognise blocks already made."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prompt"}
        for name in ("train_file", "validation_file"):
            if settings[name]:
                status = Path(settings[name]).stat()
                settings[name] = [Path(settings[name]).name, status.st_size, status.st_mtime_ns]
        return {**settings, "source": self.source}


@dataclass
class ClmTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's optimiser settings and a short run on a small machine as defaults."""

    output_dir: str | None = "outputs/train_clm"
    learning_rate: float | None = field(
        default=None, metadata={"help": "Rate of all blocks. Default: the paper's rate of each block."}
    )
    max_steps: int | None = field(
        default=None, metadata={"help": f"Default: {DEFAULT_MAX_STEPS}, or as --num_train_epochs says."}
    )
    num_train_epochs: float | None = field(
        default=None, metadata={"help": "Passes over the corpus, without --max_steps."}
    )
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 32
    weight_decay: float = 0.1
    warmup_steps: float = 0.05
    eval_strategy: str = "steps"
    eval_steps: float | None = 0.1
    save_steps: float = 0.1
    logging_steps: float = 0.02
    save_total_limit: int | None = 2
    load_best_model_at_end: bool | None = True
    ddp_find_unused_parameters: bool | None = False
    dataloader_pin_memory: bool = torch.cuda.is_available()
    report_to: None | str | list[str] = "none"

    def __post_init__(self) -> None:
        if self.max_steps is None:
            self.max_steps = -1 if self.num_train_epochs is not None else DEFAULT_MAX_STEPS
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0
        if (self.resume_from_checkpoint or "").lower() in ("", "false"):
            self.resume_from_checkpoint = None
        for name in ("eval_steps", "save_steps", "logging_steps"):
            share = getattr(self, name)
            if self.max_steps > 0 and share is not None and 0 < share < 1:
                setattr(self, name, math.ceil(share * self.max_steps))  # as Trainer would, but the same at a resume
        super().__post_init__()


def parse_clm_arguments(argv: list[str]) -> tuple[ModelArguments, DataTrainingArguments, ClmTrainingArguments]:
    """Return the three groups, from flags or from the one JSON file named in their place."""
    classes = (ModelArguments, DataTrainingArguments, ClmTrainingArguments)
    words = with_resume_value(argv)
    if not (words and words[0].endswith(".json")):
        return parse_arguments(classes, words)
    model, data, training = parse_json_file(classes, words[0])
    if len(words) == 3 and words[1] == "--resume_from_checkpoint":
        training.resume_from_checkpoint = words[2]
    elif len(words) > 1:
        raise UsageError(f"After a JSON file only --resume_from_checkpoint may follow, not {' '.join(words[1:])}.")
    return model, data, training


def with_resume_value(argv: list[str]) -> list[str]:
    """Return argv with `--resume_from_checkpoint` alone read as `--resume_from_checkpoint True`."""
    followers = [*argv[1:], "--"]
    completed = []
    for word, follower in zip(argv, followers, strict=False):
        completed.append(word)
        if word == "--resume_from_checkpoint" and follower.startswith("--"):
            completed.append("True")
    return completed


def _pairs(flag: str, text: str | None, allowed: Any) -> dict[str, str]:
    """Return {"a": "1", "b": "2"} from "a=1,b=2"; commas inside brackets do not part."""
    pairs = {}
    for item in re.split(r",(?![^\[\]]*\])", text or ""):
        if not item.strip():
            continue
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise UsageError(f"{flag}: {item!r} is not of the form name=value.")
        if name in SET_ELSEWHERE and name not in allowed:
            raise UsageError(f"{flag}: {name} is set by {SET_ELSEWHERE[name]}.")
        if name not in allowed:
            raise UsageError(_unknown(f"name in {flag}", name, allowed))
        pairs[name] = value
    return pairs


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a number.") from None


def _unknown(what: str, name: str, allowed: Any) -> str:
    return f"Unknown {what}: {name!r}. Allowed: {', '.join(allowed)}.{did_you_mean(name, allowed)}"
