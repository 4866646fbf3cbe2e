"""Every public kind of pattern through every form in which it is written: a new kind is tested by itself.

The kinds are found by introspection; one without an example here fails.
"""

import copy
import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import hf_efficient_attn as hea
from hf_efficient_attn import patterns
from hf_efficient_attn.layout.operator_args import read_call_text, write_call_text
from hf_efficient_attn.patterns import (
    Band,
    BigBirdBlocks,
    BlockLocal,
    Blocks,
    BlockTopK,
    Causal,
    Complement,
    CompressedKeys,
    Dilated,
    Full,
    GatheredKeys,
    GlobalTokens,
    Grid,
    InterleavedSpanTree,
    Intersection,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    SizedGrid,
    SizedSpanTree,
    SpanTree,
    Strided,
    Union,
    parse_pattern,
)

# every field differs from its default where it has one
EXAMPLES: list[Pattern] = [
    Band(3, None),
    BigBirdBlocks(1, 4, seed=3, plan="transformers"),
    BlockLocal(8),
    BlockTopK(8, 3),
    Blocks(Band(1, -1), 4),
    Causal(),
    Complement(Band(0, 0)),
    CompressedKeys(8, 4),
    Dilated(None, 6, 3),
    Full(),
    GatheredKeys(Band(3, 1) | GlobalTokens([2]), [(1, 3), (5, 9)]),
    GlobalTokens([-1, 0], attends_to_all=False),
    GlobalTokens([0, 5], attended_by_all=False),
    Grid([None, 5], [Band(1, 1), Dilated(2, 2, 2)], 5, "shifted", is_causal=True),
    InterleavedSpanTree(2, left_only=True, num_tokens=5),
    Intersection([Causal(), Strided(2)]),
    KeyTable([[1, 0], [], [5]]),
    PerHead([Full(), Blocks(KeyTable([[0], []]), 4)]),
    RandomBlocks(2, 4, seed=5, exclude=Band(1, 1), is_causal=True),
    SizedGrid([4, 3], [Full(), KeyTable([[0], [1, 2]])], 1, "cut", is_causal=True),
    SizedSpanTree(7, 2, left_only=True, builder="release"),
    SpanTree(2, is_causal=True, builder="release"),
    Strided(3),
    Union([KeyTable([[0]]), GlobalTokens([1])]),
]
KINDS = {
    cls
    for name, cls in vars(patterns).items()
    if name in patterns.__all__ and isinstance(cls, type) and issubclass(cls, Pattern) and cls is not Pattern
}


def through_config(pattern: Pattern, folder: Path) -> Pattern:
    # a choice is of past keys
    fields = {"position_embedding_type": "rope", "is_causal": pattern.chooses_by_content}
    hea.SparseTransformerConfig(attention_pattern=pattern, **fields).save_pretrained(folder)
    return Pattern.from_dict(AutoConfig.from_pretrained(folder).attention_pattern)


@cache
def compiled_texts() -> list[str]:
    """Return the texts that a compiled function writes of the examples."""
    texts = []

    def write(x: torch.Tensor) -> torch.Tensor:
        for pattern in EXAMPLES:
            texts.append(write_call_text(pattern, 1, ()))
        return x + 1

    torch.compiler.reset()
    torch.compile(write, fullgraph=True, backend="eager")(torch.ones(1))
    return texts


def through_compiler(pattern: Pattern) -> Pattern:
    return read_call_text(compiled_texts()[EXAMPLES.index(pattern)])[0]


def through_expression(pattern: Pattern) -> Pattern:
    return parse_pattern(repr(pattern))


FORMS: dict[str, Callable[[Pattern], Pattern]] = {
    "json": lambda pattern: Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))),
    "pickle": lambda pattern: pickle.loads(pickle.dumps(pattern)),
    "deepcopy": copy.deepcopy,
    "compiled call text": through_compiler,
    "repr": lambda pattern: eval(repr(pattern), vars(patterns)),
    "expression": through_expression,
}


def test_every_public_kind_has_an_example() -> None:
    assert {type(pattern) for pattern in EXAMPLES} == KINDS == set(Pattern.kinds.values())


@pytest.mark.parametrize("pattern", EXAMPLES, ids=lambda pattern: pattern.kind)
def test_round_trip(pattern: Pattern) -> None:
    for through in FORMS.values():
        check_same(through(pattern), pattern)


@pytest.mark.parametrize("pattern", EXAMPLES, ids=lambda pattern: pattern.kind)
def test_round_trip_through_config_json(pattern: Pattern, tmp_path: Path) -> None:
    if pattern.kind in ("sized_span_tree", "interleaved_span_tree", "compressed_keys", "gathered_keys"):
        pytest.skip("a config's pattern holds at every length, and for tokens that are queries and keys")
    check_same(through_config(pattern, tmp_path), pattern)


def check_same(found: Pattern, pattern: Pattern) -> None:
    assert found == pattern
    assert hash(found) == hash(pattern)
    assert repr(found) == repr(pattern)
    # what is computed once and kept is no part of a value, and comes back in the copy
    resolved = [each.resolve(15, num_heads=2) for each in (pattern, found)]
    if not pattern.chooses_by_content:
        intervals = [[each.key_intervals(query, query, 15) for query in range(15)] for each in resolved]
        assert intervals[0] == intervals[1]
        assert resolved[1].allowed(torch.arange(15)[:, None], torch.arange(15)).dtype == torch.bool
    check_same_text(resolved[1], resolved[0])


def check_same_text(found: Pattern, pattern: Pattern) -> None:
    assert write_call_text(found, 0, ()) == write_call_text(pattern, 0, ())
    assert read_call_text(write_call_text(found, 0, (), 0, None, False))[:3] == (pattern, 0, ())
