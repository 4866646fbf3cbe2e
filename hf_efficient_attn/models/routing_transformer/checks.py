"""Fields of the Routing Transformer's config that exclude each other, or numbers out of their range."""

from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

CHOICES = {
    "membership": (None, "balanced", "causal"),
    "position_embedding_type": ("relative_keys", "rope", "learned", "sinusoidal", "none"),
    "classifier_pooling": (None, "first", "last", "mean"),
}


def check_routing(config: Any) -> None:
    """Raise ConfigurationError for routing heads that no model can have."""
    for name in ("num_clusters", "max_relative_distance"):
        if getattr(config, name) < 1:
            raise ConfigurationError(f"{name}={getattr(config, name)} must be at least 1.")
    if config.num_routing_heads is not None and config.num_routing_heads > config.num_attention_heads:
        raise ConfigurationError(
            f"num_routing_heads={config.num_routing_heads} counts some of the heads of a layer, of which there are "
            f"num_attention_heads={config.num_attention_heads}. Use at most that."
        )
    if not 0 <= config.centroid_decay <= 1:
        raise ConfigurationError(f"centroid_decay={config.centroid_decay} is a share of what is kept: 0 to 1.")
    if config.commitment_weight < 0:
        raise ConfigurationError(f"commitment_weight={config.commitment_weight} must be a number of at least 0.")
    layers = config.layers_with_routing
    if layers is not None and not set(layers) <= set(range(config.num_hidden_layers)):
        raise ConfigurationError(
            f"layers_with_routing={shown(layers)} lists indices of layers: 0 to {config.num_hidden_layers - 1} "
            f"(num_hidden_layers={config.num_hidden_layers})."
        )
    check_direction(config)


def check_direction(config: Any) -> None:
    """Raise ConfigurationError for a choice of keys that does not go with the direction of the model."""
    if config.is_causal and not config.shares_qk:
        raise ConfigurationError(
            "share_qk=False needs is_causal=False: a causal model keeps the keys of earlier tokens, and not their "
            "queries, by which they were put into clusters. Leave share_qk out."
        )
    if not config.is_causal and not config.has_balanced_clusters:
        raise ConfigurationError(
            "membership='causal' lets a token read the last ones of its cluster; it needs is_causal=True. With "
            "is_causal=False use 'balanced', or leave it out."
        )
    if not config.include_self and not config.is_causal:
        raise ConfigurationError(
            "include_self=False means that tokens read earlier ones only; it needs is_causal=True."
        )
    if not config.include_self and config.cluster_tokens < 2:
        raise ConfigurationError("include_self=False with cluster_tokens=1 leaves nothing to read. Use at least 2.")
