"""Windows as bands, and words on those that are none."""

from typing import Any

import pytest

import hf_efficient_attn as hea
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.windows import band_of_window


@pytest.mark.parametrize(("window", "side"), [(2, 1), (512, 256)])
def test_half_on_each_side(window: int, side: int) -> None:
    assert band_of_window(window) == Band(side, side)


@pytest.mark.parametrize(("window", "nearest"), [(-2, "2"), (0, "2"), (1, "2"), (3, "2 or 4"), (7, "6 or 8")])
def test_odd_and_small_windows_are_refused_with_the_nearest(window: int, nearest: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=f"attention_window={window} .* even and .*: {nearest}\\.$"):
        band_of_window(window)


@pytest.mark.parametrize("window", [8.0, "512", None, True, [8]])
def test_what_is_no_integer_is_refused(window: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match="must be an integer, such as 512"):
        band_of_window(window)


def test_presets_refuse_alike() -> None:
    for preset in (hea.SparseTransformerConfig.longformer, hea.SparseSeq2SeqConfig.led):
        for window in (8.0, [8.0] * 12):
            with pytest.raises(hea.ConfigurationError, match=r"attention_window=8\.0 must be an integer"):
                preset(attention_window=window)
