"""Which layer follows which pattern, in any form that a config's `attention_pattern` may have."""

from collections.abc import Mapping
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.expressions import pattern_of
from hf_efficient_attn.patterns.pattern import Pattern

TILE_FIELDS = {"tile", "patterns"}


def patterns_per_layer(spec: Any, num_layers: int) -> tuple[Pattern | None, ...]:
    """Return the pattern of each layer; None: the layer keeps its own attention.

    Args:
        spec: a pattern, its expression or its dict, for all layers; a list of these or None, one per layer; or
            {"tile": "LLG", "patterns": {"L": ..., "G": ...}}, whose letters are repeated over the layers.
        num_layers: layers of the model.

    >>> tiled = {"tile": "LG", "patterns": {"L": {"kind": "band", "left": 8, "right": 8}, "G": {"kind": "full"}}}
    >>> patterns_per_layer(tiled, 3)
    (Band(left=8, right=8), Full(), Band(left=8, right=8))

    Raises:
        ConfigurationError: another form, a list of another length, or a letter without a pattern.
    """
    if isinstance(spec, list | tuple):
        if len(spec) != num_layers:
            raise ConfigurationError(
                f"attention_pattern lists {len(spec)} patterns for {num_layers} layers; give one per layer, such as "
                '[pattern, None] * 2 for four, or a tile to repeat: {"tile": "LG", "patterns": {"L": ..., "G": ...}}.'
            )
        return tuple(map(_pattern_or_none, spec))
    if _is_tiled(spec):
        patterns = _tiles(spec)
        return tuple(patterns[spec["tile"][layer % len(spec["tile"])]] for layer in range(num_layers))
    return (_pattern(spec),) * num_layers


def layers_to_dict(spec: Any) -> Any:
    """Return any form of `patterns_per_layer` in JSON types.

    Raises:
        ConfigurationError: another form.
    """
    if isinstance(spec, list | tuple):
        return [_json(_pattern_or_none(entry)) for entry in spec]
    if _is_tiled(spec):
        return {**spec, "patterns": {letter: _json(pattern) for letter, pattern in _tiles(spec).items()}}
    return _json(_pattern(spec))


def _is_tiled(spec: Any) -> bool:
    return isinstance(spec, Mapping) and "kind" not in spec and bool(TILE_FIELDS & set(spec))


def _tiles(spec: Mapping[str, Any]) -> dict[str, Pattern | None]:
    """Return the pattern of each letter, after checking that every letter of the tile has one."""
    tile, patterns = spec.get("tile"), spec.get("patterns")
    if set(spec) != TILE_FIELDS or not (isinstance(tile, str) and tile) or not isinstance(patterns, Mapping):
        raise ConfigurationError(
            f'A tiled attention_pattern is {{"tile": "LLG", "patterns": {{"L": ..., "G": ...}}}}, not '
            f"{shown(dict(spec))}."
        )
    missing = sorted(set(tile) - set(patterns))
    if missing:
        raise ConfigurationError(
            f"The tile {shown(tile)} uses {shown(missing[0])}, which has no pattern; add it to patterns."
        )
    return {letter: _pattern_or_none(entry) for letter, entry in patterns.items()}


def _pattern(entry: Any) -> Pattern:
    entry = pattern_of(entry)
    if not isinstance(entry, Pattern | Mapping):
        raise ConfigurationError(
            f"attention_pattern is {shown(entry)}; it must be a pattern such as Band(256, 256), an expression "
            "such as 'band(256, 256)', the dict that its to_dict writes, a list of those for the layers, or a tile."
        )
    if isinstance(entry, Mapping) and entry and "kind" not in entry:
        raise ConfigurationError(
            f"attention_pattern is a dict with the keys {shown([*entry])}. The dict of a pattern has a kind; other "
            'dicts have the keys "encoder" and "decoder" (encoder-decoders) or "tile" and "patterns". To give each '
            "layer its own pattern, give a list with a pattern or None for each."
        )
    return entry if isinstance(entry, Pattern) else Pattern.from_dict(entry)


def _pattern_or_none(entry: Any) -> Pattern | None:
    return None if entry is None else _pattern(entry)


def _json(pattern: Pattern | None) -> dict[str, Any] | None:
    return None if pattern is None else pattern.to_dict()
