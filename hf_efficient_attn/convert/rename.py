"""Apply a table of names to weights, in both directions."""

import re
from collections.abc import Collection, Iterable, Mapping

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
    matches = _matches(rules, weights)
    renamed: dict[str, Tensor] = {}
    for name, match in matches.items():
        tensor, ours = weights[name], rules[match.re]
        # a copy, so that no part keeps the fused tensor alive, and saving finds no shared storage
        parts = [tensor] if len(ours) == 1 else [part.clone() for part in tensor.chunk(len(ours))]
        renamed |= {_fill(target, match): part for target, part in zip(ours, parts, strict=True)}
    return renamed, [name for name in weights if name not in matches]


def to_theirs(weights: Weights, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under their names, parts fused, and our names that no table entry covers."""
    rules = {
        _compile(ours): (theirs, place)
        for theirs, several in names.items()
        for place, ours in enumerate(_several(several))
    }
    matches = _matches(rules, weights)
    parts: dict[str, dict[int, Tensor]] = {}
    for name, match in matches.items():
        theirs, place = rules[match.re]
        parts.setdefault(_fill(theirs, match), {})[place] = weights[name]
    joined = {
        name: found[0] if len(found) == 1 else torch.cat([found[place] for place in sorted(found)])
        for name, found in parts.items()
    }
    return joined, [name for name in weights if name not in matches]


def covers(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether one of the table's patterns stands for a parameter.

    >>> covers(("pooler.dense",), "pooler.dense.bias"), covers(("pooler",), "pooler.dense.bias")
    (True, False)
    """
    return any(_compile(pattern).fullmatch(name) for pattern in patterns)


def original_of(name: str, doubled: Mapping[str, str]) -> str | None:
    """Return the parameter of which another one starts as a copy, by a table of modules; None: of none.

    >>> original_of("layers.3.global.weight", {"layers.*.global": "layers.*.local"})
    'layers.3.local.weight'
    """
    rules = {_compile(copy): original for copy, original in doubled.items()}
    match = _matches(rules, [name]).get(name)
    return None if match is None else _fill(rules[match.re], match)


def _matches(rules: Collection[re.Pattern[str]], names: Iterable[str]) -> dict[str, re.Match[str]]:
    """Return, for each name that a rule covers, its match by the first such rule."""
    found = ((name, next((match for rule in rules if (match := rule.fullmatch(name))), None)) for name in names)
    return {name: match for name, match in found if match}


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)") + SUFFIX)


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _fill(name: str, match: re.Match[str]) -> str:
    numbers = iter(match.groups())
    return re.sub(r"\*", lambda _: str(next(numbers)), name) + match["suffix"]
