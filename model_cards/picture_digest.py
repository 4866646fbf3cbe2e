"""A digest of what a picture shows, kept in its PNG, so that `figures.py --check` notices when data and it part."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator
from PIL import Image

KEY = "Digest of the content"
# floating-point sums may differ between processors in their last digits
DIGITS = 6


def save(figure: Figure, file: Path, pixels_per_inch: int) -> None:
    """Write a figure with its digest."""
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=pixels_per_inch, metadata={KEY: digest(figure)})


def saved_digest(file: Path) -> str | None:
    """Return the digest that a picture was saved with."""
    with Image.open(file) as picture:
        return picture.info.get(KEY)


def digest(figure: Figure) -> str:
    """Return the digest of a figure that was not drawn yet: its size and all that `content` yields."""
    parts = [list(figure.get_size_inches()), *content(figure)]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def content(figure: Figure) -> Iterator[Any]:
    """Yield the texts, lines, bars, areas and images of a figure in JSON types, not what matplotlib adds by itself."""
    for text in (*figure.texts, *_texts(figure.legends)):
        yield _text(text)
    for panel in figure.axes:
        yield [panel.get_title(), panel.get_xlabel(), panel.get_ylabel(), panel.get_xscale(), panel.get_yscale()]
        yield [_fixed_ticks(axis) for axis in (panel.xaxis, panel.yaxis)]
        yield from _artists(panel)


def _artists(panel: Axes) -> Iterator[Any]:
    for line in panel.lines:
        style = [line.get_linestyle(), line.get_marker(), line.get_linewidth(), line.get_markersize()]
        yield ["line", _numbers(line.get_xydata()), to_hex(line.get_color()), style, _named(line.get_label())]
    for patch in panel.patches:
        path = patch.get_patch_transform().transform(patch.get_path().vertices)
        colors = [to_hex(patch.get_facecolor(), keep_alpha=True), to_hex(patch.get_edgecolor(), keep_alpha=True)]
        yield ["patch", _numbers(path), colors, patch.get_hatch(), _named(patch.get_label())]
    for collection in panel.collections:
        yield ["collection", [_numbers(path.vertices) for path in collection.get_paths()]]
        yield [to_hex(color, keep_alpha=True) for color in collection.get_facecolor()]
    for image in panel.images:
        yield ["image", _numbers(image.get_array()), _numbers(image.cmap([0.0, 0.5, 1.0]))]
    for text in (*panel.texts, *_texts([panel.get_legend()])):
        yield _text(text)


def _text(text: Text) -> list[Any]:
    return ["text", text.get_text(), to_hex(text.get_color()), text.get_fontsize(), _numbers(text.get_position())]


def _texts(legends: list[Legend | None]) -> list[Text]:
    return [text for legend in legends if legend is not None for text in legend.get_texts()]


def _fixed_ticks(axis: Any) -> list[Any]:
    locator, formatter = axis.get_major_locator(), axis.get_major_formatter()
    places = _numbers(locator.locs) if isinstance(locator, FixedLocator) else None
    return [places, list(formatter.seq) if isinstance(formatter, FixedFormatter) else None]


def _named(label: Any) -> str | None:
    """Return a label, unless matplotlib made it up."""
    return None if str(label).startswith("_") else str(label)


def _numbers(values: Any) -> Any:
    """Return numbers in nested lists, rounded."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [_numbers(value) for value in values]
    return float(f"{float(values):.{DIGITS}g}")
