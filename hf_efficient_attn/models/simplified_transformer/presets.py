"""The paper's models, as fields of `SimplifiedTransformerConfig`.

Every function is a classmethod of it; keywords change or add fields. Source: He & Hofmann (arXiv:2311.01906), C and D.
"""

from typing import Any, TypeVar

Config = TypeVar("Config")


def codeparrot_gpt(cls: type[Config], block: str = "sas_p", **fields: Any) -> Config:
    """Return the paper's causal model (appendix D.1): 18 layers of 768, 12 heads, 50,000 tokens of vocabulary.

    With 72 layers pass `intermediate_size=1536`, as in the depth study. The authors' modules count a bias vector on
    every map and a LayerNorm at the end, and so does this preset; theirs freeze the biases of W^V, W^P and the MLP
    at zero, here they are trained (`attention_bias="query_key", mlp_bias=False` leaves them out).
    """
    defaults: dict[str, Any] = {
        "attention_bias": "all",
        "mlp_bias": True,
        "final_norm_type": "layernorm",
        "position_embedding_type": "learned",
    }
    return cls(**{**defaults, "block": block, **fields})


def crammed_bert(cls: type[Config], block: str = "sas_p", **fields: Any) -> Config:
    """Return the paper's masked model (appendix D.2): 16 layers of 768, gated GELU MLP, LayerNorm, no biases."""
    defaults: dict[str, Any] = {
        "vocab_size": 32_768,
        "num_hidden_layers": 16,
        "intermediate_size": 1536,
        "is_causal": False,
        "hidden_act": "gelu",
        "gated_mlp": True,
        "norm_type": "layernorm",
        "norm_eps": 1e-12,
        "attention_bias": "none",
        "position_embedding_type": "scaled_sinusoidal",
        "max_position_embeddings": 128,
        "mlp_gain": None if block in ("pre_ln", "parallel") else 0.05,
    }
    return cls(**{**defaults, "block": block, **fields})


def languini_gpt(cls: type[Config], block: str = "sas_p", **fields: Any) -> Config:
    """Return the paper's Languini-books model (v2, appendix C): 12 layers of 768, GELU, ALiBi, 512 tokens."""
    defaults: dict[str, Any] = {
        "vocab_size": 16_384,
        "num_hidden_layers": 12,
        "hidden_act": "gelu",
        "position_embedding_type": "alibi",
        "max_position_embeddings": 512,
    }
    return cls(**{**defaults, "block": block, **fields})
