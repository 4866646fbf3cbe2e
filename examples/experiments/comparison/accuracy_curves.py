"""The picture of compared document lengths."""

import re
from typing import Any

from comparison.timed_training import smoothed
from hf_efficient_attn.pictures import new_figure

COLORS = {"sparse": "C0", "dense": "C1"}
TITLES = {"accuracy": "the test documents", "accuracy_long": "the long ones among them"}


def draw_scores(content: dict[str, Any]) -> Any:
    """Return a figure: loss by training time, and accuracy by tokens read, on all documents and on the long ones."""
    names = [name for name in TITLES if name in content["most_frequent_class"]]
    figure = new_figure(5.5 * (1 + len(names)), 4.5)
    losses, *panels = figure.subplots(1, 1 + len(names))
    for kind, results in content["seeds"].items():
        for result in results:
            losses.plot(
                *smoothed(result["losses"]), color=COLORS[kind], alpha=0.7, label=kind if result is results[0] else None
            )
    losses.set_xlabel("training time (s)")
    losses.set_ylabel("training loss (nats), smoothed")
    losses.legend()

    for panel, name in zip(panels, names, strict=True):
        _draw_accuracy(panel, content, name)
    figure.suptitle("Equal shape, equal training time: a sparse encoder of documents, a dense one of their start")
    return figure


def _draw_accuracy(panel: Any, content: dict[str, Any], name: str) -> None:
    read = [_tokens_read(reading) for reading in content["models"]["sparse"]["scores"]]
    for kind, result in content["models"].items():
        for label, points in _points(kind, result["scores"], max(read), name).items():
            lengths, means, deviations = zip(*points, strict=True)
            marker = "s" if "chunks" in label else "o"
            panel.errorbar(lengths, means, deviations, color=COLORS[kind], marker=marker, capsize=3, label=label)
    bag = [(_tokens_read(reading), scores[name]) for reading, scores in content["bag_of_words"].items()]
    panel.plot(*zip(*sorted(bag), strict=True), color="0.4", linestyle=":", marker="^", label="bag of words")
    panel.axhline(content["most_frequent_class"][name], color="0.7", label="most frequent class")
    panel.set_xscale("log", base=2)
    panel.set_xticks(read, [f"{length:,}" for length in read])
    panel.set_xlabel("tokens read of a test document, at most")
    panel.set_ylabel(f"accuracy on {TITLES[name]}")
    panel.legend(fontsize="small")


def _points(kind: str, scores: dict[str, Any], longest: int, name: str) -> dict[str, list[tuple[int, float, float]]]:
    """Return the points of each line: (tokens read, accuracy, deviation); chunks read as far as the sparse model."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    for reading, score in scores.items():
        in_chunks = "chunks" in reading
        label = f"{kind}, chunks averaged" if in_chunks else kind
        tokens = longest if in_chunks else _tokens_read(reading)
        points.setdefault(label, []).append((tokens, score[name], score[f"{name}_deviation"] or 0.0))
    return points


def _tokens_read(reading: str) -> int:
    return int(re.sub(r"\D", "", reading))
