"""The authors' networks, as fields of `RoutingTransformerConfig`.

Every function is a classmethod of it; keywords change or add fields. Sizes, clusters, head counts and dropouts are
those of the authors' code. It names no vocabulary: ours are 267,735 words of Wikitext-103, the 256 bytes of enwik8 and
of pixels, and 32,768 subwords of PG-19. Its local heads read their own block of tokens and the one before; here they
follow the `Band` of the same greatest reach. Neither code nor paper prints numbers of parameters, but the authors call
their released model of PG-19 one of 200M; its sizes, with a gated MLP, give more.
"""

from typing import Any, TypeVar

from hf_efficient_attn.patterns.bands import Band

Config = TypeVar("Config")

# the greatest distance of a local head, and of a vector of its relative positions: blocks of 256 tokens
REACH = 511
AUTHORS: dict[str, Any] = {
    "attention_pattern": Band(REACH, 0),
    "max_relative_distance": 512,
    "membership": "balanced",
    "norm_eps": 1e-6,
    "gated_mlp": True,
    "head_map": True,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_routing_heads": 4,
    "cluster_tokens": 512,
}
WIKITEXT: dict[str, Any] = {
    "vocab_size": 267_735,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_routing_heads": 8,
    **dict.fromkeys(("attention_dropout", "activation_dropout", "embedding_dropout"), 0.4),
}
ENWIK8: dict[str, Any] = {"vocab_size": 256, "intermediate_size": 3072}
PIXELS: dict[str, Any] = {"vocab_size": 256, "intermediate_size": 2048, "hidden_dropout": 0.3}


def wikitext103(cls: type[Config], **fields: Any) -> Config:
    """Return the 14-layer network for texts of 4,096 words, with 8 clusters of 512: 458,695,424 parameters."""
    preset = {"num_hidden_layers": 14, "num_clusters": 8, "max_position_embeddings": 4096}
    return cls(**{**AUTHORS, **WIKITEXT, **preset, **fields})


def wikitext103_short(cls: type[Config], **fields: Any) -> Config:
    """Return the 20-layer network for texts of 1,024 words, with 2 clusters of 512: 537,781,760 parameters."""
    preset = {"num_hidden_layers": 20, "num_clusters": 2, "max_position_embeddings": 1024}
    return cls(**{**AUTHORS, **WIKITEXT, **preset, **fields})


def enwik8(cls: type[Config], **fields: Any) -> Config:
    """Return the 12-layer network for texts of 8,192 bytes, with 16 clusters of 512: 159,370,240 parameters."""
    return cls(**{**AUTHORS, **ENWIK8, "num_clusters": 16, "max_position_embeddings": 8192, **fields})


def enwik8_long(cls: type[Config], **fields: Any) -> Config:
    """Return the 12-layer network for texts of 12,288 bytes, with 48 clusters of 256: 159,370,240 parameters."""
    preset = {"num_clusters": 48, "cluster_tokens": 256, "max_position_embeddings": 12_288}
    return cls(**{**AUTHORS, **ENWIK8, **preset, **fields})


def pg19(cls: type[Config], **fields: Any) -> Config:
    """Return the 22-layer network for 8,192 subwords of books: 408,238,173 parameters.

    2 of its 8 heads route, in the last layer alone: 16 clusters of 512.
    """
    preset = {
        "vocab_size": 32_768,
        "hidden_size": 1032,
        "intermediate_size": 4096,
        "num_hidden_layers": 22,
        "num_routing_heads": 2,
        "layers_with_routing": [21],
        "num_clusters": 16,
        "max_position_embeddings": 8192,
    }
    return cls(**{**AUTHORS, **preset, **fields})


def imagenet64(cls: type[Config], **fields: Any) -> Config:
    """Return the 24-layer network for images of 64 × 64 pixels, with 8 clusters of 2,048: 247,401,472 parameters."""
    preset = {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_clusters": 8,
        "cluster_tokens": 2048,
        "max_position_embeddings": 12_288,
    }
    return cls(**{**AUTHORS, **PIXELS, **preset, **fields})


def cifar10(cls: type[Config], **fields: Any) -> Config:
    """Return the 12-layer network for images of 32 × 32 pixels, with 6 clusters of 512: 121,621,504 parameters."""
    return cls(**{**AUTHORS, **PIXELS, "num_clusters": 6, "max_position_embeddings": 3072, **fields})
