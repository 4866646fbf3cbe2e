"""Configuration of ETC and BigBird-ETC."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.models.config.choices import check_fields
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, HeadSizes, LMTransform, NormFields
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.config.patterns import write_pattern

from . import presets
from .checks import CHOICES, check_etc


@strict_config
class EtcTransformerConfig(
    NormFields, GatedMLPFields, DropoutFields, HeadSizes, LMTransform, LibraryConfig, PreTrainedConfig
):
    r"""Describe an ETC: long tokens that read a band and all global tokens, and global tokens that read everything.

    The defaults are the authors' base model. The presets `etc_base`, `etc_large`, `bigbird_etc_base` and
    `bigbird_etc_large` have their sizes and dropouts; every field can be changed on top.

    Args:
        local_radius: how many long tokens a long token reads on each side.
        attention_pattern: which long tokens a long token reads, instead of the band of `local_radius`, in any form that
            `sparsify` takes.
        chunk_tokens: long tokens for each global token, where a call gives no global tokens.
        spare_chunks: how many more global tokens rows of packed documents have than a text of their length, since every
            document begins a chunk: at most its number of documents − 1 are needed. None: 8, and one for each four
            chunks. Rows that need more get more, unless the model is compiled or exported: there they are refused.
        global_token_id: what every global token is, where a call does not say; its embedding is one of the vocabulary.
        max_relative_distance: k, the largest distance between two long or two global tokens that has a label of its
            own.
        relative_vocab_size: rows of a table of labels, at least 2k + 4; None: a model without labels.
        relative_std: standard deviation of the vectors of labels at the start.
        share_qkv_projections: one set of query, key and value maps for all four pieces of attention.
        share_kv_projections: queries of one input read both inputs by the same key and value maps; False, with
            `share_qkv_projections=False`: each of the four pieces has its own.
        share_output_projection: one output map for long and global tokens.
        share_feed_forward: one MLP, with its norm, for long and global tokens.
        hard_global_to_long: a global token reads only the long tokens that belong to it (and those of
            `global_reads_all` read all); long tokens read all global tokens nevertheless.
        hard_long_to_global: a long token reads only the global tokens that it belongs to.
        type_vocab_size, long_token_type: token types, and which of them long tokens have where a call does not say;
            global tokens then have type 0. `type_vocab_size=0`: there are none.
        norm_position: "post", as in BERT, or "pre", with another norm after the last layer.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias: bias vectors of query, key and value; output; MLP.
        max_position_embeddings: the longest text that the model is meant for, and that an exported program takes; no
            parameter depends on it, since labels take the place of absolute positions.
        cpc_loss_weight: factor of the loss that tells the global states of masked sentences apart (contrastive
            predictive coding), beside that of the task; see `EtcTransformerModel.forward`. The authors add 0.8 of
            masked language modelling and 0.2 of this: 0.25.
        classifier_pooling: what represents a text: the "mean" of its global tokens, or the "first" of them.
        classifier_head, classifier_activation: "linear", or "dense": a map and an activation before.
        long_answers: whether the head of questions also says which global token stands for the long answer.
        lm_head_transform, lm_head_bias: a linear map, activation and norm before the projection to the vocabulary, as
            BERT; and a bias on it.
        lm_transform_activation: that activation; None: `hidden_act`.
        is_causal: False. Global tokens read the whole text.

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

    vocab_size: int = 30_522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    is_causal: bool = False

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
    norm_eps: float | int = 1e-12
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
    classifier_head: str = "linear"
    classifier_activation: str = "tanh"
    long_answers: bool = False
    lm_head_transform: bool = True
    lm_head_bias: bool = True
    lm_transform_activation: str | None = None

    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sep_token_id: int | None = None

    etc_base = classmethod(presets.etc_base)
    etc_large = classmethod(presets.etc_large)
    bigbird_etc_base = classmethod(presets.bigbird_etc_base)
    bigbird_etc_large = classmethod(presets.bigbird_etc_large)

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        check_etc(self)
        write_pattern(self)


__all__ = ["EtcTransformerConfig"]
