"""The pattern that an attention layer follows (the config's or its own) and its direction (causal or not)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.names import BIDIRECTIONAL, CAUSAL, is_table, table_kind
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.messages import shown, warn_once
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.config_spec import layers_to_dict, patterns_per_layer
from hf_efficient_attn.patterns.pattern import DecodingReach, Pattern

# A warning about heads in which every token attends only to itself.


# the reach of a query that attends only to its own token
NOTHING_BEFORE = DecodingReach(0, 0)


def warn_of_lonely(pattern: Pattern, causal: Pattern) -> None:
    """Warn of a head in which a token attends only to itself because the layer is causal.

    causal: the causal form of the pattern.
    """
    forms = (each.heads(pattern.num_head_patterns) for each in (pattern, causal))
    for head, left in zip(*forms, strict=True):
        if head != left and left.decoding_reach() == NOTHING_BEFORE and left.num_keys_of(0, 1):
            warn_once(
                f"attention_pattern has {shown(head)}, which allows no tokens before the query, and causal layers "
                "allow none after it: every token attends only to itself. Include earlier tokens, as in Band(256, 0)."
            )


# The form of the config's pattern in causal and in bidirectional layers.


def directed(pattern: Pattern, is_causal: bool) -> Pattern:
    """Return the causal form of a pattern for a causal layer, and the pattern itself for a bidirectional layer.

    Raises:
        ConfigurationError: the causal form depends on the length of the text, or the pattern selects among past keys
            and the layer is bidirectional.
    """
    if is_causal:
        # not computed for bidirectional layers, because some patterns have no causal form
        return causal_form(pattern)
    if pattern.chooses_by_content:
        raise ConfigurationError(
            f"attention_pattern is {shown(pattern)}, which selects among past keys, but this model is bidirectional: "
            "no token would attend to later ones. Use the pattern in a decoder; give an encoder a pattern by position "
            "(Band, GlobalTokens, bigbird). efficient_reformer and routing_transformer select keys in both directions."
        )
    return pattern


def causal_form(pattern: Pattern) -> Pattern:
    """Return the causal form of a pattern in a config, with a warning if every token attends only to itself.

    Raises:
        ConfigurationError: the causal form depends on the length of the text, so the keys of a token would change as
            the text grows, and decoding with a cache would differ from a forward pass over the whole text.
    """
    causal = pattern.causal()
    warn_of_lonely(pattern, causal)
    if causal.depends_on_length:
        blamed = causal
        while inner := next((part for part in blamed.parts if part.depends_on_length), None):
            blamed = inner
        raise ConfigurationError(
            f"attention_pattern has {shown(blamed)}, which depends on the length of the text even in its causal form: "
            "the keys of a token would change as the text grows. In causal layers count positions from the start "
            "(GlobalTokens([0])), and use Band, Dilated, Strided or BlockLocal, or bigbird(..., causal=True)."
        )
    return causal


# The part of an encoder-decoder to which a module belongs.


ENCODER, DECODER = "encoder", "decoder"
PARTS = {ENCODER, DECODER}
# the attribute in which a module stores its part
PART = "_model_part"


def part_of(module: nn.Module) -> str:
    """Return the part of a module, ENCODER or DECODER; a module without a mark and without `is_decoder` is an ENCODER.

    Some modules of decoders have no `is_decoder`; `mark_parts` marks them by their place in the model.
    """
    part: str | None = getattr(module, PART, None)
    if part is not None:
        return part
    return DECODER if getattr(module, "is_decoder", False) else ENCODER


def parts_of(model: Any) -> dict[str, Any]:
    """Return the encoder and the decoder of a model, or the model as its only part."""
    if not model.config.get_text_config().is_encoder_decoder:
        return {ENCODER: model}
    parts = {ENCODER: model.get_encoder(), DECODER: model.get_decoder()}
    if parts[ENCODER] is not parts[DECODER]:
        # for an encoder alone, get_decoder returns the model itself
        is_alone = parts[ENCODER] in parts[DECODER].modules()
        return {ENCODER: parts[ENCODER]} if is_alone else parts
    # the model is itself a part, called without the model that it belongs to
    says_so = any(getattr(module, "is_decoder", False) for module in model.modules())
    return {DECODER if says_so or "Decoder" in type(model).__name__ else ENCODER: model}


def mark_parts(model: Any) -> None:
    """Store in the modules of an encoder-decoder which part they belong to."""
    if model.config.get_text_config().is_encoder_decoder:
        for part, module in parts_of(model).items():
            for each in module.modules():
                each.__dict__[PART] = part


# The direction of an attention layer of transformers, by the mask that its model requested.
#
# Attributes of modules prove nothing: some decoders have `is_causal=False`, some encoders have no such attribute, and
# transformers' own functions follow the mask. Attributes count only if a model requested no mask.


# a layer that attends to another sequence
CROSS = "cross"


def direction(module: nn.Module, options: Mapping[str, Any], attention_mask: Tensor | None = None) -> str | None:
    """Return CAUSAL, BIDIRECTIONAL or CROSS; None: only a mask matrix decides.

    Args:
        options: keyword arguments of the attention call; `is_causal` is used.
        attention_mask: the mask that the layer got: a token table, a matrix, or None.

    Raises:
        UnsupportedBackendError: the mask contradicts the module, or neither says what the direction is.
    """
    kind = None if attention_mask is None or not is_table(attention_mask) else table_kind(attention_mask)
    flag = options.get("is_causal")
    flag = getattr(module, "is_causal", None) if flag is None else bool(flag)
    if is_named_cross(module):
        if kind == CAUSAL:
            _refuse(module, "is cross-attention by its name or flags, but its mask is causal")
        return CROSS
    if kind == CAUSAL:
        return CAUSAL
    if kind == BIDIRECTIONAL or flag is False:
        # bidirectional attention in a decoder is cross-attention
        return CROSS if part_of(module) == DECODER else BIDIRECTIONAL
    if flag is None and attention_mask is None:
        _refuse(module, "has neither a mask nor is_causal, so it is unknown whether it may attend to later tokens")
    return CAUSAL if flag else None


def is_named_cross(module: nn.Module) -> bool:
    """Return whether the name or a flag of a module says that it attends to another sequence."""
    return "CrossAttention" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))


def _refuse(module: nn.Module, what: str) -> None:
    raise UnsupportedBackendError(
        f'{type(module).__name__} {what}. attn_implementation="efficient" cannot compute it; load the model with '
        '"sdpa" or "eager" and without attention_pattern.'
    )


# the name of the attention implementation
NAME = "efficient"
# the config field for the pattern
FIELD = "attention_pattern"
# the attribute in which a module stores its pattern
KNOWN = "_attention_pattern"
FULL_ATTENTION = "full_attention"
# the config fields for the number of layers of a part; the first that exists counts
LAYER_COUNTS = {
    ENCODER: ("encoder_layers", "encoder_num_hidden_layers", "num_hidden_layers"),
    DECODER: ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers"),
}


def layer_pattern(module: nn.Module, options: Mapping[str, Any], attention_mask: Tensor | None = None) -> LayerPattern:
    """Return what an attention module computes.

    Args:
        options: keyword arguments of the attention call; `is_causal` and `sliding_window` are used.
        attention_mask: the mask that the layer got: a token table, a matrix, or None.

    Raises:
        ConfigurationError: an `attention_pattern` that does not fit the model.
        UnsupportedBackendError: the layer has sliding attention with an unknown window, or its direction is unknown.
    """
    reading = direction(module, options, attention_mask)
    if reading == CROSS:
        refuse_ambiguous_matrix(module, attention_mask)
        return LayerPattern(Full(), attends_to_all=True)
    is_causal = reading == CAUSAL
    layer = getattr(module, "layer_idx", None)
    window = own_window(module, layer, options, is_causal)
    pattern = module_pattern(module, is_causal)
    if pattern is None:
        return own_pattern(is_causal, window)
    return LayerPattern(pattern, layer or 0, is_own=False, is_causal=is_causal)


def refuse_ambiguous_matrix(module: nn.Module, attention_mask: Tensor | None) -> None:
    """Raise UnsupportedBackendError if a mask matrix may belong to the self-attention of a decoder with a pattern.

    In some decoders, the flags of self-attention look like those of cross-attention.
    """
    is_matrix = attention_mask is not None and not is_table(attention_mask)
    spec = getattr(module.config, FIELD, None)
    decoder = spec.get(DECODER) if isinstance(spec, Mapping) else None
    if is_matrix and decoder is not None and not is_named_cross(module):
        raise UnsupportedBackendError(
            f"{type(module).__name__} gets a mask matrix, and it is unknown whether it belongs to self-attention or "
            "to cross-attention, so its attention_pattern cannot be applied. Pass masks of two dimensions."
        )


def own_pattern(is_causal: bool, window: int | None) -> LayerPattern:
    """Return the own attention of a layer.

    window: the number of keys up to and including the query; None: full or causal attention.
    """
    if window is not None:
        return LayerPattern(Band(window - 1, 0 if is_causal else window - 1))
    return LayerPattern(Causal()) if is_causal else LayerPattern(Full(), attends_to_all=True)


def own_window(module: nn.Module, layer: int | None, options: Mapping[str, Any], is_causal: bool = True) -> int | None:
    """Return the number of keys of a sliding layer up to and including the query; None: the layer is not sliding.

    Raises:
        UnsupportedBackendError: the config says that the layer is sliding, but the model does not give its window.
    """
    is_sliding = local_kind(module.config, layer) == "sliding_attention"
    window = options.get("sliding_window", getattr(module, "sliding_window", None) if is_sliding else None)
    if window is None and is_sliding:
        raise UnsupportedBackendError(
            f"{type(module).__name__}, layer {layer}, has sliding attention but does not pass its window to the "
            'attention function. attn_implementation="efficient" cannot compute this model; use "sdpa".'
        )
    declared = getattr(module.config, "sliding_window", None)
    if window is not None and declared is not None and not is_causal:
        # bidirectional masks are made from the config's number; the module's number may or may not include the query
        return int(declared) + 1
    return window


def local_kind(config: Any, layer: int | None) -> str | None:
    """Return the kind of a layer's own sparse attention, such as "sliding_attention"; None: it has full attention."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return "sliding_attention" if getattr(config, "sliding_window", None) is not None else None
    if layer is None or layer >= len(kinds) or kinds[layer] == FULL_ATTENTION:
        return None
    return str(kinds[layer])


