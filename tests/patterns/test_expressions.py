"""Expressions: what they mean, and that nothing else is run."""

import pytest
from hypothesis import given
from patterns.strategies import compositions, with_heads

from hf_efficient_attn.patterns import (
    Band,
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    bigbird,
    parse_pattern,
)
from hf_efficient_attn.patterns.config_spec import write_expression


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("band(4,4)|global(0)", Band(4, 4) | GlobalTokens([0])),
        (" Band(left=None, right=-1) & ~causal() ", Band(None, -1) & ~Causal()),
        ("global(0, -1, attends_to_all=False)", GlobalTokens([0, -1], attends_to_all=False)),
        ("global([0, 3]) | global_tokens([5])", GlobalTokens([0, 3]) | GlobalTokens([5])),
        ("per_head([full(), (causal() | Band(1, 1))])", PerHead([Full(), Causal() | Band(1, 1)])),
        ("blocks(key_table([[0], []]), 4)", Blocks(KeyTable([[0], []]), 4)),
        ("random_blocks(1, 4, exclude=band(1, 1))", RandomBlocks(1, 4, exclude=Band(1, 1))),
        ("bigbird(8, plan='authors')", bigbird(8, plan="authors")),
    ],
)
def test_meaning(text: str, pattern: Pattern) -> None:
    assert parse_pattern(text) == pattern


@given(with_heads | compositions)
def test_written_expressions(pattern: Pattern) -> None:
    assert parse_pattern(write_expression(pattern)) == pattern
