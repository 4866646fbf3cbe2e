"""Config fields of models that attend to the nodes of a tree; each family's config documents them."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.config.checks import check_fields, refuse_pattern
from hf_efficient_attn.models.config.fields import NormFields
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree

# the level of the root of a tree of 2^31 tokens
MAX_LEVEL = 31
CHOICES: dict[str, tuple[Any, ...]] = {
    "norm_position": ("post",),
    "position_embedding_type": ("relation", "learned", "sinusoidal", "none"),
    "classifier_pooling": ("root", "first", "last", "mean"),
    "classifier_head": ("linear", "dense"),
}


@dataclass(init=False, repr=False, eq=False)
class TreeFields(NormFields):
    """Mixin: the fields of the tree, the layers and the embeddings."""

    num_nodes: int = 4
    clip_distance: int = 4

    hidden_act: str = "relu"
    mlp_bias: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False

    position_embedding_type: str = "relation"
    max_position_embeddings: int = 4096
    initializer_range: float | int = 0.02
    lm_head_bias: bool = False

    # a token and a span are cached for each token
    nodes_per_token = 2

    @property
    def pattern(self) -> InterleavedSpanTree:
        """Which node attends to which: node 2t is token t, node 2t + 1 a span."""
        return InterleavedSpanTree(self.num_nodes, self.is_causal)  # type: ignore[attr-defined]

    @property
    def sinusoid_amplitude(self) -> float | int:
        """The factor of sinusoids, which makes them as large as the embeddings they are added to."""
        return self.initializer_range

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields."""
        check_fields(self, CHOICES)
        self.check_head_sizes()  # type: ignore[attr-defined]
        check_tree(self)


def check_tree(config: Any) -> None:
    """Raise ConfigurationError for fields that no tree can have."""
    if config.num_nodes < 1:
        raise ConfigurationError(
            f"num_nodes={config.num_nodes} must be at least 1: a token attends to this number of nodes of each size on "
            "each side (the paper's k)."
        )
    if not 0 <= config.clip_distance <= MAX_LEVEL:
        raise ConfigurationError(
            f"clip_distance={config.clip_distance} must be a level of the tree, from 0 to {MAX_LEVEL}: 0 for tokens, 1 "
            "for spans of two tokens, and so on."
        )
    refuse_pattern(config, "tokens and spans of a BP-Transformer attend to the nodes of their tree")


def check_pairs_and_losses(config: Any) -> None:
    """Raise ConfigurationError if the fields of sentence pairs or of `layer_losses` exclude other fields."""
    if config.cross_layers is not None and not config.separate_sentences:
        raise ConfigurationError(
            f"cross_layers={config.cross_layers}: a sentence attends to the other one only with "
            "separate_sentences=True. Set separate_sentences=True, or leave cross_layers out."
        )
    if config.separate_sentences and config.is_causal:
        raise ConfigurationError(
            "separate_sentences=True with is_causal=True: a pair of sentences is not generated token by token. Leave "
            "one of the two out."
        )
    if config.layer_losses and not config.is_causal:
        raise ConfigurationError(
            "layer_losses=True is for causal language models. Pass is_causal=True, or leave layer_losses out."
        )
