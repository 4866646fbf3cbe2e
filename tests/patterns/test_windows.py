"""Windows as bands, and words on those that are none."""

import pytest

from hf_efficient_attn.patterns.bands import Band, band_of_window


@pytest.mark.parametrize(("window", "side"), [(2, 1), (512, 256)])
def test_half_on_each_side(window: int, side: int) -> None:
    assert band_of_window(window) == Band(side, side)
