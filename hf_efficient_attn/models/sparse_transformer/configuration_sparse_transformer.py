"""Configuration of the sparse Transformer: an encoder or a causal decoder whose layers follow patterns."""

from collections.abc import Mapping

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_efficient_attn.attention.layer_patterns import config_patterns
from hf_efficient_attn.attention.model_parts import DECODER
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.choices import check_fields
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, HeadSizes, LMTransform
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.config.patterns import check_attention, write_pattern
from hf_efficient_attn.models.sparse.config import SparseFields
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

from . import presets

CHOICES = {
    "classifier_pooling": (None, "first", "last", "mean"),
    "classifier_head": ("linear", "dense", "transform"),
    "question_answering_head": ("linear", "residual_mlp", "transform"),
}


@strict_config
class SparseTransformerConfig(
    SparseFields, GatedMLPFields, DropoutFields, HeadSizes, LMTransform, LibraryConfig, PreTrainedConfig
):
    r"""Describe a Transformer whose layers follow patterns: Longformer, BigBird, or any other.

    The presets `longformer`, `longformer_char_lm`, `bigbird_itc`, `block_local`, `strided` and `sliding` set the
    papers' defaults; every field can be changed on top.

    Args:
        attention_pattern: who reads whom, in any form that `sparsify` takes; a pattern, its dict, a list per layer, or
            a tile. Causal models use its causal form. None: full (or causal) attention.
        is_causal: each token sees the past and itself (language models), or both sides.
        global_tokens: which tokens read, and are read by, everything (in a causal model, all that lies before),
            whatever the pattern says, if a call has no `global_attention_mask`:
            "first"; "question", those before the first `sep_token_id`; "choice", those after its second part begins;
            {"positions": [...]}; {"token_ids": [...]}; {"every": k}; None; "auto": by the head, "first" in sequence
            classification, "question" in question answering, "choice" in multiple choice, none elsewhere.
        global_projections: global tokens read with query, key and value projections of their own, which start as
            copies.
        max_global_tokens: how many global tokens an example may have in a compiled or exported model with
            `global_projections`, which cannot count them.
        random_blocks_in_eval: "fixed", the same random blocks always (BigBird's paper and authors), or "transformers",
            which replaces them by copies of block 0 in eval mode (padded rows still differ from transformers, which
            takes padding for text). Causal models have "fixed" only.
        full_attention_up_to: inputs of at most this many tokens are read by full attention (transformers' BigBird:
            704), padding included, as there; None: the pattern holds at every length. Not for causal models; with
            it, longer rows cannot be packed.
        norm_position: "post", as in BERT, or "pre", with another norm after the last block.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        norm_before_first_layer: False leaves out the first norm of pre-norm models, as ModernBERT does.
        embedding_norm: a norm on the sum of the embeddings.
        position_embedding_type: "learned", "sinusoidal", "relative" (Transformer-XL's, within windows), "rope", "none".
        max_position_embeddings: longest input in tokens of "learned" positions.
        position_offset: rows of the learned table before that of position 0; 2 in RoBERTa. `position_ids` count from 0.
        sinusoid_layout: "interleaved" (Vaswani et al.) or "halves" (Marian, Pegasus).
        scale_embedding: multiply token embeddings by √hidden_size.
        rope_theta_per_layer: base of the rotary frequencies of each layer, instead of `rope_parameters`.
        type_vocab_size: token types; 0: none.
        embedding_dropout, hidden_dropout, activation_dropout, attention_dropout, classifier_dropout: of the sum of the
            embeddings, of what attention and MLP add, of the MLP's inner activations, of attention weights, and before
            the labels; 0 except in the presets of papers that use it: 0.1 in `longformer` and `bigbird_itc`, as in
            RoBERTa and BERT (not in their causal forms, which no paper has), 0.2 or 0.4 in `longformer_char_lm`. Each
            is an `nn.Dropout` of the model.
        attention_bias, attention_output_bias, mlp_bias: bias vectors of query, key and value; output; MLP.
        gated_mlp: act(x·W_gate) * (x·W_up), as ModernBERT.
        lm_head_transform, lm_head_bias: a linear map, activation and norm before the projection to the vocabulary, as
            BERT; and a bias on it.
        lm_transform_bias, lm_transform_activation: a bias on that linear map, and the activation after it (None: the
            MLP's), also for other heads that have such a map ("transform"). RoBERTa and Longformer always have "gelu"
            there.
        classifier_head, classifier_activation: "linear"; "dense": a map of `hidden_size` and an activation before; or
            "transform": a map, `lm_transform_activation` and a norm, as ModernBERT.
        classifier_pooling: the token that represents a sequence: "first", "last" or "mean"; None: "last" if causal,
            otherwise "mean".
        question_answering_head: "linear"; "residual_mlp", as transformers' BigBird; or "transform", as above.
        question_answering_excludes_question: answers never begin or end in the question, as transformers' BigBird.

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Sources: Beltagy et al. (arXiv:2004.05150); Zaheer et al. (arXiv:2007.14062).

    >>> config = SparseTransformerConfig.longformer(num_hidden_layers=2, attention_window=[64, 128])
    >>> [layer["left"] for layer in config.attention_pattern]
    [32, 64]
    """

    model_type = "sparse_transformer"
    papers = ("2004.05150", "2007.14062")
    can_shard_sequence = True
    # scores of a head in a layer, for n tokens
    attention_cost = "the pairs of attention_pattern, such as n · (left + right + 1) of a band; without one n²"

    vocab_size: int = 30_522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    is_causal: bool = False

    norm_eps: float | int = 1e-12
    rope_parameters: RopeParameters | dict | None = None
    rope_theta_per_layer: list[float] | None = None
    type_vocab_size: int = 0

    lm_head_transform: bool = True
    lm_head_bias: bool = True
    lm_transform_bias: bool = True
    lm_transform_activation: str | None = None
    classifier_head: str = "linear"
    classifier_activation: str = "tanh"
    classifier_pooling: str | None = None
    question_answering_head: str = "linear"
    question_answering_excludes_question: bool = False

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sep_token_id: int | None = None

    longformer = classmethod(presets.longformer)
    longformer_char_lm = classmethod(presets.longformer_char_lm)
    bigbird_itc = classmethod(presets.bigbird_itc)
    block_local = classmethod(presets.block_local)
    strided = classmethod(presets.strided)
    sliding = classmethod(presets.sliding)

    def readable_patterns(self) -> tuple[Pattern | None, ...]:
        """Return what each layer can read, global tokens included, for `PatternCache`.

        Raises:
            ConfigurationError: global tokens without fixed positions, or with keys of their own.
        """
        patterns = config_patterns(self.attention_pattern, self, DECODER) or ()
        rule = None if self.global_tokens == "auto" else self.global_tokens
        positions = (0,) if rule == "first" else rule.get("positions") if isinstance(rule, Mapping) else None
        if self.global_projections or (rule is not None and positions is None):
            raise ConfigurationError(
                f"PatternCache holds a band and first tokens, but this model has global_tokens={shown(rule)} and "
                f"global_projections={self.global_projections}. Generate with the default cache, which holds all."
            )
        if positions is None:
            return patterns
        return tuple(None if pattern is None else pattern | GlobalTokens(positions) for pattern in patterns)

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        if self.num_attention_heads % self.key_value_heads or (
            self.key_value_heads != self.num_attention_heads and self.global_projections
        ):
            raise ConfigurationError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads="
                f"{self.num_attention_heads}, and equal it where global_projections=True."
            )
        thetas = self.rope_theta_per_layer
        if thetas is not None and len(thetas) != self.num_hidden_layers:
            raise ConfigurationError(
                f"rope_theta_per_layer lists {len(thetas)} bases for {self.num_hidden_layers} layers; give one each."
            )
        check_attention(self)
        write_pattern(self)


__all__ = ["SparseTransformerConfig"]
