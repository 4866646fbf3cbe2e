"""The small pictures in the README's table of families, for `figures.py`."""

from collections.abc import Sequence
from math import cos, pi, sin
from random import Random
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from hf_efficient_attn.analysis.draw import COLOR
from hf_efficient_attn.analysis.pattern_sources import read_pattern
from hf_efficient_attn.analysis.span_report import SpanReport
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree, extent_of
from hf_efficient_attn.pictures import new_figure

# twice what a cell shows: 320 by 200 pixels
WIDTH_INCHES, HEIGHT_INCHES = 3.2, 2.0
LETTERS = 13
SMALL_LETTERS = 11
NUM_TOKENS = 32
CHUNK_TOKENS = 6
WHITE, GREY, GREEN, ORANGE, PURPLE = "#FFFFFF", "#BBBBBB", "#009E73", "#D55E00", "#CC79A7"


def sparse_transformer() -> Figure:
    """Return Longformer's pattern and BigBird's."""
    figure, (left, right) = _panels(2)
    _draw_pattern(left, "Longformer", "band(3, 3) | global(0)", COLOR)
    _draw_pattern(right, "BigBird", "bigbird(2, 1)", COLOR)
    return figure


def sparse_seq2seq() -> Figure:
    """Return the three attention maps of an encoder-decoder: queries are rows, of source above target, keys columns."""
    num_target = NUM_TOKENS // 2
    encoder = _rows("band(3, 3) | global(0)", NUM_TOKENS)
    decoder = _rows("causal()", num_target)
    above = [[int(reads) for reads in row] + [0] * num_target for row in encoder]
    below = [[2] * NUM_TOKENS + [3 if reads else 0 for reads in row] for row in decoder]
    figure, (panel,) = _panels(1)
    panel.imshow(above + below, cmap=ListedColormap([WHITE, COLOR, ORANGE, GREEN]), vmin=0, vmax=3, aspect="auto")
    panel.axhline(NUM_TOKENS - 0.5, color="black", linewidth=1)
    panel.axvline(NUM_TOKENS - 0.5, color="black", linewidth=1)
    style = {"fontsize": LETTERS, "ha": "center", "va": "center"}
    panel.text(NUM_TOKENS * 0.75, NUM_TOKENS * 0.2, "encoder", color=COLOR, **style)
    panel.text(NUM_TOKENS * 0.5, NUM_TOKENS + num_target * 0.45, "cross", color=WHITE, **style)
    panel.text(NUM_TOKENS + num_target * 0.5, NUM_TOKENS * 0.8, "decoder", color=GREEN, **style)
    return figure


def adaptive_span(report: SpanReport) -> Figure:
    """Return the bands of the heads of one layer, that of the longest head, as they were learned."""
    layer = report.layers[report.longest.layer]
    num_shown = max(layer.keys) * 5 // 4
    shades = LinearSegmentedColormap.from_list("mask", [WHITE, COLOR])
    figure, panels = _panels(len(layer.spans))
    for panel, span, keys in zip(panels, sorted(layer.spans), sorted(layer.keys), strict=True):
        rows = [
            [_mask(query - key, span, report.ramp) for key in range(0, num_shown, 4)]
            for query in range(0, num_shown, 4)
        ]
        panel.imshow(rows, cmap=shades, vmin=0, vmax=1, aspect="auto")
        panel.set_title(f"{keys:,} keys", fontsize=SMALL_LETTERS)
    return figure


def simplified_transformer() -> Figure:
    """Return the standard block and SAS-P: no skip, no second norm, no matrices of values and projections."""
    figure, (left, right) = _panels(2)
    left.set_title("standard", fontsize=LETTERS)
    right.set_title("SAS-P", fontsize=LETTERS)
    for panel in (left, right):
        panel.set(xlim=(0, 10), ylim=(0, 10))
        panel.set_axis_off()
    for bottom in (0.4, 5.2):
        left.plot([5.8, 5.8], [bottom, bottom + 4.6], color="black", linewidth=1.2, zorder=0)
        left.plot([5.8, 0.9, 0.9, 5.8], [bottom, bottom, bottom + 4, bottom + 4], color="black", linewidth=1.2)
        _draw_box(left, 2.0, bottom + 0.5, 7.6, "norm", GREY)
        _draw_box(left, 2.0, bottom + 2.1, 7.6, "attention" if bottom < 5 else "MLP", COLOR if bottom < 5 else GREEN)
        left.plot([5.8], [bottom + 4], "o", color="black", markersize=5)
    right.plot([5, 5], [0.4, 3.4], color="black", linewidth=1.2, zorder=0)
    right.plot([2.4, 2.4, 7.9, 7.9, 2.4], [3.4, 7.6, 7.6, 3.4, 3.4], color="black", linewidth=1.2, zorder=0)
    right.plot([5, 5], [7.6, 9.8], color="black", linewidth=1.2)
    right.plot([5], [7.6], "o", color="black", markersize=5)
    _draw_box(right, 1.2, 1.3, 7.6, "norm", GREY)
    _draw_box(right, 0.0, 4.8, 4.8, "attn.", COLOR)
    _draw_box(right, 5.5, 4.8, 4.4, "MLP", GREEN)
    return figure


