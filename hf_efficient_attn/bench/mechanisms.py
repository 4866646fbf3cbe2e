"""Every attention mechanism of this package as the config of a model of a given size."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.integration.pattern_cache import PatternCache
from hf_efficient_attn.models.adaptive_span.configuration_adaptive_span import AdaptiveSpanConfig
from hf_efficient_attn.models.bp_transformer.configuration_bp_transformer import BPTransformerConfig
from hf_efficient_attn.models.compressed_transformer.configuration_compressed_transformer import (
    CompressedTransformerConfig,
)
from hf_efficient_attn.models.efficient_reformer.configuration_efficient_reformer import EfficientReformerConfig
from hf_efficient_attn.models.etc_transformer.configuration_etc_transformer import EtcTransformerConfig
from hf_efficient_attn.models.routing_transformer.configuration_routing_transformer import RoutingTransformerConfig
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)
from hf_efficient_attn.models.spans.memory import SpanCache
from hf_efficient_attn.models.sparse_transformer.configuration_sparse_transformer import SparseTransformerConfig
from hf_efficient_attn.models.star_transformer.configuration_star_transformer import StarTransformerConfig
from hf_efficient_attn.patterns.bands import Band, BlockTopK
from hf_efficient_attn.patterns.big_bird import bigbird

DENSE = "dense"
# settings of the benchmark with the longest text of mechanisms that compute all pairs of tokens, and of those that
# store a score of each pair
DENSE_LIMIT, SCORES_LIMIT = "dense_limit", "scores_limit"
# number of blocks that `keys` keys fill: BlockTopK attends to four, BigBird to five to eight
BLOCKS = 4


@dataclass(frozen=True)
class Shape:
    """What the compared models have in common.

    Attributes:
        keys: approximate number of keys that a token attends to, for mechanisms in which it can be chosen: window,
            landmarks, projected tokens.
    """

    tokens: int
    batch_size: int
    hidden_size: int
    heads: int
    keys: int
    is_causal: bool
    dtype: str
    device: str
    layers: int = 1

    def band(self) -> Band:
        """Return the band of `keys` keys."""
        return Band(self.keys - 1, 0) if self.is_causal else Band(self.keys // 2, self.keys // 2)

    def block_tokens(self) -> int:
        """Return the length of the blocks of block-wise patterns."""
        return max(1, self.keys // BLOCKS)


@dataclass(frozen=True)
class Mechanism:
    """One way to compute attention.

    Attributes:
        about: what a token attends to; `{keys}` stands for the number of keys.
        config: the class of its config.
        fields: returns the config's fields that differ from their defaults.
        directions: which forms it has: True is causal, False bidirectional.
        positions: kinds of positions that it can have besides its own: "rope", "learned".
        cache: returns a cache that holds only keys that are still attended to; None: the model's own.
        limit: the setting of the benchmark with its longest text; None: any length.
    """

    about: str
    config: type[PreTrainedConfig]
    fields: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    directions: tuple[bool, ...] = (False, True)
    positions: tuple[str, ...] = ("rope", "learned")
    cache: Callable[[Any], Any] | None = None
    limit: str | None = None


def _pattern(about: str, pattern: Callable[[Shape], Any], **options: Any) -> Mechanism:
    return Mechanism(about, SparseTransformerConfig, lambda shape: {"attention_pattern": pattern(shape)}, **options)


def _compressed(
    about: str, mechanism: str, fields: Callable[[Shape], dict[str, Any]] = lambda shape: {}, **options: Any
) -> Mechanism:
    return Mechanism(
        about,
        CompressedTransformerConfig,
        lambda shape: {"mechanism": mechanism, **fields(shape)},
        positions=("learned",),
        **options,
    )


def _clusters(shape: Shape) -> dict[str, Any]:
    return {
        "num_routing_heads": shape.heads,
        "num_clusters": max(1, shape.tokens // shape.keys),
        "cluster_tokens": shape.keys,
        "position_embedding_type": "none",
    }


# by name, in the order of tables and pictures
MECHANISMS: dict[str, Mechanism] = {
    DENSE: _pattern("all tokens, by torch's SDPA", lambda shape: None, limit=DENSE_LIMIT),
    "sas_p": Mechanism(
        "all tokens, in a block without values, projection and skips", SimplifiedTransformerConfig, limit=DENSE_LIMIT
    ),
    "prior": _compressed("all tokens, with a learned prior by distance", "prior", limit=DENSE_LIMIT),
    "talking_heads": _compressed(
        "all tokens, with heads that mix scores and weights", "talking_heads", limit=SCORES_LIMIT
    ),
    "collaborative_heads": _compressed(
        "all tokens, with queries and keys that heads share", "collaborative_heads", limit=DENSE_LIMIT
    ),
    "band": _pattern("a window of {keys} keys", Shape.band, cache=lambda model: PatternCache(model.config)),
    "bigbird": _pattern(
        "the blocks around it and a random block, {keys} keys together, and global blocks",
        lambda shape: bigbird(shape.block_tokens(), num_random_blocks=1, causal=shape.is_causal),
    ),
    "block_top_k": _pattern(
        "the four blocks with the highest scores, {keys} keys together",
        lambda shape: BlockTopK(shape.block_tokens(), BLOCKS),
        directions=(True,),
    ),
    "adaptive_span": Mechanism(
        "bands of learned widths, {keys} keys at first",
        AdaptiveSpanConfig,
        lambda shape: {
            "span_limit": shape.tokens,
            # the keys of both sides together; causal heads have one side
            "span_init": min(1.0, shape.keys / shape.tokens) / (1 if shape.is_causal else 2),
            "position_embedding_type": "rope",
        },
        positions=("rope",),
        cache=SpanCache,
    ),
    "etc": Mechanism(
        "a window of {keys} keys, and a global token for each 32",
        EtcTransformerConfig,
        lambda shape: {"local_radius": shape.keys // 2},
        directions=(False,),
        positions=(),
    ),
    "star": Mechanism(
        "five keys, one of them a summary of the whole text",
        StarTransformerConfig,
        directions=(False,),
        positions=("learned",),
    ),
    "tree": Mechanism("on each side, four nodes of every size in a tree of spans", BPTransformerConfig, positions=()),
    "reformer": Mechanism(
        "two chunks of {keys} / 2 tokens of its hash bucket, one round",
        EfficientReformerConfig,
        lambda shape: {
            "attn_layers": ["lsh"] * shape.layers,
            "num_hashes": 1,
            "lsh_attn_chunk_length": max(1, shape.keys // 2),
            "position_embedding_type": "none",
        },
    ),
    "routing": Mechanism("{keys} tokens of its cluster", RoutingTransformerConfig, _clusters),
    "linformer": _compressed(
        "{keys} projected tokens",
        "linformer",
        lambda shape: {"projected_tokens": min(shape.keys, shape.tokens)},
        directions=(False,),
    ),
    "nystrom": _compressed(
        "{keys} / 4 landmarks", "nystrom", lambda shape: {"num_landmarks": shape.block_tokens()}, directions=(False,)
    ),
    "memory_compressed": _compressed("one key for every three tokens", "memory_compressed"),
    "linear": _compressed("sums of elu(k) + 1", "linear"),
    "performer": _compressed(
        "sums of positive random features", "linear", lambda shape: {"feature_map": "positive_random"}
    ),
    "average": _compressed("the mean of all values", "linear", lambda shape: {"feature_map": "constant"}),
}
# mechanisms that need several layers, because they use the scores or the weights of other layers
LAYERED: dict[str, Mechanism] = {
    "residual_scores": _compressed("all tokens, with the scores of all layers so far", "residual_scores"),
    "reused_weights": _compressed(
        "all tokens, with the weights of the first layer",
        "reused_weights",
        lambda shape: {"mechanism": ["pattern"] + ["reused_weights"] * (shape.layers - 1)},
    ),
}
ALL = MECHANISMS | LAYERED


def config_of(name: str, shape: Shape, spare_positions: int = 0, **changes: Any) -> PreTrainedConfig:
    """Return the config of one of `ALL` for a shape, without dropout.

    Args:
        spare_positions: positions after the text, for decoded tokens.
        changes: further fields, which override those of the mechanism.
    """
    mechanism = ALL[name]
    known = {field.name for field in fields(mechanism.config)}
    common = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.tokens + spare_positions,
        "is_causal": shape.is_causal,
        **dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0),
    }
    common = {key: value for key, value in common.items() if key in known}
    return mechanism.config(**{**common, **mechanism.fields(shape), **changes})
