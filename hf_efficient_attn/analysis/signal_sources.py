"""The models and tokens `analyze signal` looks at: checkpoints, configs, and named blocks at their random start."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_efficient_attn.analysis.model_text import CONFIGS, decoded, find_saved, read_bytes
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.hub.saved_config import load_config, readable
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES, HEAD_GAINS

# Learned positions start as noise, so that tokens start unrelated (cosine 0); sinusoids start at a cosine of 0.5.
DEFAULT_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "position_embedding_type": "learned",
}
# what SAS trains beside α, β and γ
OTHER_GAINS = [name for name in BLOCK_STYLES["sas"].trainable if name not in HEAD_GAINS]


@dataclass(frozen=True)
class NamedBlock:
    """A block for `--model`: how a legend calls it, and the config fields that make it."""

    title: str
    fields: dict[str, Any]


NAMED_BLOCKS = {
    "pre_ln": NamedBlock("Pre-LN (skips, softmax)", {"block": "pre_ln"}),
    "parallel": NamedBlock("parallel (one skip, softmax)", {"block": "parallel"}),
    "v_skipinit": NamedBlock("V-SkipInit (no attention skip, shaped)", {"block": "v_skipinit"}),
    "sas": NamedBlock("SAS (no attention skip, shaped)", {"block": "sas"}),
    "sas_p": NamedBlock("SAS-P (no skip, shaped)", {"block": "sas_p"}),
    "sas_p_no_norm": NamedBlock("SAS-P without norms (no skip, shaped)", {"block": "sas_p_no_norm"}),
    # SAS with α = γ = 0: nothing but shaping is taken away. W^Q then starts as in plain attention, at N(0, 0.02).
    "sas_unshaped": NamedBlock(
        "SAS unshaped (no attention skip, softmax)",
        {"block": "sas", "identity_gain": 0.0, "centering_gain": 0.0, "trainable_gains": OTHER_GAINS},
    ),
    # equation 4 of the paper: α·I + β·A with α = 1, β = 0 at the start
    "value_skipinit": NamedBlock(
        "SAS with value-SkipInit (no attention skip, αI + βA)",
        {
            "block": "sas",
            "identity_gain": 1.0,
            "softmax_gain": 0.0,
            "centering_gain": 0.0,
            "trainable_gains": ["identity_gain", "softmax_gain", *OTHER_GAINS],
        },
    ),
}


def label(source: str) -> str:
    """Return what a legend calls `source`: the title of a named block, else the last two parts of a path or Hub id."""
    if source in NAMED_BLOCKS:
        return NAMED_BLOCKS[source].title
    return "/".join(Path(source).parts[-2:])


def load_model(source: str, seed: int) -> Any:
    """Return the backbone `source` stands for, in float32; weights that are not loaded are drawn from `seed`.

    Args:
        source: a name in `NAMED_BLOCKS`, a config.json, a checkpoint folder or a Hub id.

    Raises:
        InputError: a path at which nothing is saved, or what transformers cannot read.
        CheckpointError: no folder, and the Hub has none of this name or cannot be asked.
    """
    if source in NAMED_BLOCKS:
        return _at_start(SimplifiedTransformerConfig(**DEFAULT_SHAPE, **NAMED_BLOCKS[source].fields), seed)
    path = Path(source)
    _check_path(source, path)
    if path.suffix == ".json":
        return _at_start(load_config(source), seed)
    verbosity = logging.get_verbosity()
    # that a head is left out is meant
    logging.set_verbosity_error()
    try:
        with readable(source):
            return AutoModel.from_pretrained(find_saved(source), dtype=torch.float32)
    finally:
        logging.set_verbosity(verbosity)


def _check_path(source: str, path: Path) -> None:
    """Raise InputError for a path at which there is no saved model."""
    is_local = path.is_absolute() or source.startswith(".") or len(path.parts) > 2 or path.suffix == ".json"
    if is_local and not path.exists():
        raise InputError(f"{source}: no such file or folder.")
    if path.is_file() and path.suffix != ".json":
        raise InputError(f"{source}: a file. Give the folder of a saved model, or a config.json.")
    if path.is_dir() and not any((path / name).is_file() for name in CONFIGS):
        raise InputError(f"{source}: the folder holds no config.json, so it is no saved model.")


def _at_start(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModel.from_config(config, dtype=torch.float32)


def reads_text(source: str) -> bool:
    """Return whether a source of `load_model` has trained weights, which text makes sense to."""
    return source not in NAMED_BLOCKS and not source.endswith(".json")


def load_tokens(
    source: str, model: Any, tokens: int, batch_size: int, seed: int, text: Path | None, random_tokens: bool
) -> torch.Tensor:
    """Return the token ids to send through `model`: text for a checkpoint, else random ids. Shape [batch_size, tokens].

    The text is cut into `batch_size` pieces of equal length, of which the first `tokens` tokens are taken.

    Raises:
        InputError: a checkpoint without tokenizer, a text file that is not there, not in UTF-8 or too short.
    """
    if random_tokens or not reads_text(source):
        generator = torch.Generator("cpu").manual_seed(seed)
        vocab_size = model.config.get_text_config().vocab_size
        return torch.randint(vocab_size, (batch_size, tokens), generator=generator)
    saved = find_saved(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(saved)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source}: it has no tokenizer to read text with. Save one beside it, or pass --random-tokens."
        ) from error
    path = Path(argparse.__file__) if text is None else text
    content = decoded(read_bytes(path))
    size = len(content) // batch_size
    pieces = [content[i * size : (i + 1) * size] for i in range(batch_size)]
    rows = tokenizer(pieces, truncation=True, max_length=tokens)["input_ids"]
    shortest = min(len(row) for row in rows)
    if shortest < tokens:
        raise InputError(
            f"{path.name} is too short for {batch_size} sequences of {tokens} tokens: a piece has only {shortest}. "
            "Pass a longer --text, or fewer --tokens or a smaller --batch-size."
        )
    return torch.tensor(rows)
