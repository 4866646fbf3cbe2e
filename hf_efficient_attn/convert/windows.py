"""Windows as transformers counts them, both sides of a query together, into our patterns and out of them."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import config_patterns
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.windows import band_of_window


def bands_of_windows(windows: int | list[int], num_layers: int) -> list[Band]:
    """Return the pattern of each layer; one window is that of all.

    >>> bands_of_windows(8, 2) == bands_of_windows([8, 8], 2) == [Band(4, 4), Band(4, 4)]
    True

    Raises:
        ConfigurationError: a window that is odd, or less than 2.
    """
    return [band_of_window(window) for window in ([windows] * num_layers if isinstance(windows, int) else windows)]


def windows_of_pattern(config: Any, model_type: str) -> list[int]:
    """Return the window of each layer of a config of ours; of an encoder-decoder, of each encoder layer.

    Raises:
        ConfigurationError: a layer that is no symmetric band.
    """
    spec = config.attention_pattern
    patterns = (spec is not None and config_patterns(spec, config, ENCODER)) or (None,)
    windows = []
    for layer, pattern in enumerate(patterns):
        size = {} if pattern is None else pattern.to_dict()
        if size.get("kind") != "band" or not size["left"] or size["left"] != size["right"]:
            raise ConfigurationError(
                f"{model_type} has windows, as far to the left as to the right, and layer {layer} has {shown(pattern)}"
                ". Only models whose attention_pattern is band(n, n) in each layer can become one."
            )
        windows.append(2 * size["left"])
    return windows
