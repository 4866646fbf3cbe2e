"""What a run of `classify_documents.py` leaves to read: tables, what they mean, model cards, a picture."""

import math
import re
from typing import Any

from shared.task_run import results_table, smoothed

from classification.classify_arguments import ClassifyTrainingArguments, ModelArguments
from classification.classify_evaluation import SCORES
from hf_efficient_attn.pictures import new_figure

COLUMNS = {
    "model": ("model", "{}"),
    "reads": ("reads of a document", "{}"),
    "accuracy": ("accuracy", "{}"),
    "accuracy_long": ("on long ones", "{}"),
    "f1_macro": ("macro F1", "{}"),
    "matthews": ("Matthews", "{}"),
    "documents_per_second": ("documents/s", "{:,.1f}"),
}
TRAINING_COLUMNS = {
    "model": ("training", "{}"),
    "parameters": ("parameters", "{:,}"),
    "train_seconds": ("seconds", "{:.1f}"),
    "num_steps": ("steps", "{:,.0f}"),
    "train_tokens": ("tokens seen", "{:,.0f}"),
    "train_examples": ("pieces seen", "{:,.0f}"),
    "train_tokens_per_second": ("tokens/s", "{:,.0f}"),
    "peak": ("peak of a step (MiB)", "{:,.0f}"),
    "reload_difference": ("reload difference", "{:.1e}"),
}
COLORS = {"sparse": "C0", "dense": "C1"}
TITLES = {"accuracy": "the test documents", "accuracy_long": "the long ones among them"}


def results_text(content: dict[str, Any], model: ModelArguments, training: ClassifyTrainingArguments) -> str:
    """Return both tables and what to bear in mind."""
    data, num_seeds = content["data"], len(content["seeds"]["sparse"])
    parts = [
        f"{data['train_documents']:,} documents to train on, {data['test_documents']:,} to test on; these have "
        f"{data['test_tokens_median']:,} tokens in the middle, at most {data['test_tokens_longest']:,}. Classes: "
        f"{', '.join(data['classes'])}. {data['long_test_documents']:,} are long: an input of {data['long_from']:,} "
        "tokens does not hold them.",
        results_table(COLUMNS, _score_rows(content)),
        results_table(TRAINING_COLUMNS, _training_rows(content)),
        f"Both models have one shape, one tokenizer, learning rate {training.learning_rate:g}, "
        f"{training.tokens_per_step:,} tokens a step and {training.seconds_per_model:g} seconds of training. They are "
        f"trained on random pieces of documents, of up to {model.train_length:,} tokens for the sparse one and "
        f"{model.dense_length:,} for the dense one. {_about_spread(content, num_seeds)} A bag of words "
        "is logistic regression on TF-IDF of the same tokens. Peak: memory of a training step on the largest batch, "
        "beyond the weights.",
    ]
    stops = [
        f"{kind}, seed {result['seed']}: {result['stopped']}"
        for kind, results in content["seeds"].items()
        for result in results
        if result["stopped"]
    ]
    return "\n\n".join(parts + _verdict(content) + stops)


def _about_spread(content: dict[str, Any], num_seeds: int) -> str:
    spread = "± is the standard deviation over them" if num_seeds > 1 else "a single one says nothing of its spread"
    sizes = {"accuracy": "test_documents", "accuracy_long": "long_test_documents"}
    errors = []
    for name, size in sizes.items():
        best, num_documents = max(scores.get(name, 0.0) for scores in _readings(content)), content["data"][size]
        if num_documents:
            errors.append(
                f"{num_documents:,} documents place an accuracy of {best:.2f} within "
                f"±{_standard_error(best, num_documents):.3f}"
            )
    return (
        f"Scores are means over {num_seeds} seed(s); {spread}. Beyond that, {', '.join(errors)} (one standard error): "
        "smaller differences mean nothing."
    )


def _standard_error(accuracy: float, num_documents: int) -> float:
    return math.sqrt(accuracy * (1 - accuracy) / num_documents)


def _readings(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scores of both models, one for each way to read a document."""
    return [scores for result in content["models"].values() for scores in result["scores"].values()]


def _verdict(content: dict[str, Any]) -> list[str]:
    """Return a sentence if no model can be told from naming the most frequent class."""
    chance = content["most_frequent_class"]["accuracy"]
    lead = max(scores["accuracy"] for scores in _readings(content)) - chance
    if lead >= 2 * _standard_error(chance, content["data"]["test_documents"]):
        return []
    return [
        "No model here can be told from naming the most frequent class (two standard errors): this run says nothing "
        "about which of them classifies better. Train longer by --seconds_per_model, or take more documents."
    ]


def _score_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {"model": kind, "reads": reading, **scores}
        for kind, result in content["models"].items()
        for reading, scores in result["scores"].items()
    ]
    rows += [{"model": "bag of words", "reads": reads, **scores} for reads, scores in content["bag_of_words"].items()]
    rows.append({"model": "most frequent class", "reads": "nothing", **content["most_frequent_class"]})
    return [{**row, **{name: _with_deviation(row, name) for name in SCORES if name in row}} for row in rows]


def _with_deviation(row: dict[str, Any], name: str) -> str:
    deviation = row.get(f"{name}_deviation")
    return f"{row[name]:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "")


def _training_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"model": kind, "peak": result["training_step_peak_bytes"] / 2**20, **result}
        for kind, result in content["models"].items()
    ]


def model_card(title: str, kind: str, result: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a model's card; see `saved_model.save_model`."""
    scores = "\n".join(
        f"- reading {reading} tokens: accuracy {score['accuracy']:.3f}, macro F1 {score['f1_macro']:.3f}"
        for reading, score in result["scores"].items()
    )
    return {
        "pipeline_tag": "text-classification",
        "title": f"{title}: the {kind} encoder",
        "text": (
            f"A {kind} encoder of {result['parameters']:,} parameters, trained by `examples/classify_documents.py` of "
            f"`hf_efficient_attn` for {result['train_seconds']:.0f} seconds, seed {result['seed']}. On the test "
            f"documents:\n\n{scores}"
        ),
        "usage": (
            "from transformers import pipeline\n\n"
            'classify = pipeline("text-classification", model="{folder}")\n'
            'print(classify("The text of a document.", truncation=True))'
        ),
        "limits": "A demonstration at a small size, trained briefly from random weights. Measure it before use.",
    }


def draw_scores(content: dict[str, Any]) -> Any:
    """Return a figure: loss by training time, and accuracy by tokens read, on all documents and on the long ones."""
    names = [name for name in TITLES if name in content["most_frequent_class"]]
    figure = new_figure(5.5 * (1 + len(names)), 4.5)
    losses, *panels = figure.subplots(1, 1 + len(names))
    for kind, results in content["seeds"].items():
        for result in results:
            losses.plot(*smoothed(result["losses"]), color=COLORS[kind], alpha=0.7, label=_once(kind, result, results))
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


def _once(kind: str, result: dict[str, Any], results: list[dict[str, Any]]) -> str | None:
    return kind if result is results[0] else None


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
