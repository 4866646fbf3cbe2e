"""Inputs without values for the trial of any model, by the names of the arguments of its forward method."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SOURCE_TOKENS, TARGET_TOKENS = 7, 5
# one second of sound
WAVE_SAMPLES = 16000
SPECTROGRAM_FRAMES = 64
# passed to every forward method that has it, besides the required arguments
TARGET = "decoder_input_ids"


def trial_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs to try in turn: the model's main input first, then every input that is known here.

    Some composite models take one of their inputs, others only all of them.
    """
    model_class: Any = type(model)
    names = forward_arguments(model_class)
    main = model.main_input_name
    first = {main} if isinstance(main, str) else set(main)
    first |= {name for name, has_default in names.items() if not has_default}
    first |= {TARGET} if model.config.is_encoder_decoder else set()
    smaller = _made(model, first & names.keys())
    yield smaller
    larger = _made(model, names.keys() & {"input_ids", "pixel_values", "encoder_hidden_states", *first})
    if larger.keys() != smaller.keys():
        yield larger


def _made(model: Any, names: set[str]) -> dict[str, Tensor]:
    dtypes = {True: torch.long, False: model.dtype}
    return {
        name: torch.ones(SHAPES[name](model.config), dtype=dtypes[name.endswith("ids")], device="meta")
        for name in names & SHAPES.keys()
    }


@functools.lru_cache(maxsize=1024)
def forward_arguments(model_class: Any) -> dict[str, bool]:
    """Return the names of the arguments of a forward method in their order, and whether each has a default."""
    parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]
    return {
        each.name: each.default is not each.empty
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }


def _field(config: Any, name: str, default: Any) -> Any:
    """Return a field of a config, or of the first of its parts that has one."""
    parts = [getattr(config, each, None) for each in config.sub_configs]
    values = (getattr(each, name, None) for each in (config, *parts))
    return next((each for each in values if each is not None), default)


def _image(config: Any) -> tuple[int, ...]:
    size = _field(config, "image_size", 32)
    return 1, _field(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size)


def _features(config: Any) -> tuple[int, ...]:
    """Return the shape of a spectrogram; models like Whisper read as many frames as they have positions."""
    bins = _field(config, "num_mel_bins", None)
    if bins is None:
        return 1, SPECTROGRAM_FRAMES, _field(config, "input_feat_per_channel", 80)
    return 1, bins, 2 * _field(config, "max_source_positions", SPECTROGRAM_FRAMES // 2)


def _wave(config: Any) -> tuple[int, ...]:
    bins = _field(config, "num_mel_bins", None)
    return (1, WAVE_SAMPLES) if bins is None else (1, _field(config, "max_length", SPECTROGRAM_FRAMES), bins)


def _embeddings(config: Any) -> tuple[int, ...]:
    return 1, SOURCE_TOKENS, config.get_text_config().hidden_size


def _encoded(config: Any) -> tuple[int, ...]:
    return 1, SOURCE_TOKENS, _field(config, "encoder_hidden_size", config.get_text_config().hidden_size)


# by the name of the argument; trials cannot make others
SHAPES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "input_ids": lambda _: (1, SOURCE_TOKENS),
    TARGET: lambda _: (1, TARGET_TOKENS),
    "inputs_embeds": _embeddings,
    "query_embeds": _embeddings,
    "encoder_hidden_states": lambda config: (
        1,
        SOURCE_TOKENS,
        _field(config, "encoder_hidden_size", config.hidden_size),
    ),
    "pixel_values": _image,
    "input_features": _features,
    "input_values": _wave,
}