def module_pattern(module: nn.Module, is_causal: bool) -> Pattern | None:
    """Return the pattern of the config for this attention module, or its causal form; None: there is none."""
    spec = getattr(module.config, FIELD, None)
    if spec is None:
        return None
    if torch.compiler.is_compiling():
        # a compiler cannot trace this, and would take an earlier result for a constant
        run_untraced(read_pattern, module, is_causal)
        return module.__dict__[KNOWN][2]  # type: ignore[no-any-return]
    # the attribute is read only once, because another thread may replace it meanwhile
    known = module.__dict__.get(KNOWN)
    if known is None or known[0] is not spec or known[1] is not is_causal:
        known = read_pattern(module, is_causal)
    return known[2]  # type: ignore[no-any-return]


def read_pattern(module: nn.Module, is_causal: bool) -> tuple[Any, bool, Pattern | None]:
    """Return (the config's spec, `is_causal`, the module's pattern or its causal form), and store it in the module.

    Raises:
        ConfigurationError: an `attention_pattern` that does not fit the model or this module.
    """
    config: Any = module.config
    part = part_of(module)
    spec = getattr(config, FIELD)
    patterns = config_patterns(spec, config, part)
    layer = getattr(module, "layer_idx", None)
    if patterns is not None and (layer or 0) >= len(patterns):
        raise ConfigurationError(
            f"{type(module).__name__} is layer {layer} of its {part}, but {type(config).__name__} says that there are "
            f"{len(patterns)} layers, so attention_pattern has no entry for it. Correct the number of layers."
        )
    patterns = patterns or (None,)
    if layer is None and len(set(patterns)) > 1:
        raise ConfigurationError(
            f"attention_pattern differs from layer to layer, but {type(module).__name__} does not know which layer it "
            "is (no layer_idx). Give one pattern for all layers."
        )
    pattern = patterns[layer or 0] if (layer or 0) < len(patterns) else None
    known = (spec, is_causal, None if pattern is None else directed(pattern, is_causal))
    module.__dict__[KNOWN] = known
    return known


