"""Patterns and models in the forms that commands accept: expressions, JSON, files, folders."""

import json
from pathlib import Path

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.hub.saved_config import load_config
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.patterns.config_spec import is_pattern_name, parse_pattern, patterns_per_layer
from hf_efficient_attn.patterns.pattern import Pattern

# the help of an argument that is read by `read_config` and `read_pattern`
PATTERN_OR_MODEL = (
    "a pattern: an expression such as 'band(4, 4) | global(0)', JSON, or a JSON file; or a saved model: its folder or "
    "its config.json"
)


def read_config(source: str) -> PreTrainedConfig | None:
    """Return the config of a saved model, given as its folder or its config.json; None: the source is neither.

    Raises:
        InputError: a folder without config.json, or a config that transformers cannot read.
    """
    _refuse_blank(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"{source} is a folder without config.json. Give the folder of a saved model.")
        return load_config(path)
    # the name of a pattern without brackets is refused later, by parse_pattern, whose message says how to write it
    is_expression = any(sign in source for sign in "({[") or is_pattern_name(source)
    if path.is_file() and path.suffix != ".json":
        raise InputError(
            f"{source} is a file, but not a .json file. Give a JSON file, the folder of a model, or a pattern."
        )
    if not (path.suffix == ".json" or is_expression):
        raise InputError(
            f"{shown(source)} is neither a folder nor a pattern such as 'band(4, 4) | global(0)'. Save a model of the "
            "Hub to a folder first."
        )
    if path.suffix != ".json" or not path.is_file() or not _has_model_type(path):
        return None
    return load_config(path)


def refuse_misplaced(source: str, config: PreTrainedConfig | None, part: str | None, causal: bool) -> None:
    """Raise InputError for an option of a pattern (--causal) with a model, or of a model (--part) with a pattern."""
    if config is None and part is not None:
        raise InputError(f"--part {part} is for encoder-decoders; a pattern has no parts. Leave it out.")
    if config is not None and causal:
        raise InputError(
            f"--causal is for patterns; the config of {source} decides whether the model is causal. Leave it out."
        )


def _refuse_blank(source: str) -> None:
    """Raise InputError for an empty argument, which `Path` would take for the current folder."""
    if not source.strip():
        raise InputError("The pattern is empty. Give an expression such as 'band(4, 4) | global(0)', JSON, or a file.")


def _has_model_type(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    # invalid JSON is refused later, when it is read as a pattern
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "model_type" in data


def read_pattern(source: str, layer: int = 0) -> Pattern:
    """Return the pattern of a layer from an expression, from JSON text, or from a JSON file.

    The JSON holds a pattern, any other form of `attention_pattern`, or a config with an `attention_pattern`.

    Raises:
        ConfigurationError: it is none of these, or the layer has no pattern.
    """
    if layer < 0:
        raise ConfigurationError(f"layer={layer} must be at least 0: layers are counted from 0.")
    patterns = read_layer_patterns(source, layer + 1)
    pattern = patterns[layer] if layer < len(patterns) else None
    if pattern is None:
        counted = f"layers are counted from 0 to {len(patterns) - 1}" if patterns else "the list has none"
        raise ConfigurationError(f"Layer {layer} has no pattern; {counted}.")
    return pattern


def read_layer_patterns(source: str, num_layers: int) -> tuple[Pattern | None, ...]:
    """Return the patterns of all layers from a source of `read_pattern`; None: the layer keeps its own attention.

    Args:
        num_layers: the number of layers, if the source does not say it.

    Raises:
        ConfigurationError: as in `read_pattern`.
    """
    _refuse_blank(source)
    if not source.endswith(".json") and Path(source).is_file():
        raise ConfigurationError(f"{source} is a file, but not a .json file. Give a JSON file, or an expression.")
    text = _text_of_file(source) if source.endswith(".json") else source
    if not text.lstrip().startswith(("{", "[")):
        return (parse_pattern(text),) * num_layers
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{shown(source)} is not valid JSON, or is nested too deeply: {cut(str(error), 160, 40)}."
        ) from error
    if isinstance(data, dict) and ("attention_pattern" in data or "model_type" in data):
        if data.get("attention_pattern") is None:
            raise ConfigurationError(f"{shown(source)} is the config of a model without an attention_pattern.")
        num_layers = data.get("num_hidden_layers", num_layers)
        data = data["attention_pattern"]
    return patterns_per_layer(data, len(data) if isinstance(data, list) else num_layers)


def _text_of_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The file {shown(path)} cannot be read ({cut(str(error), 160, 40)}). Give the path of a JSON file, or an "
            "expression."
        ) from error
