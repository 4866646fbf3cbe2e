"""Expressions: what they mean, and that nothing else is run."""

import pytest
from hypothesis import given
from patterns.strategies import compositions, with_heads

from hf_efficient_attn.errors import ConfigurationError
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
from hf_efficient_attn.patterns.expressions import write_expression


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("band(4,4)|global(0)", Band(4, 4) | GlobalTokens([0])),
        (" Band(left=None, right=-1) & ~causal() ", Band(None, -1) & ~Causal()),
        ("global(0, -1, reads_all=False)", GlobalTokens([0, -1], reads_all=False)),
        ("global([0, 3]) | global_tokens([5])", GlobalTokens([0, 3]) | GlobalTokens([5])),
        ("per_head([full(), (causal() | Band(1, 1))])", PerHead([Full(), Causal() | Band(1, 1)])),
        ("blocks(key_table([[0], []]), 4)", Blocks(KeyTable([[0], []]), 4)),
        ("random_blocks(1, 4, exclude=band(1, 1))", RandomBlocks(1, 4, exclude=Band(1, 1))),
        ("bigbird(8, plan='authors')", bigbird(8, plan="authors")),
    ],
)
def test_meaning(text: str, pattern: Pattern) -> None:
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no expression of patterns"),
        ("band(4,", "is no expression of patterns"),
        ("4", "'4' is no pattern"),
        ("bnd(4, 4)", "No pattern is called 'bnd'.*Did you mean 'band'"),
        ("band", r"'band' has no place in a pattern; write band\(left, right\)\."),
        ("band(3, 3) | global", r"'global' has no place in a pattern; write global\(\[positions, \.\.\.\]\)\."),
        ("full", r"write full\(\)\."),
        ("bigbird", r"write bigbird\(\)\."),
        ("fall", "No pattern is called 'fall'; allowed are "),
        (3, "3 is no expression of patterns"),
        ("band(4)", r"Band takes left, right: missing .*'right'"),
        ("band(4, rigth=4)", r"Band takes left, right: .*'rigth'"),
        ("dilated(4)", r"Dilated takes left, right, step: missing"),
        ("per_head(band(1, 0), band(3, 0))", r"does not fit: write per_head\(\[patterns, \.\.\.\]\)\."),
        (
            "global(0, read=True)",
            r"global\(0, read=True\) does not fit: write global\(\[positions, .*read_by_all=True\)",
        ),
        ("bigbird(1, 2, 3, 4, 5, 6)", r"write bigbird\(block_tokens=64, num_random_blocks=3, seed=0"),
        ("band(4, 4, **x)", "No pattern is called 'x'; "),
        ("band(4.0, 4)", "'4.0' has no place"),
        ("band(1 + 1, 4)", "'1 \\+ 1' has no place"),
        ("band(4, 4) + full()", "has no place"),
        ("full() | 3", "'3' is no pattern"),
        ("__import__('os')", "No pattern is called '__import__'"),
        ("full().kinds", "has no place"),
        ("(lambda: full())()", "has no place"),
        ("band(-2, 1)", "left is -2"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_pattern(text)


@given(with_heads | compositions)
def test_written_expressions(pattern: Pattern) -> None:
    assert parse_pattern(write_expression(pattern)) == pattern
