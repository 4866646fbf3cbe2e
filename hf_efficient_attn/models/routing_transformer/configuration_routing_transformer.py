"""Configuration of the Routing Transformer."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import DECODER, config_patterns
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_fields, check_least, write_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, HeadSizes, NormFields
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.pattern import Pattern

# Checks for fields that exclude each other and for numbers that are out of range.


CHOICES = {
    "membership": (None, "balanced", "causal"),
    "position_embedding_type": ("relative_keys", "rope", "learned", "sinusoidal", "none"),
}


def check_routing(config: Any) -> None:
    """Raise ConfigurationError for routing heads that no model can have."""
    check_least(config, num_clusters=1, max_relative_distance=1, commitment_weight=0)
    if config.num_routing_heads is not None and config.num_routing_heads > config.num_attention_heads:
        raise ConfigurationError(
            f"num_routing_heads={config.num_routing_heads} must be at most the number of heads, "
            f"num_attention_heads={config.num_attention_heads}."
        )
    if not 0 <= config.centroid_decay <= 1:
        raise ConfigurationError(f"centroid_decay={config.centroid_decay} must be from 0 to 1.")
    layers = config.layers_with_routing
    if layers is not None and not set(layers) <= set(range(config.num_hidden_layers)):
        raise ConfigurationError(
            f"layers_with_routing={shown(layers)} must list indices of layers, 0 to {config.num_hidden_layers - 1} "
            f"(num_hidden_layers={config.num_hidden_layers})."
        )
    check_direction(config)


def check_direction(config: Any) -> None:
    """Raise ConfigurationError for a choice of keys that a causal, or a bidirectional, model cannot have."""
    if config.is_causal and not config.shares_qk:
        raise ConfigurationError(
            "share_qk=False needs is_causal=False: a causal model keeps the keys of earlier tokens, but not the "
            "queries that assigned them to clusters. Leave share_qk out."
        )
    if not config.is_causal and not config.has_balanced_clusters:
        raise ConfigurationError(
            "membership='causal' lets a token attend to the last tokens of its cluster, and needs is_causal=True. With "
            "is_causal=False use membership='balanced', or leave it out."
        )
    if not config.include_self and not config.is_causal:
        raise ConfigurationError(
            "include_self=False lets tokens attend only to earlier ones, and needs is_causal=True. Leave it out."
        )
    if not config.include_self and config.cluster_tokens < 2:
        raise ConfigurationError("include_self=False with cluster_tokens=1 leaves no key. Use at least 2 tokens.")


# The authors' networks, as fields of `RoutingTransformerConfig`; keywords of the presets change or add fields.
#
# Sizes, clusters, head counts and dropouts are taken from the authors' code. It does not state vocabularies; ours are
# the 267,735 words of Wikitext-103, 256 bytes for enwik8 and for pixels, and 32,768 subwords for PG-19. Its local heads
# attend to their own block of tokens and to the block before; here they follow a `Band` with the same largest distance.
# Neither the code nor the paper states the number of parameters, but the authors say that their released PG-19 model
# has 200M; its sizes, with a gated MLP, give more.


# the largest distance in a local head with blocks of 256 tokens
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


@strict_config
class RoutingTransformerConfig(NormFields, GatedMLPFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig):
    r"""Config of a Transformer in which tokens of some heads attend to their own cluster, found by k-means.

    The presets `wikitext103`, `wikitext103_short`, `enwik8`, `enwik8_long`, `pg19`, `imagenet64` and `cifar10` are the
    authors' networks; every field can be changed on top.

    Args:
        num_attention_heads: all heads of a layer.
        num_routing_heads: how many of them, the first ones, route. The others are local: they follow
            `attention_pattern`. In layers that do not route, all heads are local. None: half of the heads route.
        layers_with_routing: the indices of the layers that route; None: all.
        num_clusters: k, the number of clusters of a routing head.
        cluster_tokens: w. With `membership="balanced"` a cluster has w tokens of a text; with "causal" a token attends
            to the last w tokens of its cluster, including itself.
        membership: "balanced", as in the authors' code: a cluster has the w tokens of the text that are most similar to
            its centroid, so a token is in none, one or several clusters. "causal": a token is in the one cluster whose
            centroid is most similar to it. None: "causal" if `is_causal`, otherwise "balanced".

            In a causal model "balanced" lets the future leak: the keys of a token depend on later tokens, which
            generation does not know, so generation computes other outputs than training; see the module's docstring.
            With "causal" they depend only on the past.
        share_qk: whether the keys of routing heads are their queries; None: as `is_causal`. Causal models need it.
        include_self: whether a token of a routing head attends to itself. With `share_qk` its own score is the highest
            possible one; the authors' code keeps it.
        routing_scale: the factor of the scores of routing heads, whose queries and keys have the norm √head_dim. The
            authors' 1.0 gives scores of ±head_dim.
        centroid_decay: λ of the centroids, which are moving averages. 1.0 keeps them constant, as required by methods
            that compute a mini-batch twice in a step with others in between (GradCache). It may be changed in training.
        commitment_weight: β; training adds β · the mean squared distance of queries and keys to their centroids,
            summed over layers, to the loss.
        attention_pattern: the pattern of local heads, in any form that `sparsify` takes. Causal models use its causal
            form. None: full (or causal) attention, which costs more than all routing heads.
        is_causal: whether each token attends only to itself and the past; False: to both sides.
        position_embedding_type: "relative_keys": a trained vector per distance is added to the keys of a layer's local
            heads, and another one to those of its routing heads, where distances count members of the cluster; "rope":
            in local heads, and in routing heads after clusters have been assigned; "learned", "sinusoidal", "none".
        max_relative_distance: the distance in tokens from which on all distances share a vector of "relative_keys".
        head_map: whether the output of each head passes through a map of `head_dim` that all heads share, as in the
            authors' code.
        norm_position, norm_type, norm_eps, norm_bias: "post", or "pre" with another norm after the last block;
            "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias, lm_head_bias: whether there are biases in the projections of
            query, key and value; in the attention output; in the MLP; in the language modeling head.
        gated_mlp: whether the MLP computes act(x·W_gate) * (x·W_up).
        embedding_init_std: initial standard deviation of embeddings; None: initializer_range.
        classifier_pooling: the token that represents a sequence: "first", "last" or "mean"; None: "last" if causal,
            otherwise "mean".

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Source: Roy, Saffar, Vaswani, Grangier, "Efficient Content-Based Sparse Attention with Routing Transformers"
    (arXiv:2003.05997).

    >>> config = RoutingTransformerConfig.pg19()
    >>> config.layers_with_routing, config.routing_heads(20), config.routing_heads(21)
    ([21], 0, 2)
    """

    model_type = "routing_transformer"
    papers = ("2003.05997",)
    # scores of a head in a layer, for n tokens
    attention_cost = "n · cluster_tokens in a routing head; the pairs of attention_pattern in a local head"

    vocab_size: int = 256
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_routing_heads: int | None = None
    layers_with_routing: list[int] | None = None
    is_causal: bool = True

    num_clusters: int = 16
    cluster_tokens: int = 512
    membership: str | None = None
    share_qk: bool | None = None
    include_self: bool = True
    routing_scale: float | int = 1.0
    centroid_decay: float | int = 0.999
    commitment_weight: float | int = 1e-4
    attention_pattern: Any = None

    hidden_act: str = "gelu"
    mlp_bias: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    head_map: bool = False

    position_embedding_type: str = "relative_keys"
    max_relative_distance: int = 512
    rope_parameters: RopeParameters | dict | None = None
    max_position_embeddings: int = 8192
    position_offset: int = 0
    embedding_init_std: float | int | None = None
    initializer_range: float | int = 0.02

    lm_head_bias: bool = False
    classifier_pooling: str | None = None

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def wikitext103(cls, **fields: Any) -> "RoutingTransformerConfig":
        """Return the 14-layer network for texts of 4,096 words, with 8 clusters of 512: 458,695,424 parameters."""
        preset = {"num_hidden_layers": 14, "num_clusters": 8, "max_position_embeddings": 4096}
        return cls(**{**AUTHORS, **WIKITEXT, **preset, **fields})

    @classmethod
    def wikitext103_short(cls, **fields: Any) -> "RoutingTransformerConfig":
        """Return the 20-layer network for texts of 1,024 words, with 2 clusters of 512: 537,781,760 parameters."""
        preset = {"num_hidden_layers": 20, "num_clusters": 2, "max_position_embeddings": 1024}
        return cls(**{**AUTHORS, **WIKITEXT, **preset, **fields})

    @classmethod
    def enwik8(cls, **fields: Any) -> "RoutingTransformerConfig":
        """Return the 12-layer network for texts of 8,192 bytes, with 16 clusters of 512: 159,370,240 parameters."""
        return cls(**{**AUTHORS, **ENWIK8, "num_clusters": 16, "max_position_embeddings": 8192, **fields})

    @classmethod
    def enwik8_long(cls, **fields: Any) -> "RoutingTransformerConfig":
        """Return the 12-layer network for texts of 12,288 bytes, with 48 clusters of 256: 159,370,240 parameters."""
        preset = {"num_clusters": 48, "cluster_tokens": 256, "max_position_embeddings": 12_288}
        return cls(**{**AUTHORS, **ENWIK8, **preset, **fields})

    @classmethod
    def pg19(cls, **fields: Any) -> "RoutingTransformerConfig":
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

    @classmethod
    def imagenet64(cls, **fields: Any) -> "RoutingTransformerConfig":
        """Return the 24-layer network for 64 × 64 pixel images, with 8 clusters of 2,048: 247,401,472 parameters."""
        preset = {
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_clusters": 8,
            "cluster_tokens": 2048,
            "max_position_embeddings": 12_288,
        }
        return cls(**{**AUTHORS, **PIXELS, **preset, **fields})

    @classmethod
    def cifar10(cls, **fields: Any) -> "RoutingTransformerConfig":
        """Return the 12-layer network for images of 32 × 32 pixels, with 6 clusters of 512: 121,621,504 parameters."""
        return cls(**{**AUTHORS, **PIXELS, "num_clusters": 6, "max_position_embeddings": 3072, **fields})

    @property
    def has_balanced_clusters(self) -> bool:
        """Whether each cluster selects its tokens, instead of each token its cluster."""
        return not self.is_causal if self.membership is None else self.membership == "balanced"

    @property
    def shares_qk(self) -> bool:
        """Whether the keys of routing heads are their queries."""
        return self.is_causal if self.share_qk is None else self.share_qk

    @property
    def sinusoid_amplitude(self) -> float | int:
        """The factor of sinusoids, which makes them as large as the embeddings they are added to."""
        return self.initializer_range if self.embedding_init_std is None else self.embedding_init_std

    def routing_heads(self, layer: int) -> int:
        """Return how many heads of a layer route."""
        routes = self.layers_with_routing is None or layer in self.layers_with_routing
        heads = (self.num_attention_heads + 1) // 2 if self.num_routing_heads is None else self.num_routing_heads
        return heads if routes else 0

    def readable_patterns(self) -> tuple[Pattern | None, ...]:
        """Return the pattern of each layer, for `PatternCache`.

        Raises:
            ConfigurationError: a layer routes, so its tokens can attend to any earlier token.
        """
        if any(self.routing_heads(layer) for layer in range(self.num_hidden_layers)):
            raise ConfigurationError(
                f"PatternCache keeps a band and the first tokens, but layers of this {type(self).__name__} have "
                "routing heads, which may attend to any earlier token. Generate with the default cache, which keeps "
                "all tokens."
            )
        return config_patterns(self.attention_pattern, self, DECODER) or ()

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        check_routing(self)
        write_pattern(self)


__all__ = ["RoutingTransformerConfig"]
