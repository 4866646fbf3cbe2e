"""Which fields of a `BPTransformerConfig` exclude each other, and what to do about it."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import FIELD
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

# levels of trees of 2^31 tokens
MAX_LEVEL = 31
CHOICES: dict[str, tuple[Any, ...]] = {
    "norm_position": ("post",),
    "position_embedding_type": ("relation", "learned", "sinusoidal", "none"),
    "classifier_pooling": ("root", "first", "last", "mean"),
    "classifier_head": ("linear", "dense"),
}


def check_tree(config: Any) -> None:
    """Raise ConfigurationError for fields that no tree can have."""
    if config.num_nodes < 1:
        raise ConfigurationError(
            f"num_nodes={config.num_nodes}: a token reads at least 1 node of each size and side (the paper's k)."
        )
    if not 0 <= config.clip_distance <= MAX_LEVEL:
        raise ConfigurationError(
            f"clip_distance={config.clip_distance} is a level of the tree, 0 for tokens, 1 for spans of two and so on: "
            f"0 to {MAX_LEVEL}."
        )
    if getattr(config, FIELD, None) is not None:
        raise ConfigurationError(
            f"{FIELD}={shown(getattr(config, FIELD))}: tokens and spans of a BP-Transformer read the nodes of their "
            "tree, and follow no other pattern. Leave it out."
        )
