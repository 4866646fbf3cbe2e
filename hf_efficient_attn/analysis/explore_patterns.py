"""The patterns that the page of `explore` offers, and what Python knows about them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.utils import logging

from hf_efficient_attn.attention.explain import explain
from hf_efficient_attn.attention.explanation import MEBIBYTE, Explanation
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.bands import Full
from hf_efficient_attn.patterns.expressions import parse_pattern, write_expression
from hf_efficient_attn.patterns.pattern import Pattern

# title, the expressions of the layers, and whether it is shown in its causal form
PRESETS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Longformer: band, global token", ("band(256, 256) | global(0)",), False),
    ("Longformer, half dilated", ("per_head([band(256, 256), dilated(1024, 1024, 4)]) | global(0)",), False),
    ("BigBird: random blocks", ("bigbird(64, 3)",), False),
    ("Sinks and a band, causal", ("band(511, 0) | global(0, 1, 2, 3)",), True),
    ("Strided, causal", ("band(127, 0) | strided(128)",), True),
    ("Blocks and bands in turns", ("block_local(512)", "band(256, 256)"), False),
    ("Three local layers, one dense", ("band(1023, 0)", "band(1023, 0)", "band(1023, 0)", "causal()"), True),
    ("Dense, causal", ("causal()",), True),
    ("Dense", ("full()",), False),
)
LENGTHS = tuple(2**power for power in range(9, 17))


# a title, the patterns of the layers (None: the layer keeps its own attention), and whether they are followed causally
Own = tuple[str, Sequence[Pattern | None], bool]


def presets(own: Iterable[Own], num_layers: int, num_heads: int) -> list[dict[str, Any]]:
    """Return the patterns to choose from: a user's own, then ours, which have `num_layers` layers.

    Those of ours that so many heads cannot share are left out.
    """
    written = [
        (title, [_expression(each, is_causal) for each in patterns], is_causal, len(patterns))
        for title, patterns, is_causal in own
    ]
    ours = [
        (title, lines, is_causal, num_layers)
        for title, lines, is_causal in PRESETS
        if all(num_heads % parse_pattern(line).num_head_patterns == 0 for line in lines)
    ]
    return [
        {"title": title, "expressions": _tile(lines), "layers": layers, "heads": num_heads, "causal": is_causal}
        for title, lines, is_causal, layers in (*written, *ours)
    ]


def _expression(pattern: Pattern | None, is_causal: bool) -> str:
    """Return an expression; of a layer with attention of its own, what that is if it reads everything it may."""
    return ("causal()" if is_causal else "full()") if pattern is None else write_expression(pattern)


def _tile(lines: Sequence[str]) -> list[str]:
    """Return the shortest beginning of which all lines are repetitions.

    >>> _tile("abab"), _tile("aba")
    (['a', 'b'], ['a', 'b'])
    """
    repeats = (size for size in range(1, len(lines) + 1) if all(lines[i] == lines[i % size] for i in range(len(lines))))
    return list(lines[: next(repeats)])


def explanations(offered: Iterable[dict[str, Any]], tokens: int, heads: int, device: str) -> list[dict[str, Any]]:
    """Return which backend computes the offered patterns and why, without and with gradients, at several lengths.

    Lengths and numbers of heads that a pattern cannot have are left out: the page says so when they are chosen.
    """
    # refuses a device that torch does not know
    explain(Full(), 1, device=device)
    wanted = dict.fromkeys((line, each["causal"]) for each in offered for line in each["expressions"])
    found = []
    for line, causal in logging.tqdm(wanted, desc="backends", unit="pattern", leave=False):
        pattern = parse_pattern(line)
        pattern = pattern.causal() if causal else pattern
        for length in sorted({*LENGTHS, tokens}):
            for training in (False, True):
                dtype = torch.float32 if device == "cpu" else torch.bfloat16
                options: dict[str, Any] = {"device": device, "dtype": dtype, "num_heads": heads, "training": training}
                try:
                    said = explain(pattern, length, **options)
                except InputError:
                    continue
                found.append({"expression": line, "causal": causal, "tokens": length, **_facts(said, training)})
    return found


def _facts(said: Explanation, training: bool) -> dict[str, Any]:
    inputs, layout = said.call.inputs, said.call.layout
    dtype = str(inputs.dtype).removeprefix("torch.")
    return {
        "setting": "training" if training else "inference",
        "call": f"{layout.num_heads} heads of width {inputs.head_dim}, {dtype} on {inputs.device}, one layer",
        "backend": said.backend,
        "cost": said.relative_cost,
        "baseline": said.baseline,
        "memory": f"{said.memory_bytes / MEBIBYTE:,.0f} MiB beyond q, k and v",
        "reasons": said.reasons,
    }
