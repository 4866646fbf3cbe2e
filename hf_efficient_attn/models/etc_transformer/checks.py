"""Which fields of an `EtcTransformerConfig` exclude each other, and what to do about it."""

from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

from .labels import num_labels

CHOICES: dict[str, tuple[Any, ...]] = {
    "classifier_pooling": ("mean", "first"),
    "classifier_head": ("linear", "dense"),
}


def check_etc(config: Any) -> None:
    """Raise ConfigurationError for fields that no model can have."""
    if config.is_causal:
        raise ConfigurationError(
            "is_causal=True: a global token reads the whole text, and every token reads it, so that each would know "
            "what follows it. There is no causal form; use SparseTransformerConfig or AdaptiveSpanConfig."
        )
    for name, least in (("local_radius", 0), ("max_relative_distance", 0)):
        if getattr(config, name) < least:
            raise ConfigurationError(f"{name}={getattr(config, name)} must be at least {least}.")
    if config.spare_chunks is not None and config.spare_chunks < 0:
        raise ConfigurationError(
            f"spare_chunks={config.spare_chunks} must be at least 0, or None for a number that grows with the length."
        )
    needed, size = num_labels(config.max_relative_distance), config.relative_vocab_size
    if size is not None and size < needed:
        raise ConfigurationError(
            f"relative_vocab_size={size}, but max_relative_distance={config.max_relative_distance} has {needed} labels:"
            f" 2 · {config.max_relative_distance} + 1 distances and three kinds of pairs with a global token. Give at "
            "least that many, or None for a model without labels."
        )
    if not 0 <= config.global_token_id < config.vocab_size:
        raise ConfigurationError(
            f"global_token_id={config.global_token_id}; it must be a token of the vocabulary, 0 to "
            f"{config.vocab_size - 1}."
        )
    if config.type_vocab_size and not 0 <= config.long_token_type < config.type_vocab_size:
        raise ConfigurationError(
            f"type_vocab_size={config.type_vocab_size}, but long tokens are of type "
            f"long_token_type={config.long_token_type}, unless a call says otherwise. Give at least "
            f"{max(config.long_token_type, 0) + 1} types, or 0 for a model without types."
        )
    if config.cpc_loss_weight < 0:
        raise ConfigurationError(f"cpc_loss_weight={config.cpc_loss_weight} must be at least 0.")
    if config.position_embedding_type != "none":
        raise ConfigurationError(
            f"position_embedding_type={shown(config.position_embedding_type)}: this family has no absolute "
            "positions, but labels of distances. Leave it out."
        )
