"""Which pattern an attention layer of a transformers model follows: the config's, or the layer's own attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.direction import CROSS, direction, is_named_cross
from hf_efficient_attn.attention.model_parts import DECODER, ENCODER, PARTS, part_of
from hf_efficient_attn.attention.pattern_direction import directed
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.attention.table_form import CAUSAL, is_table
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.config_spec import layers_to_dict, patterns_per_layer
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

# the attention implementation
NAME = "efficient"
# the config's field for the pattern
FIELD = "attention_pattern"
# the attribute in which a module keeps its pattern
KNOWN = "_attention_pattern"
FULL_ATTENTION = "full_attention"
# the fields in which configs say how many layers a part has; the first that exists counts
LAYER_COUNTS = {
    ENCODER: ("encoder_layers", "encoder_num_hidden_layers", "num_hidden_layers"),
    DECODER: ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers"),
}


@dataclass(frozen=True)
class LayerPattern:
    """What one attention layer computes.

    Attributes:
        pattern: the pattern, causal for a causal layer.
        layer: the index of the layer, on which random patterns depend.
        is_own: whether this is the layer's own attention, not a pattern of the config.
        is_causal: whether this is the causal form of the config's pattern.
        reads_all: whether every query reads every token: in a layer's own full attention, and in cross-attention, whose
            queries and keys are of different sequences.
        first_head, num_model_heads: which of the model's heads are computed; see `attention`.
        is_cross: whether queries and keys are of different sequences, whose positions the pattern relates.
        shards: the processes that share each text, of which this one has some tokens; None: it has the whole text.
    """

    pattern: Pattern
    layer: int = 0
    is_own: bool = True
    is_causal: bool = False
    reads_all: bool = False
    first_head: int = 0
    num_model_heads: int | None = None
    is_cross: bool = False
    shards: SequenceShards | None = None

    @property
    def with_globals(self) -> "LayerPattern":
        """What is followed where a token mask names global tokens, which read and are read in the layer's direction.

        A pattern that looks back only (`Band(4, 0)`) does not make a bidirectional layer causal: joined with global
        tokens, even none, it may look ahead, as it does with those at given positions.
        """
        if self.is_own or self.is_causal or not self.pattern.is_causal:
            return self
        return replace(self, pattern=self.pattern | GlobalTokens(()))


def layer_pattern(module: nn.Module, options: Mapping[str, Any], attention_mask: Tensor | None = None) -> LayerPattern:
    """Return what an attention module computes.

    Args:
        options: keyword arguments of the attention call; `is_causal` and `sliding_window` are used.
        attention_mask: the mask that the layer got: a token table, a matrix, or None.

    Raises:
        ConfigurationError: an `attention_pattern` that does not fit the model.
        UnsupportedBackendError: a layer that is sparse by itself in an unknown way, or whose direction is unknown.
    """
    reading = direction(module, options, attention_mask)
    if reading == CROSS:
        refuse_unsaid_matrix(module, attention_mask)
        return LayerPattern(Full(), reads_all=True)
    is_causal = reading == CAUSAL
    layer = getattr(module, "layer_idx", None)
    window = own_window(module, layer, options, is_causal)
    pattern = module_pattern(module, is_causal)
    if pattern is None:
        return own_pattern(is_causal, window)
    return LayerPattern(pattern, layer or 0, is_own=False, is_causal=is_causal)


def refuse_unsaid_matrix(module: nn.Module, attention_mask: Tensor | None) -> None:
    """Raise UnsupportedBackendError if a matrix may be the mask of a decoder's self-attention that has a pattern.

    By the flags of its modules, the self-attention of some decoders looks like cross-attention.
    """
    is_matrix = attention_mask is not None and not is_table(attention_mask)
    spec = getattr(module.config, FIELD, None)
    decoder = spec.get(DECODER) if isinstance(spec, Mapping) else None
    if is_matrix and decoder is not None and not is_named_cross(module):
        raise UnsupportedBackendError(
            f"{type(module).__name__} gets a mask matrix, and nothing says whether it is the decoder's own or that of "
            "cross-attention, so its attention_pattern cannot be applied. Pass masks of two dimensions."
        )


def own_pattern(is_causal: bool, window: int | None) -> LayerPattern:
    """Return what a layer computes by itself; `window`: how many tokens it reads up to and including the query."""
    if window is not None:
        return LayerPattern(Band(window - 1, 0 if is_causal else window - 1))
    return LayerPattern(Causal()) if is_causal else LayerPattern(Full(), reads_all=True)


def own_window(module: nn.Module, layer: int | None, options: Mapping[str, Any], is_causal: bool = True) -> int | None:
    """Return how many tokens a sliding layer reads up to and including the query; None: the layer is not sliding.

    Raises:
        UnsupportedBackendError: the config says that the layer is sliding, and the model does not say how far.
    """
    is_sliding = local_kind(module.config, layer) == "sliding_attention"
    window = options.get("sliding_window", getattr(module, "sliding_window", None) if is_sliding else None)
    if window is None and is_sliding:
        raise UnsupportedBackendError(
            f"{type(module).__name__}, layer {layer}, has sliding attention but does not tell the attention function "
            'how far it reads. attn_implementation="efficient" cannot compute this model; use "sdpa".'
        )
    said = getattr(module.config, "sliding_window", None)
    if window is not None and said is not None and not is_causal:
        # bidirectional masks are made from this number, which only in some modules includes the token itself
        return int(said) + 1
    return window


def local_kind(config: Any, layer: int | None) -> str | None:
    """Return the kind of a layer that is sparse by itself, such as "sliding_attention"; None: it reads everything."""
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
    # read once: another thread may store the module's other form meanwhile
    known = module.__dict__.get(KNOWN)
    if known is None or known[0] is not spec or known[1] is not is_causal:
        known = read_pattern(module, is_causal)
    return known[2]  # type: ignore[no-any-return]


def read_pattern(module: nn.Module, is_causal: bool) -> tuple[Any, bool, Pattern | None]:
    """Return the config's spec, `is_causal`, and a module's pattern (its causal form if `is_causal`), and keep them.

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
            f"{type(module).__name__} is layer {layer} of its {part}, but by the fields of {type(config).__name__} "
            f"there are {len(patterns)} layers, so attention_pattern has none for it. Correct the number of layers."
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

    are_all_layers: whether the spec must fit the layers that the config counts; otherwise these may be the first of
        those that it fits, as while `generate` leaves the last ones out (`assistant_early_exit`).

    Raises:
        ConfigurationError: an `attention_pattern` of unknown form, a pattern for a layer that is sparse by itself, or
            one that is not for self-attention.
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
                f"attention_pattern has a {patterns[layer].kind} pattern for layer {layer}, whose own attention is "  # type: ignore[union-attr]
                f"{shown(local_kind(config, layer))}. Give None for this layer; None keeps its own attention."
            )
    return patterns


