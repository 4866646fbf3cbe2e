"""Published networks, as fields of `CompressedTransformerConfig`; keywords change or add fields."""

from typing import Any, TypeVar

from hf_efficient_attn.patterns.blocks import BlockLocal

Config = TypeVar("Config")

# RoBERTa's layout, which Linformer pretrains
ROBERTA: dict[str, Any] = {
    "vocab_size": 50_265,
    "max_position_embeddings": 512,
    "position_offset": 2,
    "norm_eps": 1e-5,
    "classifier_head": "dense",
    "classifier_pooling": "first",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "embedding_dropout": 0.1,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "classifier_dropout": 0.1,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


def linformer(cls: type[Config], **fields: Any) -> Config:
    """Return a Linformer of any size: every layer projects, and other fields are as they are given, or by default.

    It is an alias: `model_type` stays "compressed_transformer", and `AutoConfig` knows no other, since a later
    transformers may have a "linformer" of its own.
    """
    return cls(mechanism="linformer", **fields)


def linformer_base(cls: type[Config], **fields: Any) -> Config:
    """Return Linformer in RoBERTa-base's layout: 512 tokens, 128 projected keys, one matrix for all layers.

    The paper's tables of efficiency share matrices `layerwise`, the authors' code by default `headwise`. The paper also
    has 256 projected keys, of 512 and of 1,024 tokens.
    """
    return cls(**{**ROBERTA, "projection_sharing": "layerwise", "projection_first": True, **fields})


def linformer_large(cls: type[Config], **fields: Any) -> Config:
    """Return the same in RoBERTa-large's layout, which the authors' code has."""
    return linformer_base(cls, **{**LARGE, **fields})


def performer_base(cls: type[Config], **fields: Any) -> Config:
    """Return linear attention with positive random features in RoBERTa-base's layout.

    `RedrawFeaturesCallback` redraws the features every 1,000 steps, a number of ours.
    """
    own = {"mechanism": "linear", "feature_map": "positive_random", "feature_redraw_steps": 1000}
    return cls(**{**ROBERTA, **own, **fields})


def nystromformer_base(cls: type[Config], **fields: Any) -> Config:
    """Return Nyströmformer in the layout of transformers' model, for 4,096 tokens and with 64 landmarks.

    `inverse_scale="batch"` makes it the same function, for batches of equal lengths that the landmarks divide.
    """
    own = {
        "mechanism": "nystrom",
        "vocab_size": 30_000,
        "hidden_act": "gelu_new",
        "type_vocab_size": 2,
        "position_offset": 2,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "classifier_head": "dense",
        "classifier_pooling": "first",
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "sep_token_id": 2,
        "embedding_dropout": 0.1,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "classifier_dropout": 0.1,
    }
    return cls(**{**own, **fields})


def t_dmca(cls: type[Config], **fields: Any) -> Config:
    """Return T-DMCA, a decoder of a source and its article, one text: local and compressed layers by turns, L M L M L.

    Local layers read their block of 256 tokens. Width, heads, relu, post-norm, interleaved sinusoids and the shared
    scaled embedding are those of the base Transformer, the vocabulary has 32,000 tokens, texts have up to 11,000. The
    layer of experts that the paper adds to some models is not built.

    Source: Liu et al. (arXiv:1801.10198), section 4.2.
    """
    own = {
        "mechanism": ["pattern", "memory_compressed", "pattern", "memory_compressed", "pattern"],
        "attention_pattern": [BlockLocal(256), None, BlockLocal(256), None, BlockLocal(256)],
        "is_causal": True,
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "hidden_act": "relu",
        "max_position_embeddings": 11_000,
        "position_embedding_type": "sinusoidal",
        "scale_embedding": True,
        "initializer_range": 512**-0.5,
        "embedding_norm": False,
        "lm_head_transform": False,
        "lm_head_bias": False,
        "embedding_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    return cls(**{**own, **fields})
