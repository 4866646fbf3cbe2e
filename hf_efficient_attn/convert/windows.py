"""Windows as transformers counts them, both sides of a query together, and as patterns."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import ENCODER, config_patterns
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.pattern import Pattern


def band_of_window(window: int) -> Pattern:
    """Return the band of a window; the query itself is not counted.

    Raises:
        ConfigurationError: an odd window, or one below 2.

    >>> band_of_window(512)
    Band(left=256, right=256)
    """
    if window < 2 or window % 2:
        raise ConfigurationError(
            f"attention_window={window} counts the tokens on both sides of a query together, so it must be even and at "
            f"least 2: {max(2, window - 1)} or {max(2, window + 1)}."
        )
    return Band(window // 2, window // 2)


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
                f"{model_type} has windows, as far to the left as to the right, and layer {layer} has {pattern}. Only "
                "models whose attention_pattern is band(n, n) in each layer can become one."
            )
        windows.append(2 * size["left"])
    return windows
