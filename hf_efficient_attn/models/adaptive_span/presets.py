"""The authors' networks and a modern one, as fields of `AdaptiveSpanConfig`.

Every function is a classmethod of it; keywords change or add fields. The paper does not print the vocabularies of 28
and 205 symbols, which include an end of line; with them the parameter counts round to those that it prints.
"""

from typing import Any, TypeVar

Config = TypeVar("Config")

SMALL: dict[str, Any] = {"span_penalty": 5e-7, "activation_dropout": 0.3, "attention_dropout": 0.3}
LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "span_penalty": 5e-7,
    "activation_dropout": 0.4,
    "attention_dropout": 0.4,
}
TEXT8, ENWIK8 = {"vocab_size": 28}, {"vocab_size": 205}


def text8_small(cls: type[Config], **fields: Any) -> Config:
    """Return the 12-layer network for text8: 38,357,116 parameters, span limit 8,192.

    Source: Sukhbaatar et al. (arXiv:1905.07799), section 3, and the authors' scripts.
    """
    return cls(**{**SMALL, **TEXT8, **fields})


def text8_large(cls: type[Config], **fields: Any) -> Config:
    """Return the 24-layer network for text8: 208,638,172 parameters; for the source see `text8_small`."""
    return cls(**{**LARGE, **TEXT8, **fields})


def enwik8_small(cls: type[Config], **fields: Any) -> Config:
    """Return the 12-layer network for enwik8: 38,538,541 parameters; for the source see `text8_small`."""
    return cls(**{**SMALL, **ENWIK8, **fields})


def enwik8_large(cls: type[Config], **fields: Any) -> Config:
    """Return the 24-layer network for enwik8: 208,910,221 parameters; for the source see `text8_small`."""
    return cls(**{**LARGE, **ENWIK8, **fields})


def enwik8_demo(cls: type[Config], **fields: Any) -> Config:
    """Return the authors' small script for one GPU: 8 layers, 4 heads, span limit 1,024; 6,480,621 parameters."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "span_limit": 1024,
        "span_penalty": 2e-6,
    }
    return cls(**{**shape, **ENWIK8, **fields})


def modern(cls: type[Config], **fields: Any) -> Config:
    """Return a modern network: pre-norm RMSNorm, gated MLP, rotary positions; a token reads itself.

    No paper trains it; spans and penalty work as in the authors' network.
    """
    preset: dict[str, Any] = {
        "include_self": True,
        "norm_position": "pre",
        "norm_type": "rmsnorm",
        "hidden_act": "silu",
        "gated_mlp": True,
        "mlp_bias": False,
        "lm_head_bias": False,
        "position_embedding_type": "rope",
        "matrix_init": "normal",
        "embedding_init_std": None,
        "tie_word_embeddings": True,
    }
    return cls(**{**preset, **fields})
