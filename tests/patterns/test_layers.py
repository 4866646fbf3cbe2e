"""Patterns per layer: every form of `attention_pattern`, its JSON, and what is refused."""

import json
from typing import Any

import pytest

from hf_efficient_attn.errors import ConfigurationError
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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([BAND], "lists 1 patterns for 4 layers"),
        ({"tile": "LG", "patterns": {"L": BAND}}, "uses 'G', which has no pattern"),
        ({"tile": "", "patterns": {}}, "A tiled attention_pattern is"),
        ({"tile": "L"}, "A tiled attention_pattern is"),
        ({"tile": "L", "patterns": {"L": BAND}, "start": 1}, "A tiled attention_pattern is"),
        (None, "it must be a pattern"),
        ("band", "'band' has no place in a pattern; write band"),
        ({}, "a pattern has no kind"),
        ({"encodr": BAND}, r"keys \['encodr'\].* \"encoder\" and \"decoder\""),
        ({0: BAND, 1: None}, r"keys \[0, 1\].* give a list"),
    ],
)
def test_refusals(spec: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        patterns_per_layer(spec, 4)
