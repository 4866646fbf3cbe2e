"""ROUGE of several systems, over all documents and by their length."""

from pathlib import Path
from typing import Any

from shared.task_run import results_table, save_picture

from hf_efficient_attn.pictures import new_figure
from seq2seq.seq2seq_task import load_metric

COLUMNS = {
    "system": ("summary", "{}"),
    "rouge1": ("ROUGE-1", "{:.3f}"),
    "rouge2": ("ROUGE-2", "{:.3f}"),
    "rougeL": ("ROUGE-L", "{:.3f}"),
    "num_different": ("different texts", "{:,}"),
    "parameters": ("parameters", "{:,}"),
    "train_seconds": ("training (s)", "{:.0f}"),
    "longest_source_tokens": ("longest source (tokens)", "{:,}"),
    "training_step_peak_mb": ("memory of its step (MB)", "{:,.0f}"),
}
# upper ends of the groups of documents in tokens; the last has none
BORDERS = (512, 1024, 2048)


def mean_rouge(written: list[str], wanted: list[str]) -> dict[str, float]:
    """Return the mean ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1."""
    return dict(load_metric("rouge_scores").compute(predictions=written, references=wanted))


def rouge_by_length(systems: dict[str, list[str]], wanted: list[str], lengths: list[int]) -> list[dict[str, Any]]:
    """Return, for each group of documents of alike length, their number and the ROUGE-L of each system.

    Args:
        systems: name → a summary a document.
        lengths: tokens of each document.
    """
    groups = []
    for least, border in zip((0, *BORDERS), (*BORDERS, None), strict=True):
        places = [place for place, length in enumerate(lengths) if least < length <= (border or length)]
        if not places:
            continue
        true = [wanted[place] for place in places]
        scores = {
            name: mean_rouge([written[place] for place in places], true)["rougeL"] for name, written in systems.items()
        }
        title = f"up to {border:,}" if border else f"more than {least:,}"
        groups.append({"tokens": title, "documents": len(places), "rougeL": scores})
    return groups


def length_table(groups: list[dict[str, Any]]) -> str:
    """Return ROUGE-L by length of the document as a Markdown table."""
    columns = {"tokens": ("ROUGE-L of documents of … tokens", "{}"), "documents": ("documents", "{}")}
    columns |= {name: (name, "{:.3f}") for name in groups[0]["rougeL"]}
    return results_table(columns, [{**group, **group["rougeL"]} for group in groups])


def verdict(baseline: dict[str, Any], models: list[dict[str, Any]]) -> list[str]:
    """Return a sentence if no model's ROUGE-L is above that of the summaries that take no model."""
    if max(model["rougeL"] for model in models) > baseline["rougeL"]:
        return []
    return [
        f"No model here writes better summaries than {baseline['system']}: this run says nothing about what reading "
        "more of a document is worth. Train longer by --max_steps."
    ]


def draw_rouge_by_length(groups: list[dict[str, Any]], file: Path) -> None:
    """Write bars: ROUGE-L of each system in each group of documents."""
    figure = new_figure(8, 4.5)
    panel = figure.subplots()
    systems = list(groups[0]["rougeL"])
    width = 0.8 / len(systems)
    for place, name in enumerate(systems):
        left = [group + width * (place - (len(systems) - 1) / 2) for group in range(len(groups))]
        panel.bar(left, [group["rougeL"][name] for group in groups], width, label=name)
    panel.set_xticks(range(len(groups)), [f"{group['tokens']}\n({group['documents']} documents)" for group in groups])
    panel.set_xlabel("tokens of the document")
    panel.set_ylabel("ROUGE-L")
    panel.legend()
    save_picture(figure, file)
