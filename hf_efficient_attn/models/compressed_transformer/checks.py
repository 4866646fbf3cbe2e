"""Which fields of a `CompressedTransformerConfig` exclude each other, and what to do about it."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import FIELD, is_single
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.choices import meant
from hf_efficient_attn.models.mechanisms.config import FEATURE_FIELDS, FEATURE_MAPS, PRIOR_FIELDS, check_number
from hf_efficient_attn.patterns.config_spec import patterns_per_layer

# those that follow attention_pattern
FOLLOWERS = ("pattern", "prior", "residual_scores", "reused_weights", "talking_heads", "collaborative_heads")
# those that may share keys and values among heads
SHARERS = tuple(name for name in FOLLOWERS if name != "collaborative_heads")
# those whose weights a layer above may read with
REUSABLE = ("pattern", "residual_scores", "collaborative_heads")
MECHANISMS = ("linformer", "linear", "nystrom", "memory_compressed", *FOLLOWERS)
# what others call a mechanism with a setting of its own
SPELT = {
    "performer": "feature_map='positive_random'",
    "average": "feature_map='constant'",
}
# why a mechanism has no causal form, as the end of a sentence
NOT_CAUSAL = {
    "linformer": "each of its projected keys is a sum over the whole text, so that a token would read what follows it",
    "nystrom": "each of its landmarks is a mean over a segment of the whole text, so that a token would read what "
    "follows it",
}
# fields that only layers of one mechanism read
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
    "classifier_pooling": (None, "first", "last", "mean"),
    "classifier_head": ("linear", "dense", "transform"),
    "question_answering_head": ("linear", "residual_mlp", "transform"),
}


def check_mechanisms(config: Any) -> None:
    """Raise ConfigurationError for mechanisms that are unknown, too few or many, or have no causal form."""
    listed = config.mechanism if isinstance(config.mechanism, list) else [config.mechanism]
    for each in listed:
        if each in SPELT:
            raise ConfigurationError(
                f"mechanism={shown(config.mechanism)}: what is called {each} is mechanism='linear' with {SPELT[each]}."
            )
        if each not in MECHANISMS:
            raise ConfigurationError(
                f"mechanism={shown(config.mechanism)}: {shown(each)} is none of {', '.join(MECHANISMS)}. Give one for "
                f"all layers, or a list with one for each.{meant(each, MECHANISMS)}"
            )
        if config.is_causal and each in NOT_CAUSAL:
            raise ConfigurationError(
                f"mechanism={shown(each)} has no causal form: {NOT_CAUSAL[each]}. Leave is_causal=True out, or take "
                "another mechanism for language models."
            )
    check_number(config)
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
            f"{FIELD}={shown(spec)}: no layer follows a pattern. Give one of the mechanisms {names} to those that "
            "shall, in a list with one for each layer, or leave the pattern out."
        )
    patterns = patterns_per_layer(spec, len(listed))
    for layer, pattern in enumerate([] if is_single(spec) else patterns):
        if pattern is not None and listed[layer] not in FOLLOWERS:
            raise ConfigurationError(
                f"{FIELD} has a pattern for layer {layer}, whose mechanism {shown(listed[layer])} follows none. Give "
                f"None for this layer, or one of the mechanisms {names}."
            )
        if pattern is not None and listed[layer] == "reused_weights" and pattern != patterns[layer - 1]:
            raise ConfigurationError(
                f"{FIELD} has a pattern for layer {layer}, which reads with the weights of the layer below, and so by "
                "its pattern. Give None for this layer."
            )


def check_reused(config: Any) -> None:
    """Raise ConfigurationError for layers that have no weights below to read with."""
    for layer in config.layers_with("reused_weights"):
        below = config.mechanism_of_layer(layer - 1) if layer else None
        allowed = (*REUSABLE, "reused_weights")
        if below not in allowed:
            raise ConfigurationError(
                f"mechanism has 'reused_weights' for layer {layer}, which reads with the weights of the layer below. "
                f"That must be of one of the mechanisms {', '.join(allowed)}; "
                + ("there is none." if below is None else f"it is {shown(below)}.")
            )


def check_unused(config: Any) -> None:
    """Raise ConfigurationError for a field of a mechanism that no layer has."""
    for mechanism, names in OWN_FIELDS.items():
        for name in () if config.layers_with(mechanism) else names:
            value, default = getattr(config, name), getattr(type(config), name)
            if value != default:
                raise ConfigurationError(
                    f"{name}={shown(value)}, but no layer has mechanism={shown(mechanism)}, which alone reads it. "
                    f"Leave it out (it is then {shown(default)}), or give a layer that mechanism."
                )


def check_projections(config: Any) -> None:
    """Raise ConfigurationError for projections that a Linformer cannot have."""
    slots, length = config.projected_tokens, config.max_position_embeddings
    if isinstance(slots, list) and len(slots) != config.num_hidden_layers:
        raise ConfigurationError(
            f"projected_tokens lists {len(slots)} numbers for {config.num_hidden_layers} layers; give one each."
        )
    used = {config.slots_of_layer(layer) for layer in config.layers_with("linformer")}
    if any(each > length for each in used):
        raise ConfigurationError(
            f"projected_tokens={shown(slots)} are more than the max_position_embeddings={length} tokens that they are "
            "made of: a Linformer reads fewer keys than there are tokens."
        )
    if config.projection_sharing == "layerwise" and len(used) > 1:
        raise ConfigurationError(
            f"projected_tokens={shown(slots)} differ between layers, and projection_sharing='layerwise' gives all of "
            "them one matrix. Use 'kv' or 'headwise', or one number."
        )
    strided = config.projection_type != "linear"
    if strided and any(length % each for each in used):
        raise ConfigurationError(
            f"projection_type={shown(config.projection_type)} takes max_position_embeddings / projected_tokens tokens "
            f"together, and {shown(slots)} does not divide {length}."
        )
    if config.projection_type == "mean" and config.projection_bias:
        raise ConfigurationError("projection_bias=True, but projection_type='mean' has no parameters. Leave it out.")
    if config.projection_first and (config.projection_sharing == "none" or config.projection_type == "convolution"):
        raise ConfigurationError(
            f"projection_first=True projects states that are not cut into heads yet, and projection_sharing="
            f"{shown(config.projection_sharing)} with projection_type={shown(config.projection_type)} is a map within "
            "heads. Use 'headwise', 'kv' or 'layerwise' with 'linear' or 'mean', or projection_first=False."
        )


def check_landmarks(config: Any) -> None:
    """Raise ConfigurationError for landmarks or a convolution that a Nyströmformer cannot have."""
    if config.num_landmarks < 1:
        raise ConfigurationError(f"num_landmarks={config.num_landmarks} must be at least 1.")
    if config.layers_with("nystrom") and config.num_landmarks > config.max_position_embeddings:
        raise ConfigurationError(
            f"num_landmarks={config.num_landmarks} are more than the max_position_embeddings="
            f"{config.max_position_embeddings} tokens that they are means of. Give fewer; as many as that are full "
            "attention at every length."
        )
    size = config.conv_kernel_size
    if size is not None and (size < 1 or size % 2 == 0):
        raise ConfigurationError(
            f"conv_kernel_size={size} must be an odd number of tokens, as many on either side, or None for no "
            "convolution."
        )


def check_softmax_heads(config: Any) -> None:
    """Raise ConfigurationError for groups of heads that share keys where no layer can."""
    groups, listed = config.num_key_value_heads, {config.mechanism_of_layer(each) for each in _layers(config)}
    if groups is not None and (groups < 1 or config.num_attention_heads % groups):
        raise ConfigurationError(
            f"num_key_value_heads={groups} must divide num_attention_heads={config.num_attention_heads}."
        )
    if config.key_value_heads != config.num_attention_heads and not listed <= set(SHARERS):
        raise ConfigurationError(
            f"num_key_value_heads={groups} shares keys and values among heads, which layers of the mechanisms "
            f"{', '.join(SHARERS)} can, and {', '.join(sorted(listed - set(SHARERS)))} cannot. Leave it out."
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


def check_compression(config: Any) -> None:
    """Raise ConfigurationError for slots that memory-compressed attention cannot have."""
    if config.compression_tokens < 1:
        raise ConfigurationError(f"compression_tokens={config.compression_tokens} must be at least 1.")
