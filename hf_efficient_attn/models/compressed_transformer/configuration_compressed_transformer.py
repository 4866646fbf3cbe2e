"""Configuration of the compressed Transformer: Linformer, linear attention and others."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import FIELD, is_single
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_fields, check_least, meant, write_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import (
    BERT_DROPOUT,
    BertBlockFields,
    DropoutFields,
    GatedMLPFields,
    HeadSizes,
    PatternAlone,
)
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.mechanisms.config import (
    FEATURE_FIELDS,
    FEATURE_MAPS,
    PRIOR_FIELDS,
    FeatureFields,
    PriorFields,
    check_features,
)
from hf_efficient_attn.patterns.blocks import BlockLocal
from hf_efficient_attn.patterns.config_spec import patterns_per_layer

# Which fields of a `CompressedTransformerConfig` exclude each other, and what to do about it.


# mechanisms that follow attention_pattern
FOLLOWERS = ("pattern", "prior", "residual_scores", "reused_weights", "talking_heads", "collaborative_heads")
# mechanisms in which heads may share keys and values
SHARERS = tuple(name for name in FOLLOWERS if name != "collaborative_heads")
# mechanisms whose attention weights a layer above may reuse
REUSABLE = ("pattern", "residual_scores", "collaborative_heads")
MECHANISMS = ("linformer", "linear", "nystrom", "memory_compressed", *FOLLOWERS)
# names that others give to mechanism="linear" with this setting
SPELT = {
    "performer": "feature_map='positive_random'",
    "average": "feature_map='constant'",
}
# why a mechanism has no causal form, as the end of a sentence
NOT_CAUSAL = {
    "linformer": "each projected key is a sum over the whole text, so a token would attend to later ones",
    "nystrom": "each landmark is a mean over a segment of the whole text, so a token would attend to later ones",
}
# fields that only layers of one mechanism use
OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "linformer": (
        "projected_tokens",
        "projection_sharing",
        "projection_type",
        "projection_first",
        "projection_bias",
        "projection_padding",
    ),
    "linear": FEATURE_FIELDS,
    "nystrom": ("num_landmarks", "conv_kernel_size", "inverse_scale"),
    "memory_compressed": ("compression_tokens", "compression_by_head", "compression_null_key"),
    "prior": PRIOR_FIELDS,
    "collaborative_heads": ("shared_key_width",),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "projection_sharing": ("none", "headwise", "kv", "layerwise"),
    "projection_type": ("linear", "convolution", "mean"),
    "projection_padding": ("zero", "ignore"),
    "feature_map": FEATURE_MAPS,
    "inverse_scale": ("head", "batch"),
    "classifier_head": ("linear", "dense", "transform"),
    "question_answering_head": ("linear", "residual_mlp", "transform"),
}


def check_mechanisms(config: Any) -> None:
    """Raise ConfigurationError for mechanisms that are unknown, too few or many, or have no causal form."""
    listed = config.mechanism if isinstance(config.mechanism, list) else [config.mechanism]
    for each in listed:
        if each in SPELT:
            raise ConfigurationError(
                f"mechanism={shown(config.mechanism)}: for {each}, use mechanism='linear' with {SPELT[each]}."
            )
        if each not in MECHANISMS:
            raise ConfigurationError(
                f"mechanism={shown(config.mechanism)}: {shown(each)} is not one of {', '.join(MECHANISMS)}. Give one "
                f"for all layers, or a list with one for each.{meant(each, MECHANISMS)}"
            )
        if config.is_causal and each in NOT_CAUSAL:
            raise ConfigurationError(
                f"mechanism={shown(each)} has no causal form: {NOT_CAUSAL[each]}. Leave is_causal=True out, or use "
                "another mechanism for causal language models."
            )
    if isinstance(config.mechanism, list) and len(config.mechanism) != config.num_hidden_layers:
        raise ConfigurationError(
            f"mechanism lists {len(config.mechanism)} mechanisms for {config.num_hidden_layers} layers; give one for "
            "each layer."
        )
    check_reused(config)
    check_followers(config)


def check_followers(config: Any) -> None:
    """Raise ConfigurationError for a pattern of layers that follow none."""
    spec = getattr(config, FIELD, None)
    if spec is None:
        return
    names = ", ".join(shown(each) for each in FOLLOWERS)
    listed = [config.mechanism_of_layer(layer) for layer in _layers(config)]
    if not set(FOLLOWERS) & set(listed):
        raise ConfigurationError(
            f"{FIELD}={shown(spec)}, but no layer follows a pattern. Give some layers one of the mechanisms {names}, "
            "in a list with one for each layer, or leave the pattern out."
        )
    patterns = patterns_per_layer(spec, len(listed))
    for layer, pattern in enumerate([] if is_single(spec) else patterns):
        if pattern is not None and listed[layer] not in FOLLOWERS:
            raise ConfigurationError(
                f"{FIELD} has a pattern for layer {layer}, but its mechanism {shown(listed[layer])} follows no "
                f"pattern. Give None for this layer, or one of the mechanisms {names}."
            )
        if pattern is not None and listed[layer] == "reused_weights" and pattern != patterns[layer - 1]:
            raise ConfigurationError(
                f"{FIELD} has a pattern for layer {layer}, but this layer reuses the attention weights of the layer "
                "below, and with them its pattern. Give None for this layer."
            )


def check_reused(config: Any) -> None:
    """Raise ConfigurationError for layers that reuse weights, but have no layer with weights below."""
    for layer in config.layers_with("reused_weights"):
        below = config.mechanism_of_layer(layer - 1) if layer else None
        allowed = (*REUSABLE, "reused_weights")
        if below not in allowed:
            raise ConfigurationError(
                f"mechanism has 'reused_weights' for layer {layer}, which reuses the attention weights of the layer "
                f"below. That layer must have one of the mechanisms {', '.join(allowed)}; "
                + ("there is no layer below." if below is None else f"it is {shown(below)}.")
            )


def check_unused(config: Any) -> None:
    """Raise ConfigurationError for a field of a mechanism that no layer has."""
    for mechanism, names in OWN_FIELDS.items():
        for name in () if config.layers_with(mechanism) else names:
            value, default = getattr(config, name), getattr(type(config), name)
            if value != default:
                raise ConfigurationError(
                    f"{name}={shown(value)}, but only mechanism={shown(mechanism)} uses it, and no layer has that "
                    f"mechanism. Leave {name} out (its default is {shown(default)}), or give a layer that mechanism."
                )


def check_projections(config: Any) -> None:
    """Raise ConfigurationError for projections that a Linformer cannot have."""
    slots, length = config.projected_tokens, config.max_position_embeddings
    if isinstance(slots, list) and len(slots) != config.num_hidden_layers:
        raise ConfigurationError(
            f"projected_tokens lists {len(slots)} numbers for {config.num_hidden_layers} layers; give one for each "
            "layer."
        )
    used = {config.slots_of_layer(layer) for layer in config.layers_with("linformer")}
    if any(each > length for each in used):
        raise ConfigurationError(
            f"projected_tokens={shown(slots)} must be at most max_position_embeddings={length}, because they are sums "
            "over that number of tokens. A Linformer must have fewer keys than tokens."
        )
    if config.projection_sharing == "layerwise" and len(used) > 1:
        raise ConfigurationError(
            f"projected_tokens={shown(slots)} differ between layers, but with projection_sharing='layerwise' all "
            "layers share one matrix. Use 'kv' or 'headwise', or one number."
        )
    strided = config.projection_type != "linear"
    if strided and any(length % each for each in used):
        raise ConfigurationError(
            f"projection_type={shown(config.projection_type)} joins max_position_embeddings / projected_tokens tokens, "
            f"but projected_tokens={shown(slots)} does not divide max_position_embeddings={length}."
        )
    if config.projection_type == "mean" and config.projection_bias:
        raise ConfigurationError("projection_bias=True, but projection_type='mean' has no parameters. Leave it out.")
    if config.projection_first and (config.projection_sharing == "none" or config.projection_type == "convolution"):
        raise ConfigurationError(
            "projection_first=True projects states before they are split into heads, but "
            f"projection_sharing={shown(config.projection_sharing)} with "
            f"projection_type={shown(config.projection_type)} projects within heads. Use 'headwise', 'kv' or "
            "'layerwise' with 'linear' or 'mean', or projection_first=False."
        )


def check_landmarks(config: Any) -> None:
    """Raise ConfigurationError for landmarks or a convolution that a Nyströmformer cannot have."""
    if config.layers_with("nystrom") and config.num_landmarks > config.max_position_embeddings:
        raise ConfigurationError(
            f"num_landmarks={config.num_landmarks} is more than "
            f"max_position_embeddings={config.max_position_embeddings}, but landmarks are means of tokens. Use fewer; "
            "if the two are equal, the model has full attention at every length."
        )
    size = config.conv_kernel_size
    if size is not None and (size < 1 or size % 2 == 0):
        raise ConfigurationError(
            f"conv_kernel_size={size} must be an odd number of tokens, the same number on both sides, or None for no "
            "convolution."
        )


def check_softmax_heads(config: Any) -> None:
    """Raise ConfigurationError for heads that share keys and values in layers in which they cannot."""
    groups, listed = config.num_key_value_heads, {config.mechanism_of_layer(each) for each in _layers(config)}
    if groups is not None and (groups < 1 or config.num_attention_heads % groups):
        raise ConfigurationError(
            f"num_key_value_heads={groups} must divide num_attention_heads={config.num_attention_heads}."
        )
    if config.key_value_heads != config.num_attention_heads and not listed <= set(SHARERS):
        raise ConfigurationError(
            f"num_key_value_heads={groups} shares keys and values among heads. Layers of the mechanisms "
            f"{', '.join(SHARERS)} can do this, but {', '.join(sorted(listed - set(SHARERS)))} cannot. Leave "
            "num_key_value_heads out."
        )


def check_shared_keys(config: Any) -> None:
    """Raise ConfigurationError for queries and keys that collaborative heads cannot share."""
    width, heads = config.shared_key_width, config.num_attention_heads
    if width is not None and not heads <= width <= config.hidden_size:
        raise ConfigurationError(
            f"shared_key_width={width} must be from num_attention_heads={heads} to hidden_size={config.hidden_size}, "
            "or None: each head starts with its share of these numbers."
        )


def _layers(config: Any) -> range:
    return range(config.num_hidden_layers)


# Published networks, as fields of `CompressedTransformerConfig`; keywords change or add fields.


# RoBERTa's layout, in which the paper pretrains Linformer
ROBERTA: dict[str, Any] = {
    "vocab_size": 50_265,
    "max_position_embeddings": 512,
    "position_offset": 2,
    "norm_eps": 1e-5,
    "classifier_head": "dense",
    "classifier_pooling": "first",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    **BERT_DROPOUT,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


@strict_config
class CompressedTransformerConfig(
    PatternAlone,
    FeatureFields,
    PriorFields,
    BertBlockFields,
    GatedMLPFields,
    DropoutFields,
    HeadSizes,
    LibraryConfig,
    PreTrainedConfig,
):
    r"""Config of a Transformer with compressed attention: Linformer, Nyströmformer, linear attention and others.

    The presets `linformer_base`, `linformer_large`, `performer_base`, `nystromformer_base` and `t_dmca` have the sizes
    of the papers; every field can be changed on top. `linformer` is an alias for a Linformer of any size.

    Args:
        mechanism: the attention of the layers, or a list with one for each layer: "linformer"; "linear": attention by
            sums over keys; "nystrom": attention through landmarks; "memory_compressed": attention to one key for every
            few tokens; "pattern": softmax attention that follows `attention_pattern`; and variants of "pattern":
            "prior" has a prior by distance; "residual_scores" adds the scores of the layer below; "reused_weights" has
            the attention weights of the layer below, without queries and keys; "talking_heads" mixes scores and weights
            of heads; "collaborative_heads" shares queries and keys among heads.
        attention_pattern: which token attends to which in layers with "pattern" and its variants, in any form that
            `sparsify` takes; None: full (or causal) attention. In a list, the other layers have None, and so have
            layers with "reused_weights", which follow the layer below.
        is_causal: whether each token attends only to itself and the past. Linformer and Nyströmformer have no causal
            form.
        projected_tokens: k, the number of keys and values that a Linformer's layer projects the tokens to; a list gives
            one number per layer.
        max_position_embeddings: N, the columns of projection matrices, and the rows of "learned" positions. Texts may
            be shorter.
        projection_sharing: how projection matrices are shared. "none": every head has one for keys and one for values;
            "headwise": every layer has one for keys and one for values; "kv": every layer has one; "layerwise": the
            model has one.
        projection_type: "linear": a matrix of k · N numbers; "convolution": kernel and stride of N / k tokens, with a
            matrix per token within heads; "mean": the mean of N / k tokens, without parameters.
        projection_first: whether hidden states are projected first and then mapped to keys and values, whose bias is
            added to each projected state, as in the authors' code. False: keys and values are projected, as in the
            paper. Without biases both are the same.
        projection_bias: whether each projected token has a bias, as in the library linformer-pytorch.
        projection_padding: "zero": padding is left out of projections; "ignore": masks only set embeddings of padding
            to zero, as in the authors' code, and outputs depend on how sequences are padded.
        feature_map: φ, the feature map of queries and keys in linear attention: "elu": elu(x) + 1; "positive_random":
            the features of Performers, whose products have the weights of softmax attention as their mean; "constant":
            1, which is average attention without queries and keys.
        num_features: number of random features of a head; None: head_dim · ln(head_dim), as in the authors' code.
        feature_seed, feature_redraw_steps: seed of the random features, and number of training steps after which
            `RedrawFeaturesCallback` redraws them; None: never.
        normalizer_epsilon: added to the sum of weights in linear attention, except with random features, where sums are
            divided by their largest terms instead.
        chunk_tokens: length of a chunk in causal linear attention, within which all pairs are computed. It changes the
            speed and not the outputs.
        num_landmarks: m of a Nyströmformer; sequences of at most m tokens have full attention.
        conv_kernel_size: kernel size of the convolution over a Nyströmformer's values in tokens, an odd number; None:
            no convolution.
        inverse_scale: the divisor of the initial value in the iteration for the inverse: "head": one for each example
            and head; "batch": one for the whole batch, as in transformers, so that other examples change the output.
        compression_tokens: f of memory-compressed attention: the number of tokens that share one key and one value.
        compression_by_head: whether the convolutions of memory-compressed attention map within heads; False: over the
            whole width.
        compression_null_key: whether each head has a learned key and value, 0 at the start, that all tokens attend to.
            Without it the first f - 1 tokens of a causal layer attend to nothing.
        num_key_value_heads: number of key and value heads that the query heads share, in models whose layers all have
            one of the mechanisms "pattern", "prior", "residual_scores", "reused_weights" and "talking_heads"; None: no
            heads are shared.
        shared_key_width: width of the queries and keys that collaborative heads share, from num_attention_heads to
            hidden_size; None: hidden_size, with which they start as ordinary heads.
        prior_width_tokens: σ of the Gaussian by which the weight of a key falls with its distance.
        prior_is_trained: whether each head trains its w and b, which start as this Gaussian; False: the Gaussian is
            fixed.
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
        "linformer: n · projected_tokens; linear: none, but n sums of features · (head_dim + 1) numbers; nystrom: 2 · "
        "n · num_landmarks + num_landmarks²; memory_compressed: n² / compression_tokens, half if causal; others: the "
        "pairs of attention_pattern, without a pattern n². Keys have l · head_dim numbers in layer l of "
        "residual_scores, num_attention_heads · head_dim in talking_heads, shared_key_width in collaborative_heads"
    )

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

    shared_key_width: int | None = None
    max_position_embeddings: int = 512

    @classmethod
    def linformer(cls, **fields: Any) -> "CompressedTransformerConfig":
        """Return a Linformer of any size: every layer has this mechanism; other fields are as given, or default.

        It is an alias: `model_type` stays "compressed_transformer", and no "linformer" is registered, because a later
        transformers may have its own.
        """
        return cls(mechanism="linformer", **fields)

    @classmethod
    def linformer_base(cls, **fields: Any) -> "CompressedTransformerConfig":
        """Return Linformer in RoBERTa-base's layout: 512 tokens, 128 projected keys, one matrix for all layers.

        The models in the paper's efficiency tables share matrices `layerwise`, the authors' code by default `headwise`.
        The paper also uses 256 projected keys, for 512 and for 1,024 tokens.
        """
        return cls(**{**ROBERTA, "projection_sharing": "layerwise", "projection_first": True, **fields})

    @classmethod
    def linformer_large(cls, **fields: Any) -> "CompressedTransformerConfig":
        """Return the same in RoBERTa-large's layout, as in the authors' code."""
        return cls.linformer_base(**{**LARGE, **fields})

    @classmethod
    def performer_base(cls, **fields: Any) -> "CompressedTransformerConfig":
        """Return linear attention with positive random features in RoBERTa-base's layout.

        `RedrawFeaturesCallback` redraws the features every 1,000 steps; this number is our choice.
        """
        own = {"mechanism": "linear", "feature_map": "positive_random", "feature_redraw_steps": 1000}
        return cls(**{**ROBERTA, **own, **fields})

    @classmethod
    def nystromformer_base(cls, **fields: Any) -> "CompressedTransformerConfig":
        """Return Nyströmformer in the layout of transformers' model, for 4,096 tokens and with 64 landmarks.

        With `inverse_scale="batch"` it computes the same as that model if all sequences of a batch have the same
        length, and num_landmarks divides it.
        """
        own = {
            "mechanism": "nystrom",
            "vocab_size": 30_000,
            "hidden_act": "gelu_new",
            "type_vocab_size": 2,
            "position_offset": 2,
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "classifier_head": "dense",
            "classifier_pooling": "first",
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "sep_token_id": 2,
            **BERT_DROPOUT,
        }
        return cls(**{**own, **fields})

    @classmethod
    def t_dmca(cls, **fields: Any) -> "CompressedTransformerConfig":
        """Return T-DMCA, a decoder for a source and its article as one text.

        Its layers are L M L M L: local (L) and memory-compressed (M). Tokens in local layers attend to their block of
        256 tokens. Width, heads, relu, post-norm, interleaved sinusoids and the shared scaled embedding are those of
        the base Transformer, the vocabulary has 32,000 tokens, and texts have up to 11,000. The layer of experts that
        the paper adds to some models is not built.

        Source: Liu et al. (arXiv:1801.10198), section 4.2.
        """
        own = {
            "mechanism": ["pattern", "memory_compressed", "pattern", "memory_compressed", "pattern"],
            "attention_pattern": [BlockLocal(256), None, BlockLocal(256), None, BlockLocal(256)],
            "is_causal": True,
            "vocab_size": 32_000,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "hidden_act": "relu",
            "max_position_embeddings": 11_000,
            "position_embedding_type": "sinusoidal",
            "scale_embedding": True,
            "initializer_range": 512**-0.5,
            "embedding_norm": False,
            "lm_head_transform": False,
            "lm_head_bias": False,
            "embedding_dropout": 0.1,
            "hidden_dropout": 0.1,
        }
        return cls(**{**own, **fields})

    def mechanism_of_layer(self, layer_idx: int) -> str:
        """Return the mechanism of a layer."""
        return self.mechanism[layer_idx] if isinstance(self.mechanism, list) else self.mechanism

    def layers_with(self, mechanism: str) -> list[int]:
        """Return the layers that have a mechanism, by their index."""
        return [layer for layer in range(self.num_hidden_layers) if self.mechanism_of_layer(layer) == mechanism]

    def cached_numbers(self, layer_idx: int, num_tokens: int) -> int:
        """Return how many numbers a layer of a causal model caches for a text of `num_tokens` tokens."""
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
        """Width of the queries and keys that collaborative heads share."""
        return self.shared_key_width or self.num_attention_heads * self.head_dim

    def compared_layers(self, layer_idx: int) -> list[int]:
        """Return the layers whose queries and keys are compared in a layer that follows a pattern."""
        mechanism = self.mechanism_of_layer(layer_idx)
        if mechanism == "reused_weights":
            return self.compared_layers(layer_idx - 1)
        return (
            [each for each in self.layers_with(mechanism) if each <= layer_idx]
            if mechanism == "residual_scores"
            else [layer_idx]
        )

    def compared_width(self, layer_idx: int) -> int:
        """Return the width of the queries and keys that a head compares in such a layer."""
        layers = self.compared_layers(layer_idx)
        shares = self.mechanism_of_layer(layers[-1]) == "collaborative_heads"
        return self.width_of_shared_keys if shares else len(layers) * self.head_dim

    @property
    def has_one_length(self) -> bool:
        """Whether weights depend on the longest text, as a Linformer's projections do."""
        return bool(self.layers_with("linformer"))

    def slots_of_layer(self, layer_idx: int) -> int:
        """Return k, the number of keys that a layer projects to."""
        return self.projected_tokens[layer_idx] if isinstance(self.projected_tokens, list) else self.projected_tokens

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        check_least(self, num_landmarks=1, compression_tokens=1)
        self.check_head_sizes()
        check_mechanisms(self)
        check_unused(self)
        check_projections(self)
        check_features(self)
        check_landmarks(self)
        check_softmax_heads(self)
        check_shared_keys(self)
        write_pattern(self)


__all__ = ["CompressedTransformerConfig"]
