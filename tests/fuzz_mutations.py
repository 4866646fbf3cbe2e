"""Patterns, and what mutations of their dicts, expressions and config files put in, for `tests/fuzz_patterns.py`."""

import copy
import random
import re
from collections.abc import Callable
from typing import Any

from fuzz_drawn import draw_pattern

from hf_efficient_attn import patterns
from hf_efficient_attn.patterns import Pattern
from hf_efficient_attn.patterns.serialization import is_integer

PATTERNS: list[Pattern] = [
    patterns.Band(3, None) | patterns.GlobalTokens([0, -1]),
    patterns.Dilated(6, 0, 3) & ~patterns.KeyTable([[0], [1, 5], []]),
    patterns.PerHead([patterns.Causal(), patterns.Blocks(patterns.Band(1, 0), 4)]),
    patterns.RandomBlocks(2, 4, seed=3, exclude=patterns.Strided(5)),
    patterns.bigbird(4, 1, plan="authors"),
    patterns.SpanTree(2, is_causal=True),
    patterns.BlockLocal(8) | patterns.SizedSpanTree(7, 2),
    patterns.Grid([None, 4], [patterns.Band(1, 2), patterns.Full()], 1, is_causal=True),
    patterns.SizedGrid([3, 4], [patterns.Band(1, 1), patterns.Dilated(2, 2, 2)], 1, "shifted"),
]
EXPRESSIONS = [
    "band(3, None) | global(0, -1)",
    "dilated(6, 0, 3) & ~key_table([[0], [1, 5], []])",
    "per_head([causal(), blocks(band(1, right=0), 4)])",
    "random_blocks(2, 4, seed=3, exclude=strided(5)) | bigbird(4, 1, plan='authors')",
    "span_tree(2, is_causal=True) | block_local(8)",
    "grid([3, 4], [band(1, 1), dilated(2, 2, 2)], 1, borders='shifted') & sized_grid([12], [full()])",
]
PIECES = [
    "band(",
    "full()",
    "|",
    "&",
    "~",
    "(",
    ")",
    "[",
    "]",
    ",",
    "None",
    "-1",
    "9" * 50,
    "'",
    "global",
    "left=",
    "\0",
]
VALUES: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.choice([0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63, 10**18, 10**30, -(10**18)]),
    lambda draw: draw.choice([0.5, -1.5, 1e300, float("nan"), float("inf")]),
    lambda draw: draw.choice([None, True, False, "", "full", "band", "a" * 5000, "\x00", "é"]),
    lambda draw: draw.choice([[], {}, [None], [[]], [[[1]]], {"kind": "full"}, {"kind": None}, {"a": 1}]),
    lambda draw: list(range(draw.choice([3, 300, 3000]))),
    lambda draw: [[draw.randrange(50) for _ in range(draw.randrange(6))] for _ in range(draw.randrange(30))],
    lambda draw: draw.choice(PATTERNS).to_dict(),
    lambda draw: [draw.choice(PATTERNS).to_dict() for _ in range(draw.choice([1, 2, 4, 200]))],
    lambda draw: [{"kind": "dilated", "left": 9 * i, "right": i, "step": i} for i in range(1, draw.choice([9, 200]))],
    lambda draw: nested(draw.choice(PATTERNS).to_dict(), draw.choice([3, 20, 40, 300])),
]


def a_pattern(draw: random.Random, num_tokens: int) -> Pattern:
    """Return one of PATTERNS, or one of any kinds, whose sizes fit a length."""
    return draw.choice(PATTERNS) if draw.random() < 0.7 else draw_pattern(draw, 4, num_tokens)


def nested(data: Any, levels: int) -> Any:
    """Return complements of complements, with unions in between."""
    for level in range(levels):
        data = (
            {"kind": "union", "patterns": [data, {"kind": "causal"}]}
            if level % 3 == 0
            else {"kind": "complement", "pattern": data}
        )
    return data


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value within, at most some hundreds."""
    found: list[tuple[Any, Any]] = []
    left = [data]
    while left and len(found) < 300:
        each = left.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            left.append(each[key])
    return found


def mutate(data: Any, draw: random.Random) -> Any:
    """Return a copy of JSON types in which one to three values are others, are gone, moved, or under other names."""
    data = copy.deepcopy(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        spots = places(data)
        if not spots:
            return draw.choice(VALUES)(draw)
        container, key = draw.choice(spots)
        action = draw.randrange(8)
        if is_integer(container[key]) and draw.random() < 0.7:
            # one that a pattern may well have
            container[key] = round(2 ** draw.uniform(0, draw.choice([3, 8, 16]))) - 1
        elif action == 0:
            container.pop(key)
        elif action == 1 and isinstance(container, dict):
            container[draw.choice(["kind", "left", "patterns", "pattern", "", "a" * 600])] = container.pop(key)
        elif action == 2:
            other, other_key = draw.choice(spots)
            # a value within itself would never end in a file
            value = other.get(other_key) if isinstance(other, dict) else None
            container[key] = copy.deepcopy(value)
        elif action == 3 and is_integer(container[key]):
            container[key] = container[key] * draw.choice([-1, 10, 1000]) + draw.choice([-1, 0, 1])
        else:
            container[key] = draw.choice(VALUES)(draw)
    return data


def mutate_text(text: str, draw: random.Random) -> str:
    """Return a text with other numbers, or with pieces put in, taken out, repeated or replaced."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        numbers = list(re.finditer(r"\d+", text))
        if numbers and draw.random() < 0.6:
            number = draw.choice(numbers)
            other = str(round(2 ** draw.uniform(0, draw.choice([3, 8, 16]))) - 1)
            text = text[: number.start()] + other + text[number.end() :]
            continue
        first = draw.randrange(len(text) + 1)
        last = min(len(text), first + draw.choice([0, 1, 2, 8]))
        piece = draw.choice([*PIECES, draw.choice(PIECES) * draw.choice([2, 50, 1000])])
        text = text[:first] + draw.choice(["", piece, text[first:last] * 2]) + text[last:]
    return text


def draw_length(draw: random.Random) -> int:
    """Draw a number of tokens from 1 to 65,536; nine of ten are at most 256, and some have a span tree.

    One in a thousand is longer than 4,096: there layouts of span trees, and of nests of many patterns, take seconds,
    as do those of regular patterns over 131,072 tokens.
    """
    lowest, highest = draw.choices([(0, 8), (8, 12), (12, 16)], (900, 99, 1))[0]
    length = round(2 ** draw.uniform(lowest, highest))
    return patterns.span_tree_nodes(length // 2) if length > 1 and draw.random() < 0.2 else length
