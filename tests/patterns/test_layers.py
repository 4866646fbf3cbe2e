"""Patterns per layer: every form of `attention_pattern`, its JSON, and what is refused."""

import json
from typing import Any

import pytest

from hf_efficient_attn.patterns import Band, Full, Pattern, layers_to_dict, patterns_per_layer

BAND, FULL = Band(2, 2), Full()
FORMS = [
    (BAND, (BAND,) * 4),
    (BAND.to_dict(), (BAND,) * 4),
    ([BAND, None, FULL.to_dict(), BAND], (BAND, None, FULL, BAND)),
    ({"tile": "LLG", "patterns": {"L": BAND, "G": FULL.to_dict()}}, (BAND, BAND, FULL, BAND)),
    ({"tile": "L.", "patterns": {"L": BAND, ".": None, "X": FULL}}, (BAND, None, BAND, None)),
]


@pytest.mark.parametrize(("spec", "patterns"), FORMS)
def test_forms(spec: Any, patterns: tuple[Pattern | None, ...]) -> None:
    assert patterns_per_layer(spec, 4) == patterns
    data = json.loads(json.dumps(layers_to_dict(spec)))
    assert patterns_per_layer(data, 4) == patterns
    assert layers_to_dict(data) == data
