"""A tiny model with spans, and the Trainer that reads a text segment by segment, for the tests of training."""

from pathlib import Path
from typing import Any

import torch
import transformers
from models_cases import trainer_arguments

import hf_efficient_attn as hea

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "span_limit": 24,
    "span_ramp": 4,
}
SEGMENT = 8


def build_model(seed: int = 0, **fields: Any) -> hea.AdaptiveSpanForCausalLM:
    """Return a model whose start depends on nothing but the seed and the fields."""
    torch.manual_seed(seed)
    return hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig(**{**SIZES, **fields}))


def text(num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(0, SIZES["vocab_size"], (num_tokens,), generator=torch.Generator().manual_seed(seed))


def build_trainer(
    folder: Path,
    model: torch.nn.Module,
    train: hea.TextSegments,
    optimizer: torch.optim.Optimizer | None = None,
    callbacks: Any = (),
    **changes: Any,
) -> transformers.Trainer:
    """Return a Trainer that reads the segments in order, at a constant rate, and logs every step."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": train.num_rows,
        "per_device_eval_batch_size": train.num_rows,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        **changes,
    }
    return transformers.Trainer(
        model=model,
        args=trainer_arguments(folder, **options),
        train_dataset=train,
        eval_dataset=train,
        data_collator=hea.SegmentCollator(),
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )
