"""Translate configs between transformers and this package; apply new lengths and patterns to configs and weights."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from hf_efficient_attn.convert.counterpart import COMMON_FIELDS, NO_FUNCTION, Counterpart
from hf_efficient_attn.convert.hub import one_line
from hf_efficient_attn.errors import ConfigurationError, EfficientAttentionError
from hf_efficient_attn.integration.layer_patterns import DECODER, ENCODER, FIELD, config_patterns, is_by_part
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import meant
from hf_efficient_attn.patterns.bands import Band, band_of_window
from hf_efficient_attn.patterns.config_spec import pattern_of
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.serialization import is_integer


def bands_of_windows(windows: int | list[int], num_layers: int) -> list[Band]:
    """Return the band of each layer; a single window holds for all layers.

    >>> bands_of_windows(8, 2) == bands_of_windows([8, 8], 2) == [Band(4, 4), Band(4, 4)]
    True

    Raises:
        ConfigurationError: a window that is odd, or less than 2.
    """
    return [band_of_window(window) for window in ([windows] * num_layers if isinstance(windows, int) else windows)]


def windows_of_pattern(config: Any, model_type: str) -> list[int]:
    """Return the window of each layer of one of our configs; for an encoder-decoder, of each encoder layer.

    Raises:
        ConfigurationError: a layer whose pattern is not a symmetric band.
    """
    spec = config.attention_pattern
    patterns = (spec is not None and config_patterns(spec, config, ENCODER)) or (None,)
    windows = []
    for layer, pattern in enumerate(patterns):
        size = {} if pattern is None else pattern.to_dict()
        if size.get("kind") != "band" or not size["left"] or size["left"] != size["right"]:
            raise ConfigurationError(
                f"The windows of {model_type} are equally long on both sides, but layer {layer} has {shown(pattern)}. "
                f"Only models with attention_pattern band(n, n) in every layer can become {model_type}."
            )
        windows.append(2 * size["left"])
    return windows


TABLE = "embeddings.positions.table.weight"
# config fields: the length of the encoder (or of the only stack), and of the decoder
SOURCE, TARGET = "max_position_embeddings", "max_target_position_embeddings"
GIBIBYTE = 2**30
# bytes of a weight in float32, and of an index
WEIGHT_BYTES, INDEX_BYTES = 4, 8


def cyclic_table(table: Tensor, offset: int, num_positions: int) -> Tensor:
    """Return a table of `offset` + `num_positions` rows: the first `offset` stay, the others repeat cyclically.

    Source: Beltagy et al. (arXiv:2004.05150), section 5.

    >>> cyclic_table(torch.arange(5.0).view(5, 1), 2, 7).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 2.0]
    """
    front, rows = table[:offset], table[offset:]
    return torch.cat((front, rows[torch.arange(num_positions, device=table.device) % len(rows)]))


def check_lengths(old: Any, new: Any) -> None:
    """Raise ConfigurationError if the config `new` has fewer positions than `old`, or more than its weights allow.

    The length of a Linformer cannot change: its projections have one place per position, or strides that divide it.
    """
    longest, wanted = getattr(old, SOURCE, 0), getattr(new, SOURCE, 0)
    if getattr(old, "has_one_length", False) and wanted != longest:
        raise ConfigurationError(
            f"{SOURCE}={wanted}: the projections of this Linformer are for texts of up to {longest} tokens, and "
            f"another length would change its outputs. Leave {SOURCE} out, or train a model of that length."
        )
    if new.position_embedding_type == "none":
        return
    for name in (SOURCE, TARGET):
        size, wanted = getattr(old, name, 0), getattr(new, name, 0)
        if wanted < size:
            raise ConfigurationError(
                f"{name}={wanted} would drop some of the {size} positions of the source; give at least {size}."
            )


def check_memory(config: Any) -> None:
    """Raise ConfigurationError if a table of learned positions would not fit into the memory of this machine."""
    memory = memory_bytes()
    if config.position_embedding_type != "learned" or memory is None:
        return
    for name in (SOURCE, TARGET):
        needed = getattr(config, name, 0) * (WEIGHT_BYTES * config.hidden_size + INDEX_BYTES)
        if needed > memory:
            raise ConfigurationError(
                f"{name}={getattr(config, name)} needs a table of learned positions of {needed / GIBIBYTE:,.0f} GiB, "
                f"but this machine has {memory / GIBIBYTE:,.0f} GiB of memory. Give the length of the longest input."
            )


def memory_bytes() -> int | None:
    """Return the memory of this machine in bytes, or None if the system does not report it."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lengthen(weights: dict[str, Tensor], new: Any) -> dict[str, Tensor]:
    """Return the weights, under our names, with position tables as long as the config `new` says."""

    def lengthened(name: str, table: Tensor) -> Tensor:
        size = getattr(new, TARGET if "decoder." in name else SOURCE)
        return table if len(table) == new.position_offset + size else cyclic_table(table, new.position_offset, size)

    return {name: lengthened(name, each) if name.endswith(TABLE) else each for name, each in weights.items()}


def shift(weights: dict[str, Tensor], old_offset: int, new_offset: int) -> dict[str, Tensor]:
    """Return the weights with `new_offset` unused rows before position 0 in every position table."""

    def shifted(table: Tensor) -> Tensor:
        return torch.cat((table.new_zeros(new_offset, table.shape[1]), table[old_offset:]))

    return {
        name: shifted(tensor) if name.endswith(TABLE) and old_offset != new_offset else tensor
        for name, tensor in weights.items()
    }


# defaults for dense models
DEFAULT_WINDOW, DEFAULT_POSITIONS = 512, 4096
# longest value of a field in a message, in characters
LETTERS = 80
# prefixes of the fields that only some heads use
HEAD_FIELDS = {
    "classifier_": ("SequenceClassification", "TokenClassification", "MultipleChoice"),
    "question_answering_": ("QuestionAnswering",),
    "lm_": ("MaskedLM", "CausalLM", "ConditionalGeneration"),
}


@dataclass(frozen=True)
class ConversionRequest:
    """The arguments of `convert` that describe the result; see there."""

    max_position_embeddings: int | None = None
    max_target_position_embeddings: int | None = None
    attention_window: int | None = None
    pattern: Any = None
    global_projections: bool | None = None
    parity: bool = False
    mechanism: str | list[str] | None = None


@dataclass(frozen=True)
class TheirConfig:
    """The config of transformers that one of our configs becomes.

    Attributes:
        config: the config of transformers.
        position_offset: number of rows before position 0 in its position tables.
        deviations: our fields in which it differs by design, each with a note.
    """

    config: Any
    position_offset: int
    deviations: dict[str, str]


def our_config(counterpart: Counterpart, theirs: Any, head: str, parity: bool) -> Any:
    """Return the config of our family that is equivalent to theirs; dense models stay dense."""
    fields = {name: getattr(theirs, name) for name in COMMON_FIELDS if hasattr(theirs, name)}
    for name, ours in counterpart.fields.items():
        if not hasattr(theirs, name):
            continue
        fields |= dict.fromkeys([ours] if isinstance(ours, str) else ours, getattr(theirs, name))
    with _translating(counterpart.model_type, counterpart.family):
        fields |= counterpart.to_ours(theirs, head, parity)
        return AutoConfig.for_model(counterpart.family, **fields)


def their_config(counterpart: Counterpart, ours: Any, head: str) -> TheirConfig:
    """Return the config of transformers that is equivalent to ours.

    Raises:
        ConfigurationError: a field of ours that their config cannot express.
    """
    if counterpart.to_theirs is None:
        raise ConfigurationError(f"No model of this package can become {shown(counterpart.model_type)}.")
    fields = {name: getattr(ours, name) for name in COMMON_FIELDS}
    for name, target in counterpart.fields.items():
        fields[name] = getattr(ours, target if isinstance(target, str) else target[0])
    with _translating(counterpart.family, counterpart.model_type):
        theirs = AutoConfig.for_model(counterpart.model_type, **{**fields, **counterpart.to_theirs(ours)})
    again = our_config(counterpart, theirs, head, parity=True)
    # only families with such position tables have this field
    offset = getattr(again, "position_offset", None)
    lost = differences(ours if offset is None else with_fields(ours, position_offset=offset), again, head)
    unsayable = [name for name in lost if name not in counterpart.deviations]
    if unsayable:
        listed = ", ".join(_shown_field(ours, name) for name in unsayable)
        raise ConfigurationError(f"{counterpart.model_type} models cannot have: {listed}.")
    notes = {name: f"{_shown_field(ours, name)} is not kept: {counterpart.deviations[name]}." for name in lost}
    return TheirConfig(theirs, offset or 0, notes)