def efficient_reformer() -> Figure:
    """Return what tokens of four buckets read in the order of the text, and sorted by bucket, in chunks of six."""
    buckets = _drawn(4)
    order = sorted(range(NUM_TOKENS), key=lambda token: (buckets[token], token))
    places = {token: place for place, token in enumerate(order)}
    reads = [
        [0 <= places[query] // CHUNK_TOKENS - places[key] // CHUNK_TOKENS <= 1 for key in range(NUM_TOKENS)]
        for query in range(NUM_TOKENS)
    ]
    figure, (left, right) = _panels(2)
    for panel, title, shown in ((left, "text", range(NUM_TOKENS)), (right, "sorted by hash", order)):
        colors = [[1 + buckets[key] if reads[query][key] else 0 for key in shown] for query in shown]
        _draw_groups(panel, title, colors)
    return figure


def routing_transformer() -> Figure:
    """Return a local head, and one that reads the tokens of its own cluster, of which there are four."""
    clusters = _drawn(4)
    figure, (left, right) = _panels(2)
    _draw_pattern(left, "local head", "band(6, 0)", COLOR)
    colors = [
        [1 + clusters[key] if key <= query and clusters[key] == clusters[query] else 0 for key in range(NUM_TOKENS)]
        for query in range(NUM_TOKENS)
    ]
    _draw_groups(right, "routing head", colors)
    return figure


def star_transformer() -> Figure:
    """Return a ring of tokens around a relay, and what the relay, the first row, and the tokens read of each other."""
    num_shown = 10
    figure, (left, right) = _panels(2)
    places = [(sin(2 * pi * token / num_shown), cos(2 * pi * token / num_shown)) for token in range(num_shown)]
    for (x, y), (next_x, next_y) in zip(places, places[1:] + places[:1], strict=True):
        left.plot([x, next_x], [y, next_y], color=COLOR, linewidth=1.5, zorder=0)
        left.plot([x, 0], [y, 0], color=ORANGE, linewidth=1, zorder=0)
    left.scatter(*zip(*places, strict=True), color=COLOR, s=45)
    left.scatter([0], [0], color=ORANGE, s=160)
    left.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    left.set_axis_off()
    left.set_title("ring and relay", fontsize=LETTERS)
    ring = [[2] * (NUM_TOKENS + 1)]
    for query in range(NUM_TOKENS):
        near = [int((query - key) % NUM_TOKENS in (0, 1, NUM_TOKENS - 1)) for key in range(NUM_TOKENS)]
        ring.append([2, *near])
    right.imshow(ring, cmap=ListedColormap([WHITE, COLOR, ORANGE]), vmin=0, vmax=2)
    right.set_title("who reads whom", fontsize=LETTERS)
    return figure


def etc_transformer() -> Figure:
    """Return who reads whom, global tokens first, and which long tokens belong to which global token."""
    num_global, radius = 6, 3
    num_long = NUM_TOKENS - num_global
    owners = [0] * 3 + [1] * 6 + [2] * 4 + [3] * 7 + [4] * 2 + [5] * 4
    rows = []
    for query in range(NUM_TOKENS):
        row = []
        for key in range(NUM_TOKENS):
            if query >= num_global and key >= num_global:
                row.append(int(abs(query - key) <= radius))
            elif query < num_global and key < num_global:
                row.append(3)
            else:
                number, token = min(query, key), max(query, key) - num_global
                row.append(3 if owners[token] == number else 2)
        rows.append(row)
    figure, (panel,) = _panels(1)
    light = "#F2C9A8"
    panel.imshow(rows, cmap=ListedColormap([WHITE, COLOR, light, ORANGE]), vmin=0, vmax=3, aspect="auto")
    for draw in (panel.axhline, panel.axvline):
        draw(num_global - 0.5, color="black", linewidth=1)
    style = {"fontsize": LETTERS, "ha": "center", "va": "center"}
    panel.text(num_global + num_long * 0.74, num_global + num_long * 0.25, "long", color=COLOR, **style)
    panel.set_title("global tokens, and a band", fontsize=LETTERS)
    return figure


def bp_transformer() -> Figure:
    """Return the nodes that one token reads, size by size, and which token reads which in spans of what size."""
    tree = InterleavedSpanTree(1, num_tokens=NUM_TOKENS)
    figure, (left, right) = _panels(2)
    levels = NUM_TOKENS.bit_length() - 1
    reads = [[0] * NUM_TOKENS for _ in range(NUM_TOKENS)]
    shown = NUM_TOKENS // 2 - 3
    for query in range(NUM_TOKENS):
        for start, stop in tree.key_intervals(2 * query, 2 * query, 2 * NUM_TOKENS):
            for node in range(start, stop):
                first, size = extent_of(node)
                reads[query][first : first + size] = [size.bit_length()] * size
                if query == shown:
                    color = ORANGE if first == shown else _shades()(size.bit_length() / (levels + 1))
                    left.broken_barh([(first + 0.1, size - 0.2)], (size.bit_length() - 0.9, 0.8), facecolors=color)
    left.set(xlim=(0, NUM_TOKENS), ylim=(-0.5, levels - 0.5))
    left.set_axis_off()
    left.set_title("one token", fontsize=LETTERS)
    right.imshow(reads, cmap=_shades(), vmin=0, vmax=levels + 1)
    right.set_title("every token", fontsize=LETTERS)
    return figure


def compressed_transformer() -> Figure:
    """Return tokens that read all keys, and tokens that read the few keys to which the text is projected."""
    num_slots = 6
    figure, (left, right) = _panels(2, ratios=(NUM_TOKENS, num_slots * 2))
    _draw_groups(left, "all keys", [[1] * NUM_TOKENS] * NUM_TOKENS)
    _draw_groups(right, "k keys", [[2] * num_slots] * NUM_TOKENS)
    for panel, count in ((left, NUM_TOKENS), (right, num_slots)):
        panel.set_aspect("auto")
        for draw, lines in ((panel.axvline, count), (panel.axhline, NUM_TOKENS)):
            for place in range(1, lines):
                draw(place - 0.5, color=WHITE, linewidth=0.6)
    return figure


def any_model() -> Figure:
    """Return what `sparsify` changes: a decoder's attention to everything before becomes a band and first tokens."""
    figure, (left, middle, right) = _panels(3, ratios=(5, 1, 5))
    _draw_pattern(left, "yours", "causal()", GREY)
    _draw_pattern(right, "sparsified", "(band(6, 0) | global(0, 1)) & causal()", COLOR)
    middle.plot([0, 1], [0, 0], color="black", linewidth=2)
    middle.plot([1], [0], ">", color="black", markersize=9)
    middle.set(xlim=(-0.2, 1.3), ylim=(-1, 1))
    middle.set_axis_off()
    return figure


def _panels(num_panels: int, ratios: Sequence[int] | None = None) -> tuple[Figure, Sequence[Axes]]:
    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
    panels = figure.subplots(1, num_panels, squeeze=False, width_ratios=ratios)[0]
    for panel in panels:
        panel.set_xticks([])
        panel.set_yticks([])
    return figure, panels


def _shades() -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list("sizes", [COLOR, WHITE])


def _drawn(num_groups: int) -> list[int]:
    """Return the group of each token, as if content had chosen it."""
    draw = Random(1)
    return [draw.randrange(num_groups) for _ in range(NUM_TOKENS)]


def _draw_groups(panel: Axes, title: str, colors: list[list[int]]) -> None:
    panel.imshow(colors, cmap=ListedColormap([WHITE, COLOR, ORANGE, GREEN, PURPLE]), vmin=0, vmax=4)
    panel.set_title(title, fontsize=LETTERS)


def _draw_pattern(panel: Axes, title: str, expression: str, color: str) -> None:
    panel.imshow(_rows(expression, NUM_TOKENS), cmap=ListedColormap([WHITE, color]), vmin=0, vmax=1)
    panel.set_title(title, fontsize=LETTERS)


def _rows(expression: str, num_tokens: int) -> list[list[bool]]:
    return [[sign == "■" for sign in line] for line in read_pattern(expression).draw(num_tokens).splitlines()]


def _mask(distance: int, span: float, ramp: int) -> float:
    """Return how much of a key a head with a span reads: all of it, then less along the ramp; nothing ahead."""
    return min(1.0, max(0.0, (ramp + span - distance) / ramp)) if distance >= 0 else 0.0


def _draw_box(panel: Axes, left: float, bottom: float, width: float, text: str, color: str) -> None:
    style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.4", "facecolor": color, "edgecolor": "none"}
    panel.add_patch(FancyBboxPatch((left, bottom), width, 1.3, **style))
    letters = "black" if color == GREY else WHITE
    panel.text(left + width / 2, bottom + 0.6, text, fontsize=SMALL_LETTERS, ha="center", va="center", color=letters)
