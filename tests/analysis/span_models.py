"""Tiny models with known spans, and the command `analyze spans` on them."""

import json
from pathlib import Path
from typing import Any

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "span_limit": 16,
    "span_ramp": 4,
}
# the spans of two layers with three heads, in tokens
TOKENS = [[0.0, 8.0, 2.5], [14.0, 1.0, 0.5]]


def network(**fields: Any) -> Any:
    """Return a model that gives equal scores to all keys, so that attention is what its masks are."""
    torch.manual_seed(0)
    config = hea.AdaptiveSpanConfig(**{**SHAPE, "position_embedding_type": "none", **fields})
    model = hea.AdaptiveSpanForCausalLM(config) if config.is_causal else hea.AdaptiveSpanModel(config)
    for layer in model.base_model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    return model


def adaptive(**fields: Any) -> Any:
    model = network(span="adaptive", **fields)
    for layer, tokens in zip(model.base_model.layers, TOKENS, strict=True):
        layer.self_attn.spans.ratio.data = torch.tensor(tokens) / model.config.span_limit
    return model


def analyze(model: Any, folder: Path, *arguments: Any) -> dict[str, Any]:
    """Save a model, run the command on it, and return its JSON."""
    model.save_pretrained(folder / "model")
    main(["analyze", "spans", str(folder / "model"), "--output", str(folder / "out"), *map(str, arguments)])
    assert (folder / "out" / "spans.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "out" / "spans.json").read_text(encoding="utf-8"))


def save_words(folder: Path) -> None:
    """Save a tokenizer of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "ship": 2, "lamp": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