@contextmanager
def _translating(source_type: str, target_type: str) -> Iterator[None]:
    """Turn the error of a config value that cannot be translated into a ConfigurationError with its message."""
    try:
        yield
    except EfficientAttentionError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"The {source_type} config has a value that cannot become part of a {target_type} config: "
            f"{one_line(error)}. Correct it in config.json."
        ) from error


def differences(config: Any, other: Any, head: str) -> list[str]:
    """Return the fields in which two of our configs differ in meaning for a head."""
    mine, theirs = _meaning(config), _meaning(other)
    return [name for name, value in mine.items() if theirs.get(name) != value and _concerns(name, head)]


def lost_fields(counterpart: Counterpart, theirs: Any) -> list[str]:
    """Return a note on their fields that have no counterpart in ours and do not have their default value."""
    # `with_own_pattern` and `note_replaced` handle patterns
    known = {*counterpart.fields, *COMMON_FIELDS, *NO_FUNCTION, *counterpart.ignored_fields, FIELD}
    default = type(theirs)().to_dict()
    fields = {name: value for name, value in theirs.to_dict().items() if name not in known}
    lost = {name: value for name, value in fields.items() if name not in default or default[name] != value}
    if not lost:
        return []
    listed = ", ".join(f"{name}={shown(value)}" for name, value in lost.items())
    return [f"Left out, because the result has no such config fields: {listed}."]


def apply_request(config: Any, request: ConversionRequest, counterpart: Counterpart | None) -> Any:
    """Return one of our configs with the requested length, pattern and global tokens, or the defaults of dense sources.

    counterpart: the table of the source; None: the source is of one of our families.

    Raises:
        ConfigurationError: a pattern or length that the model cannot have.
    """
    if request.pattern is not None and request.attention_window is not None:
        raise ConfigurationError(
            f"attention_window={request.attention_window} and pattern={shown(request.pattern)} exclude each other. "
            "Give only one of them."
        )
    _check_mechanism(request, () if counterpart is None else counterpart.mechanisms)
    is_dense = counterpart is not None and counterpart.is_dense
    lengths = _length_fields(config, request, is_dense)
    if counterpart is not None and counterpart.requested_fields is not None:
        return with_fields(config, **counterpart.requested_fields(config, request), **lengths)
    fields = {**_pattern_fields(config, request, is_dense), **lengths}
    if request.global_projections is not None:
        fields["global_projections"] = request.global_projections
    return with_fields(config, **fields)


def _check_mechanism(request: ConversionRequest, allowed: tuple[str, ...]) -> None:
    """Raise ConfigurationError for mechanisms that are not `allowed` for this source and target."""
    given = request.mechanism
    if given is None:
        return
    if not allowed:
        raise ConfigurationError(
            f"mechanism={shown(given)} is only for bert, roberta and xlm-roberta models with "
            "to='compressed_transformer' (--to compressed_transformer). Leave mechanism out."
        )
    for each in given if isinstance(given, list) else [given]:
        if each not in allowed:
            raise ConfigurationError(
                f"mechanism={shown(given)}: {shown(each)} is not a mechanism of convert. Give one of these for all "
                f"layers, or a list with one per layer: {', '.join(allowed)}.{meant(each, allowed)}"
            )


def _pattern_fields(config: Any, request: ConversionRequest, is_dense: bool) -> dict[str, Any]:
    window, pattern = request.attention_window, pattern_of(request.pattern)
    if pattern is not None:
        return {"attention_pattern": _joined(config, pattern, is_dense)}
    if not is_dense:
        return {} if window is None else {"attention_pattern": _joined(config, band_of_window(window), is_dense)}
    band = band_of_window(DEFAULT_WINDOW if window is None else window)
    if config.attention_pattern is None:
        return {"attention_pattern": band, "global_tokens": "first"}
    # layers of the source that are already sparse have no global token: it is part of the pattern of the other layers
    return {"attention_pattern": _joined(config, band | GlobalTokens([0]), is_dense)}


def _length_fields(config: Any, request: ConversionRequest, is_dense: bool) -> dict[str, int]:
    positions, targets = request.max_position_embeddings, request.max_target_position_embeddings
    for name, value in (("max_position_embeddings", positions), ("max_target_position_embeddings", targets)):
        if value is not None and (not is_integer(value) or value < 1):
            raise ConfigurationError(
                f"{name}={shown(value)} must be an integer of at least 1, the length of the longest input in tokens."
            )
    if positions is None:
        positions = max(DEFAULT_POSITIONS if is_dense else 0, config.max_position_embeddings)
    if targets is None:
        return {"max_position_embeddings": positions}
    if not config.is_encoder_decoder:
        raise ConfigurationError(
            "max_target_position_embeddings is for encoder-decoders, and this model is not one. Leave it out."
        )
    return {"max_position_embeddings": positions, "max_target_position_embeddings": targets}


