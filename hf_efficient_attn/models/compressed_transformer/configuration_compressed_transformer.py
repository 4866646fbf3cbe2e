"""Configuration of the compressed Transformer: Linformer, linear attention, and kin."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.models.config.choices import check_fields
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, HeadSizes, LMTransform
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.config.patterns import write_pattern
from hf_efficient_attn.models.mechanisms.config import FeatureFields, LayerMechanisms, PriorFields, check_features
from hf_efficient_attn.models.sparse.config import BlockFields, PatternAlone

from . import presets
from .checks import (
    CHOICES,
    check_compression,
    check_landmarks,
    check_mechanisms,
    check_projections,
    check_shared_keys,
    check_softmax_heads,
    check_unused,
)


@strict_config
class CompressedTransformerConfig(
    PatternAlone,
    LayerMechanisms,
    FeatureFields,
    PriorFields,
    BlockFields,
    GatedMLPFields,
    DropoutFields,
    HeadSizes,
    LMTransform,
    LibraryConfig,
    PreTrainedConfig,
):
    r"""Describe a Transformer whose layers read a short form of the text: Linformer, and other mechanisms beside it.

    The presets `linformer_base`, `linformer_large`, `performer_base`, `nystromformer_base` and `t_dmca` are in the
    layouts of the papers; every field can be changed on top. `linformer` is an alias for a Linformer of any size.

    Args:
        mechanism: what the layers compute: "linformer"; "linear", attention by sums over keys; "nystrom",
            attention through landmarks; "memory_compressed", to one key for every few tokens; or "pattern", softmax
            attention that follows `attention_pattern`; "prior", the same with a prior by distance; "residual_scores",
            the same with the scores of the layer below added; "reused_weights", with the weights of the layer below,
            without queries and keys; "talking_heads", with heads that mix scores and weights; "collaborative_heads",
            with queries and keys that heads share; a list gives one per layer, so that they mix.
        attention_pattern: who reads whom in layers from "pattern" on, in any form that `sparsify` takes; None: all read
            all, or if causal all before. A list has None for the other layers, and for "reused_weights", which follows
            the layer below.
        is_causal: each token reads the past and itself. Linformer and Nyströmformer have no causal form.
        projected_tokens: k, the keys and values that the tokens of a Linformer's layer are projected to; a list gives
            one number per layer.
        max_position_embeddings: N, the columns of projection matrices, and the rows of "learned" positions. Texts may
            be shorter.
        projection_sharing: what has projection matrices of its own: "none" is shared: every head, keys and values
            (2 · heads of a layer); "headwise", keys and values of a layer (2); "kv", a layer (1); "layerwise": the
            model has one.
        projection_type: "linear": a matrix of k · N numbers; "convolution": of N / k tokens, kernel and stride, with a
            matrix per token within heads; "mean": of N / k tokens, without parameters.
        projection_first: the hidden states are projected, and then mapped to keys and values, with their bias added to
            each projected state, as in the authors' code; False: keys and values are projected, as in the paper. Both
            are the same without biases.
        projection_bias: a bias for each projected token, as in the library linformer-pytorch.
        projection_padding: "zero": padding is no part of what is projected; "ignore": masks are not looked at, except
            that embeddings of padding are zeros, as in the authors' code. What is padded then depends on how.
        feature_map: φ of linear attention, of queries and keys: "elu", elu(x) + 1; "positive_random", the features of
            Performers, of which the products are those of softmax in the mean; or "constant", 1, which is average
            attention, without queries and keys.
        num_features: how many of these a head has; None: head_dim · ln(head_dim), as the authors.
        feature_seed, feature_redraw_steps: of their draw, and after how many steps of training
            `RedrawFeaturesCallback` replaces them; None: never.
        normalizer_epsilon: what is added to the sum of weights of linear attention, but for random features, whose sums
            are divided by their largest terms instead.
        chunk_tokens: tokens of a chunk of causal linear attention, of which all pairs are computed; how fast it is, and
            not what is computed.
        num_landmarks: m of a Nyströmformer; texts of at most as many tokens have full attention.
        conv_kernel_size: tokens of the convolution over its values, an odd number; None: there is none.
        inverse_scale: by what the start of the iteration for the inverse is divided: a number for each text and "head",
            or one for the whole "batch", as transformers, where batch mates change the output.
        compression_tokens: f of memory-compressed attention, tokens of a slot, which has one key and one value.
        compression_by_head: its convolutions map within heads; False: all numbers of a key to each, as wide.
        compression_null_key: each head has a learned key and value, 0 at the start, that all tokens read; without, the
            first f - 1 tokens of a causal layer read nothing there.
        num_key_value_heads: how many heads of keys and values the query heads share, in models whose layers have the
            mechanisms "pattern", "prior", "residual_scores", "reused_weights" and "talking_heads"; None: none are
            shared.
        shared_key_width: how many numbers the queries and keys have that collaborative heads share, from
            num_attention_heads to hidden_size; None: hidden_size, with which they start as ordinary heads.
        prior_width_tokens: σ of the Gaussian by which the weight of a key falls with its distance.
        prior_is_trained: each head trains its w and b, which start from it; False: the Gaussian is predefined.
        norm_position, norm_type, norm_eps, norm_bias, norm_before_first_layer, embedding_norm, hidden_act, mlp_bias,
            gated_mlp, attention_bias, attention_output_bias, position_offset, sinusoid_layout, scale_embedding,
            type_vocab_size, lm_head_transform, lm_head_bias, lm_transform_bias, lm_transform_activation,
            classifier_head, classifier_activation, classifier_pooling, question_answering_head,
            question_answering_excludes_question: as in `SparseTransformerConfig`.
        position_embedding_type: "learned", "sinusoidal" or "none".

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Sources: Wang et al., "Linformer" (arXiv:2006.04768); Katharopoulos et al., "Transformers are RNNs"
    (arXiv:2006.16236); Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794); Xiong et al.,
    "Nyströmformer" (arXiv:2102.03902); Liu et al., "Generating Wikipedia by Summarizing Long Sequences"
    (arXiv:1801.10198); He et al., "RealFormer" (arXiv:2012.11747); Shazeer et al., "Talking-Heads Attention"
    (arXiv:2003.02436); Cordonnier et al., "Multi-Head Attention: Collaborate Instead of Concatenate"
    (arXiv:2006.16362); Ying et al., "LazyFormer" (arXiv:2102.12702); Lin et al., "A Survey of Transformers"
    (arXiv:2106.04554), sections 4.5 and 4.6.

    >>> config = CompressedTransformerConfig.linformer_base()
    >>> config.mechanism, config.projected_tokens, config.projection_sharing
    ('linformer', 128, 'layerwise')
    """

    model_type = "compressed_transformer"
    papers = (
        "2006.04768",
        "2006.16236",
        "2009.14794",
        "2102.03902",
        "1801.10198",
        "2012.11747",
        "2003.02436",
        "2006.16362",
        "2102.12702",
    )
    # scores of a head in a layer, for n tokens
    attention_cost = (
        "n · projected_tokens of linformer; none of linear, but n sums of features · (head_dim + 1) numbers; "
        "2 · n · num_landmarks + num_landmarks² of nystrom; n² / compression_tokens of memory_compressed, half of that "
        "if causal; the pairs of attention_pattern, without one n², of the others: in layer l of residual_scores with "
        "keys of l · head_dim numbers, in talking_heads of num_attention_heads · head_dim, in collaborative_heads of "
        "shared_key_width"
    )

    vocab_size: int = 30_522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    is_causal: bool = False

    mechanism: str | list[str] = "linformer"
    attention_pattern: Any = None
    projected_tokens: int | list[int] = 128
    projection_sharing: str = "headwise"
    projection_type: str = "linear"
    projection_first: bool = False
    projection_bias: bool = False
    projection_padding: str = "zero"

    num_landmarks: int = 64
    conv_kernel_size: int | None = 65
    inverse_scale: str = "head"

    compression_tokens: int = 3
    compression_by_head: bool = True
    compression_null_key: bool = False

    num_key_value_heads: int | None = None
    shared_key_width: int | None = None

    norm_eps: float | int = 1e-12
    max_position_embeddings: int = 512
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

    linformer = classmethod(presets.linformer)
    linformer_base = classmethod(presets.linformer_base)
    linformer_large = classmethod(presets.linformer_large)
    performer_base = classmethod(presets.performer_base)
    nystromformer_base = classmethod(presets.nystromformer_base)
    t_dmca = classmethod(presets.t_dmca)

    def cached_numbers(self, layer_idx: int, num_tokens: int) -> int:
        """Return how many numbers a layer of a causal model keeps of a text of so many tokens."""
        if self.mechanism_of_layer(layer_idx) == "linear":
            return self.num_attention_heads * self.state_of_head
        if self.mechanism_of_layer(layer_idx) == "memory_compressed":
            slots = max(1, num_tokens // self.compression_tokens)
            return 2 * (self.compression_tokens - 1 + slots) * self.hidden_size
        values = self.key_value_heads * self.head_dim
        if self.mechanism_of_layer(layer_idx) == "reused_weights":
            return num_tokens * values
        keys = self.width_of_shared_keys if self.mechanism_of_layer(layer_idx) == "collaborative_heads" else values
        return num_tokens * (keys + values)

    @property
    def width_of_shared_keys(self) -> int:
        """How many numbers queries and keys have that collaborative heads share."""
        return self.shared_key_width or self.num_attention_heads * self.head_dim

    def compared_layers(self, layer_idx: int) -> list[int]:
        """Return the layers of which queries and keys a layer that follows a pattern compares, together."""
        mechanism = self.mechanism_of_layer(layer_idx)
        if mechanism == "reused_weights":
            return self.compared_layers(layer_idx - 1)
        return (
            [each for each in self.layers_with(mechanism) if each <= layer_idx]
            if mechanism == "residual_scores"
            else [layer_idx]
        )

    def compared_width(self, layer_idx: int) -> int:
        """Return how many numbers a head compares for a pair in such a layer."""
        layers = self.compared_layers(layer_idx)
        shares = self.mechanism_of_layer(layers[-1]) == "collaborative_heads"
        return self.width_of_shared_keys if shares else len(layers) * self.head_dim

    @property
    def has_one_length(self) -> bool:
        """Whether what a model has learned goes with its longest text: a Linformer's projections."""
        return bool(self.layers_with("linformer"))

    def slots_of_layer(self, layer_idx: int) -> int:
        """Return k, to how many keys a layer projects."""
        return self.projected_tokens[layer_idx] if isinstance(self.projected_tokens, list) else self.projected_tokens

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        check_mechanisms(self)
        check_unused(self)
        check_projections(self)
        check_features(self)
        check_landmarks(self)
        check_compression(self)
        check_softmax_heads(self)
        check_shared_keys(self)
        write_pattern(self)


__all__ = ["CompressedTransformerConfig"]
