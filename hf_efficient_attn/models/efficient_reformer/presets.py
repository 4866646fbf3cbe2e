"""The authors' networks, as fields of `EfficientReformerConfig`; keywords change or add fields.

Sources: Kitaev et al. (arXiv:2001.04451), the settings beside their code (google/trax), and the configs of the
checkpoints that were made from it.
"""

from typing import Any, TypeVar

Config = TypeVar("Config")

ENWIK8: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "attn_layers": ["local", "local", "lsh", "local"],
    "lsh_attn_chunk_length": 256,
    "local_attn_chunk_length": 128,
    "num_buckets": 512,
    "num_hashes": 4,
    "max_position_embeddings": 65_536,
    "stream_join": "concat",
    "axial_pos_shape": [128, 512],
    "axial_pos_embds_dim": [256, 768],
    "embedding_dropout": 0.2,
    "hidden_dropout": 0.2,
    "activation_dropout": 0.2,
    "attention_dropout": 0.2,
    "is_causal": True,
}
IMAGENET64: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "attn_layers": ["lsh"],
    "lsh_attn_chunk_length": 128,
    "num_buckets": 192,
    "num_hashes": 2,
    "hidden_act": "gelu_new",
    "norm_eps": 1e-6,
    "max_position_embeddings": 12_288,
    "stream_join": "concat",
    "axial_pos_shape": [64, 64, 3],
    "axial_pos_embds_dim": [384, 384, 256],
    "attention_dropout": 0.2,
    "is_causal": True,
}
COPY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "attn_layers": ["lsh"],
    "lsh_attn_chunk_length": 64,
    "num_hashes": 4,
    "max_position_embeddings": 1024,
    "stream_join": "concat",
    "is_causal": True,
}


def enwik8(cls: type[Config], **fields: Any) -> Config:
    """Return the 12-layer network for bytes of up to 65,536 tokens, as released: 149,182,722 parameters."""
    return cls(**{**ENWIK8, **fields})


def imagenet64(cls: type[Config], **fields: Any) -> Config:
    """Return the 6-layer network for images of 64 × 64 pixels in three colours, 12,288 tokens."""
    return cls(**{**IMAGENET64, **fields})


def copy_task(cls: type[Config], **fields: Any) -> Config:
    """Return the 1-layer network that copies 511 symbols (section 5 of the paper)."""
    return cls(**{**COPY, **fields})