def longest_input(config: Any, source: Any) -> int | None:
    """Return the longest input in tokens that one of our configs, made from `source`, allows; None: any length.

    Models without positions, made from their own type, allow any length. Sinusoids and rotary positions have no limit
    either, but models are trained for some length.
    """
    has_none = config.position_embedding_type == "none" and source.model_type == config.model_type
    return None if has_none else int(config.max_position_embeddings)


def with_fields(config: Any, **fields: Any) -> Any:
    """Return a copy of a config with some fields replaced."""
    return type(config).from_dict({**config.to_dict(), **fields})


def _joined(config: Any, pattern: Any, is_dense: bool) -> Any:
    """Return `pattern` joined with what the config keeps of its own: a decoder's, and sparse layers of dense models."""
    own = getattr(config, FIELD, None)
    if own is None or isinstance(pattern, list | tuple) or is_by_part(pattern):
        return pattern
    if is_by_part(own):
        return {**own, ENCODER: pattern}
    if not is_dense:
        return pattern
    return [pattern if each is None else each for each in config_patterns(own, config, ENCODER) or ()]


def _meaning(config: Any) -> dict[str, Any]:
    """Return the fields that affect what a model computes, in a canonical form."""
    fields = {name: value for name, value in config.to_dict().items() if name not in NO_FUNCTION}
    pattern = getattr(config, FIELD, None)
    if pattern is not None:
        parts = (config_patterns(pattern, config, part) for part in (ENCODER, DECODER))
        fields["attention_pattern"] = tuple(parts)
    if "num_key_value_heads" in fields:
        # a model replaces None in its config with the number
        fields["num_key_value_heads"] = config.key_value_heads
    if "lm_transform_activation" in fields:
        fields["lm_transform_activation"] = config.transform_activation
    return fields


def _shown_field(config: Any, name: str) -> str:
    """Return a field and its value, shortened for a message; None is replaced with the value that it stands for."""
    value = _meaning(config)[name] if getattr(config, name) is None else getattr(config, name)
    return f"{name}={shorten(repr(value), LETTERS)}"


def _concerns(name: str, head: str) -> bool:
    return all(head in heads for start, heads in HEAD_FIELDS.items() if name.startswith(start))


def keeps_pattern(counterpart: Counterpart, theirs: Any, request: ConversionRequest) -> bool:
    """Return whether their config has a pattern that ours keeps because the request names no other.

    Raises:
        ConfigurationError: the pattern would be lost: the result has other attention, and the request names no pattern.
    """
    pattern = getattr(theirs, FIELD, None)
    if pattern is None or asks_for_another(request):
        return False
    if counterpart.requested_fields is not None or not counterpart.is_dense:
        raise ConfigurationError(
            f"This {type(theirs).__name__} has attention_pattern={shown(pattern)}, which cannot be kept, because "
            f"converting {counterpart.model_type} to {counterpart.family} changes the attention. Give the new layers a "
            "pattern (--pattern) or an attention_window (--attention-window), or first remove the old pattern with "
            "sparsify(model, None)."
        )
    return True


def with_own_pattern(ours: Any, theirs: Any) -> Any:
    """Return our config with the pattern of theirs; layers for which theirs has none keep the pattern of ours."""
    spec, own = getattr(theirs, FIELD), getattr(ours, FIELD)
    if isinstance(own, list):
        sparse_layers = config_patterns(spec, theirs, ENCODER) or ()
        spec = [sparse or mine for sparse, mine in zip(sparse_layers, own, strict=True)]
    return with_fields(ours, **{FIELD: spec})


def note_replaced(theirs: Any, request: ConversionRequest) -> list[str]:
    """Return a note on the source's pattern if the request replaces it."""
    pattern = getattr(theirs, FIELD, None)
    if pattern is None or not asks_for_another(request):
        return []
    return [f"attention_pattern={shown(pattern)} of the source is not kept, because another one was given."]


def asks_for_another(request: ConversionRequest) -> bool:
    """Return whether a request names a pattern or a window."""
    return request.pattern is not None or request.attention_window is not None
