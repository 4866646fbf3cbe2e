"""Patterns as short expressions, and the patterns of all layers in any form that `attention_pattern` may have."""

import ast
import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import and_, or_
from typing import Any, get_origin

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import check_kind, unknown_pattern, written_fields

# Patterns as short expressions, such as band(4, 4) | global(0). Whatever takes a pattern also takes an expression.


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {ast.BitOr: or_, ast.BitAnd: and_}
SHORT_NAMES = {"global_tokens": "global"}
SIGNS = {"union": "|", "intersection": "&", "complement": "~"}
# how deep lists, calls and operators may nest in an expression
MAX_EXPRESSION_DEPTH = 100


def parse_pattern(text: str) -> Pattern:
    """Return the pattern that an expression describes. The expression is never executed as Python.

    An expression may contain patterns by class (`Band`) or kind (`band`) with their arguments, `global(0, -1)`,
    `bigbird(...)`, the operators | & ~, parentheses, lists, integers, True, False, None, and strings.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> parse_pattern("band(4, right=0) | global(0)") == Band(4, 0) | GlobalTokens([0])
    True

    Raises:
        ConfigurationError: the expression contains anything else, or invalid values for a pattern.
    """
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{shown(text)} is not a pattern expression; write, for example, 'band(4, 4) | global(0)'."
        )
    # `global` is a keyword of Python; `global_` is a name
    source = re.sub(r"\bglobal\b", "global_", text.strip())
    try:
        tree = ast.parse(source, mode="eval")
        _check_depth(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(
            f"{shown(text)} is not a pattern expression, or is nested too deeply; write, for example, "
            "band(4, 4) | global(0)."
        ) from error
    pattern = _value(tree.body)
    if not isinstance(pattern, Pattern):
        raise ConfigurationError(f"{shown(text)} is not a pattern; write, for example, band(4, 4) | global(0).")
    return pattern


def pattern_of(given: Any) -> Any:
    """Return the pattern that an expression describes; anything but a string is returned unchanged.

    Raises:
        ConfigurationError: as in `parse_pattern`.
    """
    return parse_pattern(given) if isinstance(given, str) else given


def write_expression(pattern: Pattern) -> str:
    """Return a pattern as an expression for `parse_pattern`.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> write_expression((Band(4, 4) | GlobalTokens([0])) & ~Band(0, None))
    '(band(4, 4) | global([0])) & ~band(0, None)'

    Raises:
        ConfigurationError: its class has no kind.
    """
    check_kind(pattern)
    sign = SIGNS.get(pattern.kind)
    if sign is None:
        return f"{SHORT_NAMES.get(pattern.kind, pattern.kind)}({', '.join(_written_fields(pattern))})"
    parts = (f"({text})" if _joins(part) else text for part in pattern.parts if (text := write_expression(part)))
    return f"~{next(parts)}" if sign == "~" else f" {sign} ".join(parts)


def _joins(pattern: Pattern) -> bool:
    return SIGNS.get(pattern.kind, "~") != "~" and len(pattern.parts) > 1


def _written_fields(pattern: Pattern) -> Iterator[str]:
    """Yield the fields of a pattern as arguments; fields with a default by name, unless they have the default value."""
    for field in written_fields(pattern):
        value = getattr(pattern, field.name)
        if field.default is dataclasses.MISSING:
            yield _text_of(value)
        elif value != field.default:
            yield f"{field.name}={_text_of(value)}"


def _text_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text_of, value))}]"
    return write_expression(value) if isinstance(value, Pattern) else repr(value)


