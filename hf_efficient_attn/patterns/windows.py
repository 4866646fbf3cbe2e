"""Longformer's windows, which count the tokens on both sides of a query together, as bands."""

from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.checks import MAX_INTEGER, is_integer


def band_of_window(attention_window: Any) -> Band:
    """Return the band of a window; the query itself is not counted.

    Raises:
        ConfigurationError: a window that is not an integer, is odd, or is below 2.

    >>> band_of_window(512)
    Band(left=256, right=256)
    """
    if not is_integer(attention_window):
        raise ConfigurationError(
            f"attention_window={shown(attention_window)} must be an integer, such as 512: it counts the tokens on both "
            "sides of a query together."
        )
    if attention_window // 2 > MAX_INTEGER:
        raise ConfigurationError(
            f"attention_window={shown(attention_window)} is more than {2 * MAX_INTEGER}: no input is as long."
        )
    if attention_window < 2 or attention_window % 2:
        nearest = "2" if attention_window < 3 else f"{attention_window - 1} or {attention_window + 1}"
        raise ConfigurationError(
            f"attention_window={shown(attention_window)} counts both sides of a query together, so it must be even "
            f"and at least 2. The nearest that is: {nearest}."
        )
    return Band(attention_window // 2, attention_window // 2)
