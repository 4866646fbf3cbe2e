"""Draw who may read whom under patterns, as text and as a picture.

The pattern is an expression, JSON, or a file with JSON, or that of a layer of a saved model, of which the folder or the
config.json is given; a model says itself whether it is causal, and a layer without a pattern draws what it reads:
    hf-efficient-attn draw "band(4, 4) | global(0)" --tokens 24
    hf-efficient-attn draw path/to/model --layer 3 --png pattern.png
    hf-efficient-attn draw "band(4, 4)" "dilated(12, 12, 3)" "bigbird(4, 1)" --tokens 48 --png patterns.png
"""

import argparse
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from hf_efficient_attn.analysis.pattern_sources import read_config, read_pattern
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.integration.explain import layer_request
from hf_efficient_attn.integration.layer_patterns import PARTS
from hf_efficient_attn.patterns.serialization import check_length
from hf_efficient_attn.pictures import check_picture, new_figure, save_figure

PIXELS_PER_INCH = 180
COLOR = "#0072B2"
TITLE_LETTERS = 36
MAX_COLUMNS = 4
PANEL_INCHES = 2.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    text = "an expression such as 'band(4, 4) | global(0)', JSON, a file with JSON, or the folder of a saved model"
    parser.add_argument("pattern", nargs="+", help=text)
    parser.add_argument("--tokens", type=int, default=32, help="length of the sequence in tokens (default %(default)s)")
    parser.add_argument("--layer", type=int, default=0, help="index of the layer, if layers differ (default 0)")
    parser.add_argument("--head", type=int, default=0, help="index of the head, if heads differ (default 0)")
    parser.add_argument("--part", choices=sorted(PARTS), help="part of an encoder-decoder (default encoder)")
    parser.add_argument("--causal", action="store_true", help="draw the causal form of patterns")
    parser.add_argument(
        "--png", metavar="FILE", help="draw all patterns into one picture, FILE, instead of printing them"
    )
    parser.add_argument(
        "--titles", nargs="+", default=[], help="titles of the panels, one a pattern (default: the pattern as given)"
    )


def main(args: argparse.Namespace) -> None:
    """Print the patterns, or draw their picture."""
    ending = ", causal" if args.causal else ""
    check_length("--tokens", args.tokens)
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
        drawings[title] = drawn(source, args)
    for text in () if args.png else drawings.values():
        print(f"{text}\n{density_line(text)}")
    if args.png:
        save_figure(patterns_figure(drawings), args.png, PIXELS_PER_INCH)
        print("\n".join(f"{title}: {density_line(text)}" for title, text in drawings.items()))
        print(f"Written: {args.png}")


def drawn(source: str, args: argparse.Namespace) -> str:
    """Return the drawing of a pattern, or of what a layer of a saved model reads.

    Raises:
        EfficientAttentionError: no such pattern, model, layer or head, or options that do not belong to it.
    """
    config = read_config(source)
    if config is None:
        if args.part is not None:
            raise InputError(f"--part {args.part} is for models that are encoder-decoders; a pattern has no parts.")
        pattern = read_pattern(source, args.layer)
        pattern = pattern.causal() if args.causal else pattern
        return pattern.draw(args.tokens, layer=args.layer, head=args.head)
    if args.causal:
        raise InputError(f"--causal is for patterns; {source} is a model, which says itself whether it is causal.")
    request, _, _ = layer_request(config, args.layer, args.part, args.tokens)
    if not 0 <= args.head < request.num_heads:
        raise InputError(f"--head {args.head}: the layer has {request.num_heads} heads, counted from 0.")
    if request.chosen is not None:
        raise InputError(
            f"Layer {args.layer} of {source} chooses what it reads by what the tokens say, which a drawing without "
            "text cannot show. hf-efficient-attn explore --model shows it on a text."
        )
    return request.layer_spec.pattern.draw(args.tokens, layer=request.layer_spec.layer, head=args.head)


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