def _check_depth(tree: ast.AST) -> None:
    """Raise RecursionError for an expression nested deeper than any pattern."""
    level: list[ast.AST] = [tree]
    for _ in range(MAX_EXPRESSION_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise RecursionError(f"more than {MAX_EXPRESSION_DEPTH} brackets or operators deep")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_pattern(node.left), _pattern(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_pattern(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(entry) for entry in node.elts]
    try:
        constant = ast.literal_eval(node)
    except (ValueError, TypeError):
        constant = node
    if constant is None or isinstance(constant, int | str):
        return constant
    written = _written(node)
    if isinstance(node, ast.Name) and _factory(written) is None:
        raise unknown_pattern(written, _factories())
    factory = _factory(written)
    if factory is not None:
        needed = _signature(written, [argument for argument in _arguments(factory) if "=" not in argument])
        raise ConfigurationError(f"{shown(written)} is not a pattern by itself; write {needed}.")
    raise ConfigurationError(
        f"{shown(written)} is not allowed in a pattern expression; allowed are calls of patterns, | & ~, lists, "
        "integers, True, False, None and strings."
    )


def _pattern(node: ast.expr) -> Pattern:
    value = _value(node)
    if not isinstance(value, Pattern):
        raise ConfigurationError(
            f"{shown(_written(node))} is not a pattern; | & ~ combine patterns, such as band(4, 4)."
        )
    return value


def is_pattern_name(text: str) -> bool:
    """Return whether a text is only the name of a pattern, without the brackets that would make it an expression.

    >>> is_pattern_name("full"), is_pattern_name("full()")
    (True, False)
    """
    return _factory(text) is not None


def _factory(name: str) -> Callable[..., Pattern] | None:
    classes = {cls.__name__: cls for cls in Pattern.kinds.values()}
    return classes.get(name) or _factories().get(name.removesuffix("_"))


def _factories() -> dict[str, Callable[..., Pattern]]:
    return {**Pattern.kinds, "bigbird": bigbird, "global": _global}


def _call(node: ast.Call, name: str) -> Pattern:
    factory = _factory(name)
    if factory is None:
        raise unknown_pattern(name, _factories())
    arguments = [_value(argument) for argument in node.args]
    repeated = [name for name, count in Counter(keyword.arg for keyword in node.keywords).items() if count > 1]
    if repeated:
        raise ConfigurationError(f"{_written(node)} gives {shown(repeated[0])} twice; give it once.")
    options = {keyword.arg or "**": _value(keyword.value) for keyword in node.keywords}
    try:
        return factory(*arguments, **options)
    except TypeError as error:
        takes = _signature(name, _arguments(factory))
        raise ConfigurationError(f"{_written(node)} has wrong arguments; write {takes}.") from error


def _signature(name: str, arguments: Iterable[str]) -> str:
    return f"{name.removesuffix('_')}({', '.join(arguments)})"


def _written(node: ast.expr) -> str:
    """Return a part of an expression as it was written."""
    return cut(re.sub(r"\bglobal_\b", "global", ast.unparse(node)), 120, 30)


def _arguments(factory: Callable[..., Pattern]) -> Iterator[str]:
    """Yield the arguments of a pattern: their names, with brackets around lists, and their defaults."""
    for name, parameter in inspect.signature(GlobalTokens if factory is _global else factory).parameters.items():
        argument = f"[{name}, ...]" if get_origin(parameter.annotation) in (Sequence, tuple) else name
        yield argument if parameter.default is parameter.empty else f"{argument}={shown(parameter.default)}"


def _global(*positions: Any, **options: bool) -> Pattern:
    """Return global tokens; the positions are given one by one or as a list."""
    listed = positions[0] if len(positions) == 1 and isinstance(positions[0], list) else positions
    return GlobalTokens(listed, **options)


TILE_FIELDS = {"tile", "patterns"}


def patterns_per_layer(spec: Any, num_layers: int) -> tuple[Pattern | None, ...]:
    """Return the pattern of each layer; None: the layer keeps its own attention.

    Args:
        spec: one pattern, its expression or its dict for all layers; a list with one of these or None for each layer;
            or {"tile": "LLG", "patterns": {"L": ..., "G": ...}}, where the letters are repeated over the layers.
        num_layers: number of layers of the model.

    >>> tiled = {"tile": "LG", "patterns": {"L": {"kind": "band", "left": 8, "right": 8}, "G": {"kind": "full"}}}
    >>> patterns_per_layer(tiled, 3)
    (Band(left=8, right=8), Full(), Band(left=8, right=8))

    Raises:
        ConfigurationError: any other form, a list of another length, or a letter without a pattern.
    """
    if isinstance(spec, list | tuple):
        if len(spec) != num_layers:
            raise ConfigurationError(
                f"attention_pattern lists {len(spec)} patterns for {num_layers} layers; give one per layer, such as "
                "[pattern, None] * 2 for four layers, or a tile to repeat: "
                '{"tile": "LG", "patterns": {"L": ..., "G": ...}}.'
            )
        return tuple(map(_pattern_of_entry_or_none, spec))
    if _is_tiled(spec):
        patterns = _tiles(spec)
        return tuple(patterns[spec["tile"][layer % len(spec["tile"])]] for layer in range(num_layers))
    return (_pattern_of_entry(spec),) * num_layers


def layers_to_dict(spec: Any) -> Any:
    """Return a spec of `patterns_per_layer`, in any of its forms, in JSON types.

    Raises:
        ConfigurationError: any other form.
    """
    if isinstance(spec, list | tuple):
        return [_json(_pattern_of_entry_or_none(entry)) for entry in spec]
    if _is_tiled(spec):
        return {**spec, "patterns": {letter: _json(pattern) for letter, pattern in _tiles(spec).items()}}
    return _json(_pattern_of_entry(spec))


def _is_tiled(spec: Any) -> bool:
    return isinstance(spec, Mapping) and "kind" not in spec and bool(TILE_FIELDS & set(spec))


def _tiles(spec: Mapping[str, Any]) -> dict[str, Pattern | None]:
    """Return the pattern of each letter, after checking that every letter of the tile has one."""
    tile, patterns = spec.get("tile"), spec.get("patterns")
    if set(spec) != TILE_FIELDS or not (isinstance(tile, str) and tile) or not isinstance(patterns, Mapping):
        raise ConfigurationError(
            f'A tiled attention_pattern must be {{"tile": "LLG", "patterns": {{"L": ..., "G": ...}}}}, not '
            f"{shown(dict(spec))}."
        )
    missing = sorted(set(tile) - set(patterns))
    if missing:
        raise ConfigurationError(
            f"The tile {shown(tile)} uses {shown(missing[0])}, which has no pattern; add it to patterns."
        )
    return {letter: _pattern_of_entry_or_none(entry) for letter, entry in patterns.items()}


def _pattern_of_entry(entry: Any) -> Pattern:
    entry = pattern_of(entry)
    if not isinstance(entry, Pattern | Mapping):
        raise ConfigurationError(
            f"attention_pattern is {shown(entry)}; it must be a pattern such as Band(256, 256), an expression "
            "such as 'band(256, 256)', the dict that to_dict returns, a list with one of these per layer, or a tile."
        )
    if isinstance(entry, Mapping) and entry and "kind" not in entry:
        raise ConfigurationError(
            f"attention_pattern is a dict with the keys {shown([*entry])}. The dict of a pattern has a kind; other "
            'dicts have the keys "encoder" and "decoder" (encoder-decoders) or "tile" and "patterns". To give each '
            "layer its own pattern, give a list with a pattern or None for each layer."
        )
    return entry if isinstance(entry, Pattern) else Pattern.from_dict(entry)


def _pattern_of_entry_or_none(entry: Any) -> Pattern | None:
    return None if entry is None else _pattern_of_entry(entry)


def _json(pattern: Pattern | None) -> dict[str, Any] | None:
    return None if pattern is None else pattern.to_dict()
