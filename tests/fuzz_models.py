"""Tiny models and their mutated configs, for `tests/fuzz_patterns.py`."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_mutations import PATTERNS, VALUES, a_pattern, draw_length, mutate
from transformers import AutoConfig, AutoModel, LlamaConfig

import hf_efficient_attn as hea

SMALL = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
NUM_POSITIONS = 2048
# fields of every config of transformers, whose wrong values must be said by whoever reads them
LIBRARY_FIELDS = (
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
    "problem_type",
    "architectures",
    "auto_map",
    "tie_word_embeddings",
    "output_attentions",
    "return_dict",
    "quantization_config",
    "rope_parameters",
    "layer_types",
    "attn_implementation",
    "transformers_version",
    "attention_pattern",
)
# a model is built of configs with no larger numbers, by the end of a field's name; all others say what a model weighs
LARGEST = {"_layers": 8, "_positions": 2**16, "_embeddings": 2**16, "_limit": 2**16, "_seed": 2**63, "_id": 2**63}
LARGEST_WIDTH = 512


def llama() -> Any:
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=NUM_POSITIONS, **SMALL)
    config.attention_pattern = PATTERNS[1].to_dict()
    return config


CONFIGS: list[Callable[[], Any]] = [
    llama,
    lambda: hea.SimplifiedTransformerConfig(
        num_hidden_layers=2, max_position_embeddings=NUM_POSITIONS, position_embedding_type="rope", **SMALL
    ),
    lambda: hea.AdaptiveSpanConfig(num_hidden_layers=2, span_limit=16, **SMALL),
    lambda: hea.AdaptiveSpanConfig.modern(num_hidden_layers=2, span_limit=16, is_causal=False, **SMALL),
    lambda: hea.RoutingTransformerConfig(num_hidden_layers=2, **SMALL),
    lambda: hea.EfficientReformerConfig(num_hidden_layers=2, max_position_embeddings=64, **SMALL),
    lambda: hea.StarTransformerConfig(num_hidden_layers=2, max_position_embeddings=NUM_POSITIONS, **SMALL),
    lambda: hea.SparseTransformerConfig(
        num_hidden_layers=2, max_position_embeddings=NUM_POSITIONS, attention_pattern=[PATTERNS[1], None], **SMALL
    ),
    lambda: hea.SparseTransformerConfig.longformer(
        num_hidden_layers=2, max_position_embeddings=NUM_POSITIONS, attention_window=4, global_tokens="first", **SMALL
    ),
    lambda: hea.SparseTransformerConfig.sliding(left=5, is_causal=True, num_hidden_layers=2, **SMALL),
    lambda: hea.SparseSeq2SeqConfig(
        encoder_layers=2, decoder_layers=1, max_position_embeddings=64, attention_pattern=PATTERNS[3], **SMALL
    ),
]


def read_config(draw: random.Random, folder: Path) -> Any:
    """Return the config of a mutated config.json."""
    config = draw.choice(CONFIGS)()
    written = config.to_dict() if draw.random() < 0.5 else json.loads(config.to_json_string(use_diff=False))
    written = mutate(written, draw)
    if isinstance(written, dict):
        if draw.random() < 0.3:
            written[draw.choice(LIBRARY_FIELDS)] = draw.choice(VALUES)(draw)
        # without it no class of ours is asked
        written |= {"model_type": config.model_type}
        # transformers makes a list of so many labels
        written.pop("num_labels", None)
    (folder / "config.json").write_text(json.dumps(written))
    return AutoConfig.from_pretrained(folder)


def with_pattern(draw: random.Random) -> Any:
    """Return an unchanged config but for its pattern, a mutated one, in one of the forms of a config."""
    config = draw.choice(CONFIGS)()
    pattern = mutate(a_pattern(draw, 64).to_dict(), draw)
    forms: list[Any] = [
        pattern,
        pattern,
        [pattern, None],
        {"tile": "LG", "patterns": {"L": pattern, "G": {"kind": "full"}}},
        {"encoder": pattern, "decoder": draw.choice([None, pattern])},
    ]
    fields = config.to_dict() | {"attention_pattern": draw.choice(forms)}
    return type(config).from_dict({name: value for name, value in fields.items() if name != "model_type"})


def is_light(config: Any) -> bool:
    """Return whether no number of a config makes its model large."""
    for name, value in config.to_dict().items():
        most = next((number for end, number in LARGEST.items() if name.endswith(end)), LARGEST_WIDTH)
        if isinstance(value, int) and abs(value) > most:
            return False
    return True


def run_model(config: Any, draw: random.Random) -> None:
    """Build the model of a config and run it once."""
    if config.model_type == "llama":
        # the pattern is read where the model first attends; its sizes are not ours to check
        fresh = llama()
        fresh.attention_pattern = getattr(config, "attention_pattern", None)
        config = fresh
    elif not is_light(config):
        return
    model = AutoModel.from_config(config, attn_implementation="efficient").eval()
    # weights take time and memory for all pairs, as their caller asks
    tokens = min(draw_length(draw), 256 if config.output_attentions else NUM_POSITIONS)
    inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, : draw.randint(1, 8)]
    with torch.no_grad():
        model(**inputs)
