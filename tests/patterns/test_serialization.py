"""Patterns in JSON: the form that stands in config.json, and what is refused."""

import json
from typing import Any

import pytest

from hf_efficient_attn.patterns import (
    Band,
    BigBirdBlocks,
    Full,
    GlobalTokens,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    SpanTree,
    bigbird,
)


@pytest.mark.parametrize(
    ("pattern", "data"),
    [
        (Full(), {"kind": "full"}),
        (Band(256, None), {"kind": "band", "left": 256, "right": None}),
        (KeyTable([[1, 0], []]), {"kind": "key_table", "rows": [[0, 1], []]}),
        (~Full(), {"kind": "complement", "pattern": {"kind": "full"}}),
        (PerHead([Full()]), {"kind": "per_head", "patterns": [{"kind": "full"}]}),
        (
            RandomBlocks(1, 4, exclude=Full()),
            {
                "kind": "random_blocks",
                "num_blocks": 1,
                "block_tokens": 4,
                "seed": 0,
                "exclude": {"kind": "full"},
                "is_causal": False,
            },
        ),
    ],
)
def test_form(pattern: Pattern, data: dict[str, Any]) -> None:
    assert pattern.to_dict() == data
    assert Pattern.from_dict(data) == pattern


@pytest.mark.parametrize("pattern", [bigbird(), BigBirdBlocks(1, 4), SpanTree(2), SpanTree(2).resolve(15)])
def test_round_trip_through_text(pattern: Pattern) -> None:
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern


def test_fields_with_defaults_may_be_missing() -> None:
    assert Pattern.from_dict({"kind": "global_tokens", "positions": [0]}) == GlobalTokens([0])
