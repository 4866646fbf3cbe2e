"""Configuration of ETC and BigBird-ETC."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_fields, check_least, check_token, write_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import (
    BERT_DROPOUT,
    BertFields,
    DropoutFields,
    GatedMLPFields,
    HeadSizes,
    NormFields,
)
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.blocks import Blocks
from hf_efficient_attn.patterns.pattern import Pattern

from .global_input import num_labels

# Checks for fields of an `EtcTransformerConfig` that exclude each other.


CHOICES: dict[str, tuple[Any, ...]] = {
    "classifier_pooling": ("mean", "first"),
    "classifier_head": ("linear", "dense"),
}


def check_etc(config: Any) -> None:
    """Raise ConfigurationError for values that no model can have."""
    if config.is_causal:
        raise ConfigurationError(
            "is_causal=True: global tokens attend to the whole text, and every token attends to them, so every token "
            "would depend on later ones. There is no causal form; use SparseTransformerConfig or AdaptiveSpanConfig."
        )
    check_least(config, local_radius=0, max_relative_distance=0, spare_chunks=0, cpc_loss_weight=0)
    needed, size = num_labels(config.max_relative_distance), config.relative_vocab_size
    if size is not None and size < needed:
        raise ConfigurationError(
            f"relative_vocab_size={size}, but max_relative_distance={config.max_relative_distance} needs {needed} "
            f"labels: 2 · {config.max_relative_distance} + 1 distances and three kinds of pairs with a global token. "
            f"Set at least {needed}, or None for a model without labels."
        )
    check_token(config, "global_token_id")
    if config.type_vocab_size and not 0 <= config.long_token_type < config.type_vocab_size:
        raise ConfigurationError(
            f"type_vocab_size={config.type_vocab_size}, but long tokens have type "
            f"long_token_type={config.long_token_type} by default. Set type_vocab_size to at least "
            f"{max(config.long_token_type, 0) + 1}, or to 0 for a model without types."
        )
    if config.position_embedding_type != "none":
        raise ConfigurationError(
            f"position_embedding_type={shown(config.position_embedding_type)}: this family has labels of relative "
            "distances instead of absolute positions. Leave position_embedding_type out."
        )


# The published shapes of ETC and BigBird-ETC, as fields of `EtcTransformerConfig`; keywords change or add fields.


SHARED: dict[str, bool] = {"share_qkv_projections": True, "share_output_projection": True}
LARGE: dict[str, Any] = {
    "vocab_size": 50_265,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "local_radius": 169,
    "max_relative_distance": 24,
    # the authors do not give the size of the tables; this is the number of labels with this distance
    "relative_vocab_size": 52,
}


def _blocks(block_tokens: int, num_random_blocks: int, seed: int) -> Pattern:
    """Return a pattern of three neighbouring blocks, and random blocks other than these."""
    near = Blocks(Band(1, 1), block_tokens)
    return near | RandomBlocks(num_random_blocks, block_tokens, seed, exclude=near) if num_random_blocks else near


@strict_config
class EtcTransformerConfig(
    BertFields, NormFields, GatedMLPFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig
):
    r"""Config of an ETC: long tokens attend to a band and to all global tokens; global tokens attend to all tokens.

    The defaults are the authors' base model. The presets `etc_base`, `etc_large`, `bigbird_etc_base` and
    `bigbird_etc_large` have their sizes and dropouts; every field can be changed on top.

    Args:
        local_radius: how many long tokens a long token attends to on each side.
        attention_pattern: which long tokens a long token attends to, instead of the band of `local_radius`, in any form
            that `sparsify` takes.
        chunk_tokens: how many long tokens share a global token if a call gives no global tokens.
        spare_chunks: how many more global tokens a row of packed documents has than one text of the same length. Every
            document begins a chunk, so a row needs at most its number of documents − 1 more. None: 8, and one more for
            every four chunks. Rows that need more get more, but compiled and exported models refuse such rows.
        global_token_id: the token id of all global tokens if a call does not give their ids; its embedding is part of
            the vocabulary.
        max_relative_distance: k, the largest distance between two long or two global tokens that has a label of its
            own.
        relative_vocab_size: rows of a table of labels, at least 2k + 4; None: a model without labels.
        relative_std: initial standard deviation of the vectors of labels.
        share_qkv_projections: whether all four pieces of attention share one set of query, key and value projections.
        share_kv_projections: whether the queries of one input have the same key and value projections for both inputs.
            False, with `share_qkv_projections=False`: each of the four pieces has its own.
        share_output_projection: whether long and global tokens share the output projection.
        share_feed_forward: whether long and global tokens share the MLP and its norm.
        hard_global_to_long: whether a global token attends only to the long tokens that belong to it (those of
            `global_attends_to_all` attend to all). Long tokens still attend to all global tokens.
        hard_long_to_global: whether a long token attends only to the global tokens that it belongs to.
        type_vocab_size, long_token_type: number of token types (0: none), and the type of long tokens if a call gives
            no types; global tokens then have type 0.
        norm_position: "post", as in BERT, or "pre", with another norm after the last layer.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias: bias vectors of query, key and value; output; MLP.
        max_position_embeddings: the longest text that the model is meant for, and that an exported program takes. No
            parameter depends on it, because labels replace absolute positions.
        cpc_loss_weight: factor of the loss of contrastive predictive coding, which distinguishes the global states of
            masked sentences; it is added to the task's loss; see `EtcTransformerModel.forward`. The authors weight
            masked language modelling by 0.8 and this loss by 0.2, which corresponds to 0.25 here.
        classifier_pooling: what represents a text: the "mean" of its global tokens, or the "first" of them.
        classifier_head, classifier_activation: "linear", or "dense": a dense layer and this activation come first.
        long_answers: whether the question answering head also predicts which global token stands for the long answer.
        lm_head_transform, lm_head_bias: whether a linear map, activation and norm come before the projection to the
            vocabulary, as in BERT; and whether the projection has a bias.
        lm_transform_activation: the activation of `lm_head_transform`; None: `hidden_act`.
        is_causal: only False, because global tokens attend to the whole text.

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Sources: Ainslie et al., "ETC" (arXiv:2004.08483) and the authors' code; Zaheer et al. (arXiv:2007.14062).

    >>> EtcTransformerConfig().local_radius, EtcTransformerConfig.etc_large().local_radius
    (84, 169)
    """

    model_type = "etc_transformer"
    papers = ("2004.08483", "2007.14062")
    # scores of a head in a layer, for n tokens and g global tokens
    attention_cost = "n · (2 · local_radius + 1) + 2 · g · n + g² with g global tokens"

    local_radius: int = 84
    attention_pattern: Any = None
    chunk_tokens: int = 32
    spare_chunks: int | None = None
    global_token_id: int = 1
    max_relative_distance: int = 12
    relative_vocab_size: int | None = 32
    relative_std: float | int = 0.5
    share_qkv_projections: bool = False
    share_kv_projections: bool = False
    share_output_projection: bool = False
    share_feed_forward: bool = True
    hard_global_to_long: bool = False
    hard_long_to_global: bool = False

    hidden_act: str = "gelu"
    attention_bias: bool = True
    attention_output_bias: bool = True
    mlp_bias: bool = True
    type_vocab_size: int = 16
    long_token_type: int = 1
    position_embedding_type: str = "none"
    max_position_embeddings: int = 4096
    initializer_range: float | int = 0.02

    cpc_loss_weight: float | int = 0.0
    classifier_pooling: str = "mean"
    long_answers: bool = False

    @classmethod
    def etc_base(cls, share_projections: bool = False, **fields: Any) -> "EtcTransformerConfig":
        """Return ETC-base: BERT-base's layout, a radius of 84 tokens, distances up to 12.

        share_projections: whether all four pieces share their query, key, value and output projections: 109 instead of
            166 million parameters.

        Source: Ainslie et al. (arXiv:2004.08483), section 4 and appendix.
        """
        return cls(**{**BERT_DROPOUT, **(SHARED if share_projections else {}), **fields})

    @classmethod
    def etc_large(cls, share_projections: bool = False, **fields: Any) -> "EtcTransformerConfig":
        """Return ETC-large: 24 layers of width 1,024, radius of 169 tokens, distances up to 24, vocabulary of RoBERTa.

        share_projections: as in `etc_base`.
        """
        return cls(**{**BERT_DROPOUT, **LARGE, **(SHARED if share_projections else {}), **fields})

    @classmethod
    def bigbird_etc_base(
        cls, block_tokens: int = 84, num_random_blocks: int = 0, seed: int = 0, **fields: Any
    ) -> "EtcTransformerConfig":
        """Return BigBird-ETC base: ETC-base whose long tokens attend to their own block and its two neighbours.

        Args:
            num_random_blocks: further blocks that every block of long tokens attends to, drawn for each layer and head;
                the authors' models of this form have none.
            seed: seed of the random blocks.

        Source: Zaheer et al. (arXiv:2007.14062), section 2 and appendix E.
        """
        return cls(**{**BERT_DROPOUT, "attention_pattern": _blocks(block_tokens, num_random_blocks, seed), **fields})

    @classmethod
    def bigbird_etc_large(
        cls, block_tokens: int = 169, num_random_blocks: int = 0, seed: int = 0, **fields: Any
    ) -> "EtcTransformerConfig":
        """Return BigBird-ETC large: ETC-large with blocks of 169 tokens; see `bigbird_etc_base`."""
        return cls(
            **{**BERT_DROPOUT, **LARGE, "attention_pattern": _blocks(block_tokens, num_random_blocks, seed), **fields}
        )

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        check_etc(self)
        write_pattern(self)


__all__ = ["EtcTransformerConfig"]
