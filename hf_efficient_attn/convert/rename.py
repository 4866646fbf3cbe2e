"""Apply a table of names to weights, in both directions."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hf_efficient_attn.convert.counterpart import Names

Weights = Mapping[str, Tensor]

# a name in a table stands for a module, or is a whole parameter name itself
SUFFIX = r"(?P<suffix>(?:\.(?:weight|bias))?)"


def to_ours(weights: Weights, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under our names, fused ones split, and the names that no table entry covers.

    >>> fused = {"layer.3.qkv.weight": torch.arange(6.0)}
    >>> to_ours(fused, {"layer.*.qkv": ("layers.*.q", "layers.*.k", "layers.*.v")})[0]["layers.3.v.weight"].tolist()
    [4.0, 5.0]
    """
    rules = {_compile(theirs): _several(ours) for theirs, ours in names.items()}
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in weights.items():
        match = _find(rules, name)
        if match is None:
            unknown.append(name)
            continue
        ours = rules[match.re]
        # a copy, so that no part keeps the fused tensor alive, and saving finds no shared storage
        parts = [tensor] if len(ours) == 1 else [part.clone() for part in tensor.chunk(len(ours))]
        renamed |= {_fill(target, match): part for target, part in zip(ours, parts, strict=True)}
    return renamed, unknown


def to_theirs(weights: Weights, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under their names, parts fused, and our names that no table entry covers."""
    rules = {
        _compile(ours): (theirs, place)
        for theirs, several in names.items()
        for place, ours in enumerate(_several(several))
    }
    parts: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for name, tensor in weights.items():
        match = _find(rules, name)
        if match is None:
            unknown.append(name)
            continue
        theirs, place = rules[match.re]
        parts.setdefault(_fill(theirs, match), {})[place] = tensor
    joined = {
        name: found[0] if len(found) == 1 else torch.cat([found[place] for place in sorted(found)])
        for name, found in parts.items()
    }
    return joined, unknown


def covers(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether one of the table's patterns stands for a parameter.

    >>> covers(("pooler.dense",), "pooler.dense.bias"), covers(("pooler",), "pooler.dense.bias")
    (True, False)
    """
    return any(_compile(pattern).fullmatch(name) for pattern in patterns)


def _find(rules: Iterable[re.Pattern[str]], name: str) -> re.Match[str] | None:
    return next((match for pattern in rules if (match := pattern.fullmatch(name))), None)


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)") + SUFFIX)


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _fill(name: str, match: re.Match[str]) -> str:
    numbers = iter(match.groups())
    return re.sub(r"\*", lambda _: str(next(numbers)), name) + match["suffix"]