def config_patterns(
    spec: Any, config: Any, part: str, are_all_layers: bool = False
) -> tuple[Pattern | None, ...] | None:
    """Return the pattern of every layer of a part of the model; None: the part keeps its own attention.

    are_all_layers: whether the spec must have exactly the number of layers in the config; otherwise it may have more,
        because `generate` can leave out the last layers (`assistant_early_exit`).

    Raises:
        ConfigurationError: an `attention_pattern` of unknown form, a pattern for a layer with sparse attention of its
            own, or a pattern that is not for self-attention.
    """
    if is_by_part(spec):
        spec = spec.get(part)
        if spec is None:
            return None
    elif part == DECODER and getattr(config, "is_encoder_decoder", False):
        return None
    count = num_layers(config, part)
    if isinstance(spec, list | tuple) and not are_all_layers:
        spec = spec[:count]
    patterns = patterns_per_layer(spec, count)
    refuse_two_axes(patterns)
    local = [layer for layer in range(len(patterns)) if local_kind(config, layer) is not None]
    if is_single(spec):
        if are_all_layers and len(local) == len(patterns):
            raise ConfigurationError(no_layer_left(config, len(patterns)))
        return tuple(None if layer in local else pattern for layer, pattern in enumerate(patterns))
    for layer in local:
        if patterns[layer] is not None:
            raise ConfigurationError(
                f"attention_pattern has a {patterns[layer].kind} pattern "  # type: ignore[union-attr]
                f"for layer {layer}, whose own attention is "
                f"{shown(local_kind(config, layer))}, not full attention. Give None for this layer; it then keeps its "
                "own attention."
            )
    return patterns


