"""Which fields of a `StarTransformerConfig` exclude each other, and what to do about it."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import FIELD
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.numbers import check_heads

CHOICES: dict[str, tuple[Any, ...]] = {
    "ring": ("closed", "open", "zero_ends"),
    "relay_init": ("mean", "learned"),
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "classifier_pooling": ("relay_max", "relay", "max", "mean"),
    "classifier_head": ("linear", "dense"),
}


def check_star(config: Any) -> None:
    """Raise ConfigurationError for fields that no star can have; write `head_dim` if it is None."""
    if config.is_causal:
        raise ConfigurationError(
            "is_causal=True: the relay reads every token of a text, and every token reads the relay, so that each "
            "would know what follows it. There is no causal form; use SparseTransformerConfig or AdaptiveSpanConfig."
        )
    if getattr(config, FIELD, None) is not None:
        raise ConfigurationError(
            f"{FIELD}={shown(getattr(config, FIELD))}: a token of a star reads its neighbours, its embedding and the "
            "relay, and follows no other pattern. Leave it out."
        )
    if config.head_dim is None:
        check_heads(config.hidden_size, config.num_attention_heads, "hidden_size", "num_attention_heads")
        config.head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim < 1:
        raise ConfigurationError(f"head_dim={config.head_dim} must be at least 1.")
    if config.position_embedding_type == "sinusoidal" and config.hidden_size % 2:
        raise ConfigurationError(f"Sinusoidal positions need an even hidden_size, not {config.hidden_size}.")
    if config.tie_word_embeddings and config.embedding_width != config.hidden_size:
        raise ConfigurationError(
            f"tie_word_embeddings=True, but embedding_size={config.embedding_size} and "
            f"hidden_size={config.hidden_size} differ. Use tie_word_embeddings=False, or leave embedding_size out."
        )
