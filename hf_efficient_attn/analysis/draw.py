"""Draw attention patterns: which keys each query attends to, in the terminal or as a picture.

    hf-efficient-attn draw "band(4, 4) | global(0)" --tokens 24
    hf-efficient-attn draw path/to/model --layer 3 --picture pattern.png
    hf-efficient-attn draw "band(4, 4)" "dilated(12, 12, 3)" "bigbird(4, 1)" --tokens 48 --picture patterns.png

A row is a query, a column is a key, and ■ is a pair that attention computes. The config of a model sets the heads and
whether attention is causal. If only some layers of a model are sparse, the first sparse layer is drawn; --layer draws
another one. Without --tokens, the sequence is long enough to show the shape of the pattern. If it is too long for the
width of the terminal, or for a picture, each ■ stands for a square of queries and keys, and at least one pair in it is
computed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from hf_efficient_attn.analysis.model_sources import label
from hf_efficient_attn.analysis.pattern_sources import PATTERN_OR_MODEL, read_config, read_pattern, refuse_misplaced
from hf_efficient_attn.attention.explanation import shown_pattern
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.integration.explain import layer_request
from hf_efficient_attn.integration.layer_patterns import PARTS
from hf_efficient_attn.patterns.bands import Strided
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.pattern import Pattern, drawn, own_classes
from hf_efficient_attn.patterns.serialization import check_length
from hf_efficient_attn.pictures import check_picture, new_figure, save_figure

PIXELS_PER_INCH = 180
COLOR = "#0072B2"
MAX_COLUMNS = 4
PANEL_INCHES = 2.8
MARGIN = 0.01
# letters per line, and lines of a title, so that it fits its panel
TITLE_LETTERS, TITLE_LINES = 30, 3
# the default length is at least this many times the reach of the pattern, and this many of its blocks
REACHES, BLOCKS = 4, 12
FEWEST_TOKENS, MOST_TOKENS = 32, 1 << 14
# signs per line in a picture, each at least a pixel wide, and if there is no terminal
PICTURE_SIGNS, SIGNS = 256, 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("pattern", nargs="+", metavar="PATTERN_OR_MODEL", help=PATTERN_OR_MODEL)
    text = "length of the sequence in tokens (default: enough to show the shape of the pattern)"
    parser.add_argument("--tokens", type=int, metavar="N", help=text)
    text = "layer to draw, counted from 0 (default: the first sparse layer of a model)"
    parser.add_argument("--layer", type=int, metavar="N", help=text)
    text = "head to draw, counted from 0, if heads differ (default %(default)s)"
    parser.add_argument("--head", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--part", choices=sorted(PARTS), help="part of an encoder-decoder (default encoder)")
    text = "draw the causal form of the patterns, which a decoder uses"
    parser.add_argument("--causal", action="store_true", help=text)
    text = "draw one picture with a panel for each pattern (.png, .svg or .pdf), instead of printing them"
    parser.add_argument("--picture", metavar="FILE", help=text)
    text = "titles of the panels, one for each pattern (default: the patterns)"
    parser.add_argument("--titles", nargs="+", default=[], metavar="TITLE", help=text)


@dataclass(frozen=True)
class Panel:
    """A pattern with its title, layer and head; `is_model`: whether it is the pattern of a saved model."""

    title: str
    pattern: Pattern
    layer: int
    head: int
    is_model: bool = False


@dataclass(frozen=True)
class Drawing:
    """The drawing of a pattern for `tokens` tokens; each sign stands for `step` queries and `step` keys."""

    panel: Panel
    tokens: int
    step: int

    @property
    def text(self) -> str:
        """A line of ■ and ⬚ for each query, or for each `step` queries."""
        return drawn(self.panel.pattern, self.tokens, None, self.panel.layer, self.panel.head, 0, self.step)

    @property
    def density(self) -> str:
        """The number and the share of allowed pairs, as text.

        >>> from hf_efficient_attn.patterns.bands import Causal
        >>> Drawing(Panel("", Causal(), 0, 0), 4, 1).density, Drawing(Panel("", Causal(), 0, 0), 4, 2).density
        ('10 of 16 pairs, 62.5%', '10 of 16 pairs, 62.5%; one ■ is 2 × 2 tokens')
        """
        pattern, head = self.panel.pattern, self.panel.head
        num_heads = pattern.num_head_patterns * (1 + head // pattern.num_head_patterns)
        resolved = pattern.resolve(self.tokens, self.panel.layer, head, num_heads)
        allowed, pairs = resolved.num_pairs(self.tokens, self.tokens), self.tokens**2
        signs = f"; one ■ is {self.step} × {self.step} tokens" if self.step > 1 else ""
        if allowed == pairs:
            signs += "; at this length every query attends to every key"
        return f"{allowed:,} of {pairs:,} pairs, {allowed / pairs:.1%}{signs}"


def main(args: argparse.Namespace) -> None:
    """Print the patterns, or draw their picture.

    Raises:
        EfficientAttentionError: an unknown pattern, model, layer or head, options that do not apply to it, or a picture
            that cannot be written.
    """
    if args.tokens is not None:
        check_length("--tokens", args.tokens)
    if args.titles and len(args.titles) != len(args.pattern):
        raise ConfigurationError(
            f"There are {len(args.pattern)} patterns but {len(args.titles)} titles; give one for each pattern."
        )
    if args.picture:
        # fail before anything is drawn
        check_picture(args.picture)
    elif args.titles:
        raise ConfigurationError("--titles apply only to a picture. Add --picture FILE.")
    panels = [panel_of(source, args) for source in args.pattern]
    signs = PICTURE_SIGNS if args.picture else get_terminal_size((SIGNS, 0)).columns
    lengths = [args.tokens or default_tokens(panel.pattern) for panel in panels]
    # if --tokens is given, every pair has its own sign in the terminal; a picture has too few pixels for that
    steps = [1 if args.tokens and not args.picture else -(-tokens // signs) for tokens in lengths]
    drawings = [Drawing(*each) for each in zip(panels, lengths, steps, strict=True)]
    if args.picture:
        titles = args.titles or [panel.title for panel in panels]
        save_figure(patterns_figure(drawings, titles), args.picture, PIXELS_PER_INCH)
        print(*(f"{title}: {each.density}" for title, each in zip(titles, drawings, strict=True)), sep="\n")
        print(f"Written: {args.picture}")
        return
    for each in drawings:
        title = f"{each.panel.title}: " if each.panel.is_model or len(drawings) > 1 else ""
        print(f"{each.text}\n{title}{each.density}")


def panel_of(source: str, args: argparse.Namespace) -> Panel:
    """Return the panel of a pattern, or of a layer of a saved model.

    Raises:
        EfficientAttentionError: an unknown pattern, model, layer or head, or options that do not apply to it.
    """
    config = read_config(source)
    refuse_misplaced(source, config, args.part, args.causal)
    if config is None:
        pattern = read_pattern(source, args.layer or 0)
        pattern = pattern.causal() if args.causal else pattern
        return Panel(f"{source}{', causal' * args.causal}", pattern, args.layer or 0, args.head)
    request, _, numbered = layer_request(config, args.layer, args.part, args.tokens or FEWEST_TOKENS)
    layer = args.layer
    if layer is None:
        layer = next(index for index, each in numbered.items() if each.layer_spec is request.layer_spec)
    if not 0 <= args.head < request.num_heads:
        raise InputError(f"--head {args.head}: the layer has the heads 0 to {request.num_heads - 1}.")
    if request.chosen is not None:
        raise InputError(
            f"Layer {layer} of {source} selects keys by content, so what it attends to depends on the text. "
            f"hf-efficient-attn explore --model {source} --text FILE shows it."
        )
    pattern = request.layer_spec.pattern
    head = f", head {args.head}" if pattern.num_head_patterns > 1 or pattern.is_random else ""
    part = f" of the {request.part}" if config.get_text_config().is_encoder_decoder else ""
    title = f"{label(source)}, layer {layer}{part}{head}: {shown_pattern(pattern)}"
    return Panel(title, pattern, request.layer_spec.layer, args.head, is_model=True)


def default_tokens(pattern: Pattern) -> int:
    """Return a length that shows the shape of a pattern: some of its reaches, steps and blocks, all global positions.

    >>> from hf_efficient_attn.patterns import Band, BlockLocal, Full, GlobalTokens
    >>> [default_tokens(each) for each in (Full(), Band(16, 16), Band(500, 0) | GlobalTokens([0]), BlockLocal(8))]
    [32, 64, 2000, 96]
    >>> default_tokens(Strided(64)), default_tokens(RandomBlocks(3, 64))
    (256, 768)
    """
    reaches = [reach.left or 0 for each in pattern.atoms() if (reach := each.decoding_reach()) is not None]
    # nothing else is known of a class from outside this package
    own = [vars(each).values() for each in pattern.atoms() if type(each) in own_classes(pattern)]
    reaches += [value for values in own for value in values if isinstance(value, int)]
    steps = [each.step for each in pattern.atoms() if isinstance(each, Strided)]
    blocks = [each.block_tokens for each in pattern.atoms() if isinstance(each, RandomBlocks)]
    if pattern.granularity > 1:
        blocks.append(pattern.granularity)
    shown = max(FEWEST_TOKENS, REACHES * max(reaches + steps, default=0), BLOCKS * max(blocks, default=0))
    tokens = min(shown, MOST_TOKENS)
    while tokens < MOST_TOKENS and not all(named.is_within(tokens) for named in pattern.global_positions()):
        tokens *= 2
    return pattern.fitting_length(tokens)


def patterns_figure(drawings: Sequence[Drawing], titles: Sequence[str]) -> Any:
    """Return a picture with a panel for each drawing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    num_columns = min(len(drawings), MAX_COLUMNS)
    num_rows = -(-len(drawings) // num_columns)
    titles = ["\n".join(wrap(each, TITLE_LETTERS, max_lines=TITLE_LINES, placeholder=" …")) for each in titles]
    title_lines = max(title.count("\n") + 1 for title in titles)
    figure = new_figure(PANEL_INCHES * num_columns, (PANEL_INCHES + 0.3 + 0.15 * title_lines) * num_rows)
    from matplotlib.colors import ListedColormap

    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, title, each in zip(axes, titles, drawings, strict=False):
        rows = [[sign == "■" for sign in line] for line in each.text.splitlines()]
        extent = (-0.5, each.tokens - 0.5, each.tokens - 0.5, -0.5)
        colors = ListedColormap(["#FFFFFF", COLOR])
        axis.imshow(rows, cmap=colors, vmin=0, vmax=1, interpolation="none", extent=extent)
        # between the pairs and the frame, which would hide the first tokens
        axis.use_sticky_edges = False
        axis.margins(MARGIN)
        axis.set_title(title, fontsize=9)
        lines = (line for part in each.density.split("; ") for line in wrap(part, TITLE_LETTERS))
        axis.set_xlabel("\n".join(["key", *lines]), fontsize=9)
        axis.set_ylabel("query", fontsize=9)
        axis.tick_params(labelsize=8)
    for axis in axes[len(drawings) :]:
        axis.set_axis_off()
    return figure