def refuse_two_axes(patterns: tuple[Pattern | None, ...]) -> None:
    """Raise ConfigurationError for a pattern that is not for self-attention."""
    for pattern in patterns:
        if pattern is not None and pattern.needs_two_axes:
            raise ConfigurationError(
                "attention_pattern is for self-attention, whose keys are its tokens, but holds CompressedKeys, whose "
                f"keys stand for several tokens each: {shown(pattern)}. Leave CompressedKeys out here; "
                "attention(..., cross=True) takes it."
            )


def no_layer_left(config: Any, num_layers: int) -> str:
    """Return the message for a model without full attention in any layer, and what to do about it."""
    kinds = {str(local_kind(config, layer)) for layer in range(num_layers)}
    said = f"None of the {num_layers} layers of this {type(config).__name__} has full attention that could follow "
    said += f"attention_pattern; they are {', '.join(sorted(kinds))}. "
    if not kinds <= {"sliding_attention", "chunked_attention"}:
        return said + "Sparsify a model with layers of full attention."
    if getattr(config, "layer_types", None) is not None:
        return said + f'Set entries of config.layer_types to "{FULL_ATTENTION}" for layers that should follow it.'
    return said + "Set config.sliding_window to None for a model that should follow it instead."


def is_by_part(spec: Any) -> bool:
    """Return whether a spec gives patterns for the encoder and the decoder."""
    return isinstance(spec, Mapping) and "kind" not in spec and bool(spec) and set(spec) <= PARTS


def is_single(spec: Any) -> bool:
    """Return whether a spec is one pattern for all layers."""
    return isinstance(spec, Pattern | str) or (isinstance(spec, Mapping) and "kind" in spec)


def num_layers(config: Any, part: str) -> int:
    """Return how many layers the encoder or the decoder has; a model that is only one of them has those of this part.

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
        f"{type(config).__name__} has none of the fields {', '.join(names)}, so attention_pattern cannot be given to "
        "its layers. Call sparsify on the part of the model whose config has them."
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
                f"attention_pattern has patterns for {' and '.join(sorted(spec))}, but {type(config).__name__} is no "
                "encoder-decoder. Give the pattern itself."
            )
        written = {part: None if entry is None else layers_to_dict(entry) for part, entry in spec.items()}
    else:
        written = layers_to_dict(spec)
        written = {ENCODER: written, DECODER: None} if is_encoder_decoder else written
    for part in PARTS:
        config_patterns(written, config, part, are_all_layers=True)
    return written
