"""The patterns that the page of `explore` offers: the keys of every query, and which backend computes them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging

from hf_efficient_attn.attention.explanation import MEBIBYTE, Explanation
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.explain import explain
from hf_efficient_attn.patterns.config_spec import parse_pattern, write_expression
from hf_efficient_attn.patterns.intervals import MAX_CLASSES, CrossingError, Moving
from hf_efficient_attn.patterns.pattern import Pattern

# title, the expressions of the layers, and whether it is shown in its causal form
PRESETS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Longformer: band, global token", ("band(256, 256) | global(0)",), False),
    (
        "Longformer, half of the heads dilated",
        ("per_head([band(256, 256), dilated(1024, 1024, 4)]) | global(0)",),
        False,
    ),
    ("BigBird: random blocks", ("bigbird(64, 3)",), False),
    ("Sinks and a band, causal", ("band(511, 0) | global(0, 1, 2, 3)",), True),
    ("Strided, causal", ("band(127, 0) | strided(128)",), True),
    ("Alternating blocks and bands", ("block_local(512)", "band(256, 256)"), False),
    ("Three local layers, one dense", ("band(1023, 0)", "band(1023, 0)", "band(1023, 0)", "causal()"), True),
    ("Dense, causal", ("causal()",), True),
    ("Dense", ("full()",), False),
)
# limit for one pattern in all layers and heads: about 5 MB
MAX_INTERVALS = 1 << 19

# a title, the patterns of the layers (None: the layer keeps its own attention), and whether their causal form is used
Own = tuple[str, Sequence[Pattern | None], bool]


class TooManyIntervalsError(InputError):
    """The keys of a pattern, in all layers and heads, form more intervals than a page can hold."""


def preset(
    title: str, lines: Sequence[str], is_causal: bool, layers: int, heads: int, tokens: int, device: str
) -> dict[str, Any]:
    """Return what the page shows of a pattern, in JSON types.

    Entry n of `indices`, modulo their number, belongs to layer n: an index into `patterns` for every group of heads.

    Args:
        lines: the expressions of the layers, repeated if there are more layers.
        is_causal: whether the causal form is shown.
        device: the device for which backends are explained.

    Raises:
        InputError: a length that the pattern cannot have, keys of another sequence, or too many intervals.
        ConfigurationError: the pattern cannot be divided evenly among the heads, or selects keys by content.
    """
    patterns = [parse_pattern(line) for line in lines]
    for line, pattern in zip(lines, patterns, strict=True):
        if pattern.needs_two_axes:
            raise InputError(
                f"{line} attends to keys of another sequence; the page shows only patterns of one sequence. Use draw."
            )
    if is_causal:
        patterns = [pattern.causal() for pattern in patterns]
    is_random = any(pattern.is_random for pattern in patterns)
    # resolved patterns, each with its place in `written`
    found: dict[Pattern, int] = {}
    written: list[list[dict[str, Any]]] = []
    indices: list[list[int]] = []
    room = MAX_INTERVALS
    for layer in range(layers if is_random else len(patterns)):
        pattern = patterns[layer % len(patterns)]
        groups = heads if is_random else pattern.num_head_patterns
        indices.append([])
        for group in range(groups):
            resolved = pattern.resolve(tokens, layer, group * heads // groups, heads)
            if resolved not in found:
                found[resolved] = len(found)
                written.append(interval_data(resolved, tokens, room))
                room -= sum(_num_intervals(part) for part in written[-1])
            indices[-1].append(found[resolved])
    explained = {pattern: explanations(pattern, tokens, heads, device) for pattern in dict.fromkeys(patterns)}
    return {
        "title": title,
        "expressions": list(lines),
        "causal": is_causal,
        "layers": layers,
        "heads": heads,
        "random": is_random,
        "patterns": written,
        "indices": indices,
        "backends": [explained[pattern] for pattern in patterns],
    }


def interval_data(pattern: Pattern, num_tokens: int, most: int = MAX_INTERVALS) -> list[dict[str, Any]]:
    """Return the keys of every query of a resolved pattern in JSON types, as `key_intervals.js` reads them.

    The pattern is the union of the returned parts. A part with a short period has `rows`: for each remainder by the
    period, the ends of a query's intervals, relative to the query. Any other part has `ranges` of queries, within which
    the ends are constant or move with the query.

    Raises:
        TooManyIntervalsError: more than `most` intervals in all.
    """
    parts: list[dict[str, Any]] = []
    for member in pattern.members():
        if member.period is not None and member.period <= min(MAX_CLASSES, num_tokens):
            parts.append({"period": member.period, "rows": _relative_rows(member, member.period, num_tokens)})
        else:
            parts.append({"ranges": _ranges(member, num_tokens, most)})
        most -= _num_intervals(parts[-1])
        _check_room(most)
    return parts


def _relative_rows(pattern: Pattern, period: int, num_tokens: int) -> list[list[int]]:
    """Return, for each remainder by the period, the ends of a query's intervals, relative to the query."""
    # far enough from both ends of the axis that no key is cut off
    room = period * -(-2 * num_tokens // period)
    rows = []
    for query in range(room, room + period):
        intervals = pattern.key_intervals(query, query, 4 * room)
        near = ((start - query, stop - query) for start, stop in intervals)
        rows.append(
            [
                max(-num_tokens, min(end, num_tokens))
                for start, stop in near
                if start < num_tokens and stop > -num_tokens
                for end in (start, stop)
            ]
        )
    return rows


def _ranges(pattern: Pattern, num_tokens: int, most: int) -> list[list[Any]]:
    """Return [first query, last query, ends] for ranges of queries; a moving end is [at first query, at last query]."""
    found, todo, count = [], [(0, num_tokens - 1)], 0
    while todo:
        first, last = todo.pop()
        try:
            intervals = pattern.moving_intervals(first, last, num_tokens)
        except CrossingError:
            middle = (first + last) // 2
            todo += [(middle + 1, last), (first, middle)]
            continue
        ends = [end for interval in intervals for end in interval]
        found.append([first, last, [[end.first, end.last] if isinstance(end, Moving) else end for end in ends]])
        count += 1 + len(intervals)
        _check_room(most - count)
    return found


def _check_room(room: int) -> None:
    if room < 0:
        raise TooManyIntervalsError(
            f"The keys of this pattern, in all its layers and heads, form more than {MAX_INTERVALS:,} intervals, the "
            "most that a page can hold. Use fewer --tokens, --layers or --heads."
        )


def _num_intervals(part: dict[str, Any]) -> int:
    if "rows" in part:
        return sum(len(row) // 2 for row in part["rows"])
    return sum(1 + len(ends) // 2 for _, _, ends in part["ranges"])


def own_preset(own: Own, heads: int, tokens: int, device: str) -> dict[str, Any]:
    """Return what the page shows of the pattern of a user or a model, in JSON types.

    Raises:
        EfficientAttentionError: as in `preset`.
    """
    title, patterns, is_causal = own
    lines = [_expression(each, is_causal) for each in patterns]
    return preset(title, _tile(lines), is_causal, len(patterns), heads, tokens, device)


def our_presets(num_layers: int, num_heads: int, tokens: int, device: str) -> list[dict[str, Any]]:
    """Return `PRESETS` without those that the heads cannot share evenly, or that have too many intervals."""
    found = []
    for title, lines, is_causal in logging.tqdm(PRESETS, desc="patterns", unit="pattern", leave=False):
        if any(num_heads % parse_pattern(line).num_head_patterns for line in lines):
            continue
        try:
            found.append(preset(title, lines, is_causal, num_layers, num_heads, tokens, device))
        except TooManyIntervalsError:
            continue
    return found


def _expression(pattern: Pattern | None, is_causal: bool) -> str:
    """Return the expression of a pattern; None: the expression of dense attention."""
    return ("causal()" if is_causal else "full()") if pattern is None else write_expression(pattern)


def _tile(lines: Sequence[str]) -> list[str]:
    """Return the shortest beginning that gives all lines when it is repeated; the last repetition may be cut.

    >>> _tile("abab"), _tile("aba")
    (['a', 'b'], ['a', 'b'])
    """
    repeats = (size for size in range(1, len(lines) + 1) if all(lines[i] == lines[i % size] for i in range(len(lines))))
    return list(lines[: next(repeats)])


def explanations(pattern: Pattern, tokens: int, heads: int, device: str) -> list[dict[str, Any]]:
    """Return which backend computes a pattern and why, without and with gradients."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [
        _facts(explain(pattern, tokens, device=device, dtype=dtype, num_heads=heads, training=training), training)
        for training in (False, True)
    ]


def _facts(explanation: Explanation, training: bool) -> dict[str, Any]:
    inputs, layout = explanation.call.inputs, explanation.call.layout
    dtype = str(inputs.dtype).removeprefix("torch.")
    return {
        "setting": "training" if training else "inference",
        "call": f"{layout.num_heads} heads of width {inputs.head_dim}, {dtype} on {inputs.device}, one layer",
        "backend": explanation.backend,
        "cost": explanation.relative_cost,
        "baseline": explanation.baseline,
        "memory": f"{explanation.memory_bytes / MEBIBYTE:,.0f} MiB beyond q, k and v",
        "reasons": explanation.reasons,
    }
