"""The arguments of `train_char_lm.py`."""

import math
import platform
from dataclasses import dataclass, field
from pathlib import Path

import torch
from shared.arguments import UsageError
from transformers import TrainingArguments

import hf_efficient_attn as hea

KINDS = ("fixed", "adaptive", "dynamic")
NETWORKS = {"authors": hea.AdaptiveSpanConfig, "modern": hea.AdaptiveSpanConfig.modern}
CORPORA = ("stdlib", "python_docs")
OPTIMIZERS = {"adagrad": hea.ClippedAdagrad, "adamw": torch.optim.AdamW}
# Sukhbaatar et al. (arXiv:1905.07799) train all parameters by Adagrad at 0.07, each tensor clipped at 0.03; AdamW moves
# a span by about its rate times the span limit at every step
LEARNING_RATES = {"adagrad": 0.07, "adamw": 2e-3}
SPAN_LEARNING_RATES = {"adagrad": None, "adamw": 5e-3}
MAX_GRAD_NORMS = {"adagrad": 0.0, "adamw": 1.0}


@dataclass
class ModelArguments:
    """Which kinds of span, and the shape that all of them have."""

    spans: list[str] = field(
        default_factory=lambda: list(KINDS),
        metadata={"help": f"Kinds of span to train one after the other, of: {', '.join(KINDS)}."},
    )
    network: str = field(
        default="authors",
        metadata={"help": "authors (post-norm, relative positions) or modern (pre-norm, gated, rotary)."},
    )
    span_limit: int = field(default=1024, metadata={"help": "The longest span, in bytes; all that `fixed` reads."})
    span_penalty: float = field(
        default=2e-6, metadata={"help": "What a byte of span costs in a layer, in nats; the paper's below 8,192."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": 'Fields of all configs: "hidden_size=256,num_hidden_layers=8".'}
    )

    def __post_init__(self) -> None:
        self.spans = list(dict.fromkeys(self.spans))
        for kind in self.spans:
            if kind not in KINDS:
                raise UsageError(f"--spans {kind} is unknown. Allowed: {', '.join(KINDS)}.")
        if self.network not in NETWORKS:
            raise UsageError(f"--network {self.network} is unknown. Allowed: {', '.join(NETWORKS)}.")

    def config(self, kind: str) -> hea.AdaptiveSpanConfig:
        """Return the config of one kind, without `config_overrides`."""
        return NETWORKS[self.network](
            span=kind,
            span_limit=self.span_limit,
            span_penalty=self.span_penalty,
            vocab_size=256,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
        )


@dataclass
class DataArguments:
    """Which text. With none named, the Python standard library's source."""

    corpus: str = field(
        default="stdlib",
        metadata={"help": "stdlib (on every disk) or python_docs (Debian's package of the documentation, 13 MB)."},
    )
    train_file: str | None = field(
        default=None,
        metadata={"help": "A file of any bytes, such as text8 or enwik8: 90 percent to train on, 5 and 5 to test."},
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of that dataset."})
    text_column_name: str = field(default="text", metadata={"help": "Its column of texts, joined by line ends."})
    segment_bytes: int = field(default=256, metadata={"help": "Bytes that a model reads at once; it remembers more."})
    max_train_bytes: int | None = field(
        default=None, metadata={"help": "Use at most so much text. Default: 8 MB of the standard library, else all."}
    )
    max_eval_bytes: int = field(default=32_768, metadata={"help": "Text of an evaluation during training."})
    max_test_bytes: int = field(default=262_144, metadata={"help": "Text of the last evaluation, which is reported."})
    packages_from: Path | None = field(
        default=None, metadata={"help": "A folder that holds the corpus's package. Default: it is downloaded once."}
    )
    accept_other_version: bool = field(
        default=False, metadata={"help": "Take another version of the package where the pinned one is not served."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise UsageError("Give --dataset_name or --train_file, not both.")
        if self.train_file and not Path(self.train_file).is_file():
            raise UsageError(f"--train_file {self.train_file}: no such file.")
        if self.corpus not in CORPORA:
            raise UsageError(f"--corpus {self.corpus} is unknown. Allowed: {', '.join(CORPORA)}.")
        for name in ("segment_bytes", "max_train_bytes", "max_eval_bytes", "max_test_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value} must be at least 1.")

    @property
    def source(self) -> str:
        """What the text is, in words."""
        if self.dataset_name or self.train_file:
            return self.dataset_name or Path(self.train_file).name
        if self.corpus == "stdlib":
            return f"the source of the standard library of Python {platform.python_version()}"
        return "the documentation of Python 3.11"


@dataclass
class CharTrainingArguments(TrainingArguments):
    """`TrainingArguments` with a short run on a small machine as defaults."""

    output_dir: str | None = "outputs/train_char_lm"
    optimizer: str = field(
        default="adamw",
        metadata={
            "help": "adamw: spans at a rate of their own, by --lr_scheduler_type and --max_grad_norm; adagrad: the "
            "paper's, each tensor clipped alone, at a constant rate after warm-up."
        },
    )
    learning_rate: float | None = field(
        default=None, metadata={"help": f"Default: {LEARNING_RATES}, the former of the paper."}
    )
    span_learning_rate: float | None = field(
        default=None, metadata={"help": "Rate of the spans alone. Default: 5e-3 for adamw, else that of all."}
    )
    max_grad_norm: float | None = field(default=None, metadata={"help": "Default: 1 for adamw; adagrad clips itself."})
    max_steps: int = field(default=200, metadata={"help": "Optimizer steps of each kind."})
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    warmup_steps: float = 0.1
    eval_strategy: str = "steps"
    eval_steps: float | None = 0.1
    logging_steps: float = 0.025
    save_strategy: str = "no"
    train_sampling_strategy: str = "sequential"
    dataloader_pin_memory: bool = torch.cuda.is_available()
    report_to: None | str | list[str] = "none"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer {self.optimizer} is unknown. Allowed: {', '.join(OPTIMIZERS)}.")
        if self.max_steps < 1:
            raise UsageError(f"--max_steps {self.max_steps} must be at least 1; passes over the text are not counted.")
        for name, defaults in (
            ("learning_rate", LEARNING_RATES),
            ("span_learning_rate", SPAN_LEARNING_RATES),
            ("max_grad_norm", MAX_GRAD_NORMS),
        ):
            if getattr(self, name) is None:
                setattr(self, name, defaults[self.optimizer])
        if 0 < self.warmup_steps < 1:
            self.warmup_steps = math.ceil(self.warmup_steps * self.max_steps)
        super().__post_init__()
        if self.train_sampling_strategy != "sequential":
            raise UsageError("--train_sampling_strategy must be sequential: each segment goes on from the one before.")
