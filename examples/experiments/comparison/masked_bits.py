"""The picture of masked tokens before and after a model was made long."""

from typing import Any

from comparison.masked_text import BlockShape
from hf_efficient_attn.pictures import new_figure


def draw_bits(rows: list[dict[str, Any]], shape: BlockShape) -> Any:
    """Return bars, bits per character of each model, and lines, the same by place in the long block."""
    figure = new_figure(12, 4.5)
    bars, lines = figure.subplots(1, 2)
    names = [row["model"] for row in rows]
    bars.barh(names, [row["bits_per_character"] for row in rows], color=[f"C{place}" for place in range(len(rows))])
    bars.invert_yaxis()
    bars.set_xlabel("bits per character of masked tokens")
    starts = [place * (shape.short - 2) for place in range(shape.segments)]
    for row in rows:
        lines.plot(starts, row["bits_per_character_by_place"], marker="o", label=row["model"])
    lines.set_xlabel(f"place in the long block (tokens; groups of {shape.short - 2:,})")
    lines.set_ylabel("bits per character of masked tokens")
    return figure
