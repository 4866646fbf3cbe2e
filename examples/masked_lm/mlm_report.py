"""What a run of `continue_mlm.py` leaves to read: a table, what it means, model cards, a picture."""

from pathlib import Path
from typing import Any

from shared.task_run import results_table, save_picture

from hf_efficient_attn.pictures import new_figure
from masked_lm.masked_text import BlockShape

COLUMNS = {
    "model": ("model", "{}"),
    "bits_per_character": ("bits per character", "{:.3f}"),
    "bits_per_masked_token": ("bits per masked token", "{:.3f}"),
    "train_seconds": ("further training (s)", "{:.0f}"),
}
USAGE = """from transformers import pipeline

fill = pipeline("fill-mask", model="{folder}")
print(fill(f"Return the {fill.tokenizer.mask_token} of the list.")[0]["token_str"])"""


def closing_text(content: dict[str, Any]) -> str:
    """Return the table and how it was measured."""
    return "\n\n".join(
        [
            results_table(COLUMNS, content["rows"]),
            f"The same {content['masked_tokens']:,} tokens are masked for all rows, of {content['held_out_tokens']:,} "
            f"held-out tokens; they spell {content['masked_characters']:,} characters. Before the first row the source "
            f"was trained for {content['source_steps']:,} steps of {content['source_tokens_per_step']:,} tokens; each "
            f"step of further training has {content['tokens_per_step']:,}. What long inputs are worth is the "
            "difference of the two rows with further training: both have read as many tokens of this text.",
        ]
    )


def model_card(text: str, result: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a model card that `saved_model.save_model` asks for."""
    return {
        "pipeline_tag": "fill-mask",
        "title": f"Masked language model: {result['model']}",
        "text": f"Trained by `examples/continue_mlm.py` on {text}. On held-out text of the same kind it needs "
        f"{result['bits_per_character']:.3f} bits per character of masked tokens.",
        "usage": USAGE,
        "limits": "A demonstration: a short training on one kind of text.",
    }


def draw_bits(rows: list[dict[str, Any]], shape: BlockShape, file: Path) -> None:
    """Write bars, bits per character of each model, and lines, the same by place in the long block."""
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
    save_picture(figure, file)
