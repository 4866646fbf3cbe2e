"""Draw who may read whom under patterns, as text and as a picture.

The pattern is an expression, JSON, or a file with JSON, also the config.json of a model:
    hf-efficient-attn draw "band(4, 4) | global(0)" --tokens 24
    hf-efficient-attn draw path/to/config.json --layer 3 --png pattern.png
    hf-efficient-attn draw "band(4, 4)" "dilated(12, 12, 3)" "bigbird(4, 1)" --tokens 48 --png patterns.png
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.patterns.expressions import parse_pattern
from hf_efficient_attn.patterns.layers import patterns_per_layer
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.pictures import check_picture, new_figure, save_figure

PIXELS_PER_INCH = 180
COLOR = "#0072B2"
TITLE_LETTERS = 36
MAX_COLUMNS = 4
PANEL_INCHES = 2.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    text = "an expression such as 'band(4, 4) | global(0)', JSON, or a file with JSON"
    parser.add_argument("pattern", nargs="+", help=text)
    parser.add_argument("--tokens", type=int, default=32, help="length of the sequence in tokens (default %(default)s)")
    parser.add_argument("--layer", type=int, default=0, help="index of the layer, if layers differ (default 0)")
    parser.add_argument("--head", type=int, default=0, help="index of the head, if heads differ (default 0)")
    parser.add_argument("--causal", action="store_true", help="draw the causal form of the patterns")
    parser.add_argument(
        "--png", metavar="FILE", help="draw all patterns into one picture, FILE, instead of printing them"
    )
    parser.add_argument(
        "--titles", nargs="+", default=[], help="titles of the panels, one a pattern (default: the pattern as given)"
    )


def main(args: argparse.Namespace) -> None:
    """Print the patterns, or draw their picture."""
    ending = ", causal" if args.causal else ""
    titles = args.titles or [source + ending for source in args.pattern]
    if len(titles) != len(args.pattern):
        raise ConfigurationError(f"There are {len(args.pattern)} patterns but {len(titles)} titles; give one for each.")
    if args.png:
        # what could not be written is not drawn
        check_picture(args.png)
    elif args.titles:
        raise ConfigurationError("--titles are those of a picture: give --png, too.")
    drawings = {}
    for title, source in zip(titles, args.pattern, strict=True):
        pattern = read_pattern(source, args.layer)
        pattern = pattern.causal() if args.causal else pattern
        drawings[title] = pattern.draw(args.tokens, layer=args.layer, head=args.head)
    for text in () if args.png else drawings.values():
        print(f"{text}\n{density_line(text)}")
    if args.png:
        save_figure(patterns_figure(drawings), args.png, PIXELS_PER_INCH)
        print("\n".join(f"{title}: {density_line(text)}" for title, text in drawings.items()))
        print(f"Written: {args.png}")


def read_pattern(source: str, layer: int = 0) -> Pattern:
    """Return the pattern of a layer from an expression, from JSON text, or from a JSON file.

    JSON holds a pattern, or any other form of `attention_pattern`, or a config that has one.

    Raises:
        ConfigurationError: it is none of these, or the layer has no pattern.
    """
    if layer < 0:
        raise ConfigurationError(f"layer={layer} must be at least 0: layers are counted from 0.")
    patterns = read_layer_patterns(source, layer + 1)
    pattern = patterns[layer] if layer < len(patterns) else None
    if pattern is None:
        raise ConfigurationError(f"Layer {layer} has no pattern; layers are counted from 0 to {len(patterns) - 1}.")
    return pattern


def read_layer_patterns(source: str, num_layers: int) -> tuple[Pattern | None, ...]:
    """Return the patterns of all layers, as `read_pattern` reads them; None: the layer keeps its own attention.

    Args:
        num_layers: how many there are, where the source does not say it.

    Raises:
        ConfigurationError: as `read_pattern`.
    """
    if not source.endswith(".json") and Path(source).is_file():
        raise ConfigurationError(f"{source} is a file, but no .json. Give a file with JSON, or an expression.")
    text = _text_of_file(source) if source.endswith(".json") else source
    if not text.lstrip().startswith(("{", "[")):
        return (parse_pattern(text),) * num_layers
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{shown(source)} is no valid JSON, or nests too deep: {cut(str(error), 160, 40)}."
        ) from error
    if isinstance(data, dict) and ("attention_pattern" in data or "model_type" in data):
        if data.get("attention_pattern") is None:
            raise ConfigurationError(f"{shown(source)} is the config of a model without an attention_pattern.")
        num_layers = data.get("num_hidden_layers", num_layers)
        data = data["attention_pattern"]
    return patterns_per_layer(data, len(data) if isinstance(data, list) else num_layers)


def _text_of_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"There is no file {shown(path)} with text ({cut(str(error), 160, 40)}); give the path of a JSON file, or "
            "an expression."
        ) from error


def patterns_figure(drawings: Mapping[str, str]) -> Any:
    """Return the picture of what `Pattern.draw` returned.

    Args:
        drawings: title → drawing; each has a panel.

    Raises:
        ImportError: matplotlib is not installed.
    """
    num_columns = min(len(drawings), MAX_COLUMNS)
    num_rows = -(-len(drawings) // num_columns)
    figure = new_figure(PANEL_INCHES * num_columns, (PANEL_INCHES + 0.4) * num_rows)
    from matplotlib.colors import ListedColormap

    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, (title, text) in zip(axes, drawings.items(), strict=False):
        rows = [[sign == "■" for sign in line] for line in text.splitlines()]
        axis.imshow(rows, cmap=ListedColormap(["#FFFFFF", COLOR]), vmin=0, vmax=1, interpolation="none")
        axis.set_title(shorten(title, TITLE_LETTERS, placeholder=" …"), fontsize=10)
        axis.set_xlabel(f"key\n{density_line(text)}", fontsize=9)
        axis.set_ylabel("query", fontsize=9)
        axis.tick_params(labelsize=8)
    for axis in axes[len(drawings) :]:
        axis.set_axis_off()
    return figure


def density_line(text: str) -> str:
    """Return how many pairs a drawing allows.

    >>> density_line("■⬚\\n■■")
    '3 of 4 pairs, 75.0%'
    """
    num_pairs, num_allowed = text.count("■") + text.count("⬚"), text.count("■")
    return f"{num_allowed:,} of {num_pairs:,} pairs, {num_allowed / num_pairs:.1%}"