def refuse_two_axes(patterns: tuple[Pattern | None, ...]) -> None:
    """Raise ConfigurationError for a pattern that is not for self-attention."""
    for pattern in patterns:
        if pattern is not None and pattern.needs_two_axes:
            raise ConfigurationError(
                "attention_pattern is for self-attention, in which every key is a token, but it has CompressedKeys, "
                f"in which a key stands for several tokens: {shown(pattern)}. Leave CompressedKeys out here; "
                "attention(..., cross=True) takes it."
            )
        if pattern is not None and any(atom.is_of_nodes for atom in pattern.atoms()):
            raise ConfigurationError(
                f"attention_pattern is for tokens, but {shown(pattern)} is for the nodes of a tree, which only "
                "bp_transformer has. For tokens, use span_tree(...)."
            )


def no_layer_left(config: Any, num_layers: int) -> str:
    """Return the error message for a model without full attention in any layer, with advice."""
    kinds = {str(local_kind(config, layer)) for layer in range(num_layers)}
    message = f"None of the {num_layers} layers of this {type(config).__name__} has full attention, which "
    message += f"attention_pattern could replace; they have {', '.join(sorted(kinds))}. "
    if not kinds <= {"sliding_attention", "chunked_attention"}:
        return message + "Sparsify a model that has layers with full attention."
    if getattr(config, "layer_types", None) is not None:
        return message + f'Set entries of config.layer_types to "{FULL_ATTENTION}" for layers that should follow it.'
    return message + "If they should follow it, set config.sliding_window to None."


def is_by_part(spec: Any) -> bool:
    """Return whether a spec gives patterns for the encoder and the decoder."""
    return isinstance(spec, Mapping) and "kind" not in spec and bool(spec) and set(spec) <= PARTS


def is_single(spec: Any) -> bool:
    """Return whether a spec is one pattern for all layers."""
    return isinstance(spec, Pattern | str) or (isinstance(spec, Mapping) and "kind" in spec)


def num_layers(config: Any, part: str) -> int:
    """Return the number of layers of the encoder or the decoder; for other models, of the whole model.

    Raises:
        ConfigurationError: the config does not say how many.
    """
    is_joined, is_decoder = (getattr(config, name, False) for name in ("is_encoder_decoder", "is_decoder"))
    names = LAYER_COUNTS[part if is_joined else DECODER] if is_joined or is_decoder else ("num_hidden_layers",)
    for name in names:
        count = getattr(config, name, None)
        if count is not None:
            return int(count)
    raise ConfigurationError(
        f"{type(config).__name__} has none of the fields {', '.join(names)}, so the number of its layers is unknown. "
        "Call sparsify on the part of the model whose config has one of them."
    )


def checked_spec(spec: Any, config: Any) -> Any:
    """Return a spec in JSON types, after checking it against the config; for an encoder-decoder, by part.

    Raises:
        ConfigurationError: a spec of unknown form, or one that does not fit the model.
    """
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    if is_by_part(spec):
        if not is_encoder_decoder:
            raise ConfigurationError(
                f"attention_pattern has patterns for {' and '.join(sorted(spec))}, but {type(config).__name__} is not "
                "an encoder-decoder. Give the pattern itself."
            )
        written = {part: None if entry is None else layers_to_dict(entry) for part, entry in spec.items()}
    else:
        written = layers_to_dict(spec)
        written = {ENCODER: written, DECODER: None} if is_encoder_decoder else written
    for part in PARTS:
        config_patterns(written, config, part, are_all_layers=True)
    return written


# A model that loads only the encoder or the decoder of a saved encoder-decoder follows the patterns of that part.


def keep_own_part(model: PreTrainedModel) -> None:
    """Reduce the config of a model that is only one part, such as a T5EncoderModel, to the patterns of that part."""
    config: Any = model.config
    if is_joined(config) and not config.is_encoder_decoder:
        write_part(config, DECODER if getattr(config, "is_decoder", False) else ENCODER)


def keep_encoder(model: PreTrainedModel) -> None:
    """Do the same for a built encoder whose config still says encoder-decoder, such as a UMT5EncoderModel."""
    if is_joined(model.config) and model.config.is_encoder_decoder:
        parts = parts_of(model)
        if DECODER not in parts and model not in parts.values():
            write_part(model.config, ENCODER)


def is_joined(config: Any) -> bool:
    """Return whether a config has patterns by part, and a field for the number of decoder layers."""
    *names, _ = LAYER_COUNTS[DECODER]
    return is_by_part(getattr(config, FIELD, None)) and any(hasattr(config, name) for name in names)


def write_part(config: Any, part: str) -> None:
    """Replace patterns by part with the pattern of one part, or delete the field if that part has none."""
    own = getattr(config, FIELD).get(part)
    if own is None:
        delattr(config, FIELD)
    else:
        setattr(config, FIELD, own)
