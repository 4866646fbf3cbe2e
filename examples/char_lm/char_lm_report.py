"""What a run of `train_char_lm.py` leaves to read: a table, what it says, model cards, a picture."""

from collections.abc import Sequence
from typing import Any

from shared.task_run import results_table

from char_lm.char_lm_arguments import CharTrainingArguments
from hf_efficient_attn.pictures import new_figure

COLUMNS = {
    "span": ("span", "{}"),
    "parameters": ("parameters", "{:,}"),
    "bits_per_byte": ("bits per byte", "{:.3f}"),
    "bits_per_byte_at_equal_time": ("validation, equal time", "{:.3f}"),
    "average_span": ("average span", "{:,.0f}"),
    "max_span": ("longest span", "{:,.0f}"),
    "mega_flops": ("multiply-adds/byte (M)", "{:.2f}"),
    "train_seconds": ("training (s)", "{:.1f}"),
    "train_tokens_per_second": ("trained bytes/s", "{:,.0f}"),
    "test_tokens_per_second": ("read bytes/s", "{:,.0f}"),
    "peak": ("peak of a step (MiB)", "{:,.0f}"),
    "reload_difference": ("reload difference", "{:.1e}"),
}
COLORS = {"fixed": "C1", "adaptive": "C0", "dynamic": "C2"}
AXES = {"step": "optimizer step", "train_seconds": "training time (s), without evaluation"}


def results_text(content: dict[str, Any], training: CharTrainingArguments) -> str:
    """Return the table and how to read it."""
    data, kinds = content["data"], content["kinds"]
    add_equal_time(kinds)
    rows = [
        {"span": kind, "mega_flops": result["flops_per_token"] / 1e6, "peak": result["peak_bytes"] / 2**20, **result}
        for kind, result in kinds.items()
    ]
    first = next(iter(kinds.values()))
    return "\n\n".join(
        [
            f"Bytes of {data['source']}: {first['train_tokens']:,} read in training ({data['train_bytes']:,} there "
            f"are), {data['validation_bytes']:,} to look at meanwhile, {data['test_bytes']:,} to test on.",
            results_table(COLUMNS, rows),
            f"All kinds start from the same weights and read the same text in the same order: {first['num_steps']:,} "
            f"steps by {training.optimizer}, seed {training.seed}. Equal time: bits per byte of the validation text "
            f"when the fastest kind had finished, after {equal_time(kinds):.0f} s. Spans are in bytes, the ramp "
            "included; the average is over layers and heads, and over the test text, where a dynamic one changes from "
            "byte to byte. Multiply-adds are those of the network's maps and of attention over the average span. "
            "Peak: memory of a training step beyond the weights, measured with the trained spans. After so many steps "
            "this says nothing of how the kinds end when trained for long.",
        ]
    )


def equal_time(kinds: dict[str, dict[str, Any]]) -> float:
    """Return the seconds of training of the fastest kind."""
    return min(result["train_seconds"] for result in kinds.values())


def add_equal_time(kinds: dict[str, dict[str, Any]]) -> None:
    """Note for each kind the bits per byte of the validation text when the fastest one had finished."""
    for result in kinds.values():
        curve = points(result["history"], "train_seconds", "eval_bits_per_byte")
        result["bits_per_byte_at_equal_time"] = interpolate(curve, equal_time(kinds))


def points(history: Sequence[dict[str, float]], x: str, y: str) -> list[tuple[float, float]]:
    """Return the entries that have both values."""
    return [(entry[x], entry[y]) for entry in history if x in entry and y in entry]


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the value of a curve at x, on the straight line between two points; None before the first.

    >>> interpolate([(1.0, 5.0), (3.0, 4.0), (4.0, 4.0)], 1.5), interpolate([(1.0, 5.0)], 0.5)
    (4.75, None)
    """
    if not curve or x < curve[0][0]:
        return None
    for (left, before), (right, after) in zip(curve, curve[1:], strict=False):
        if left <= x <= right:
            return before + (after - before) * (x - left) / (right - left)
    return curve[-1][1]


def model_card(source: str, kind: str, result: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a model's card; see `saved_model.save_model`."""
    return {
        "pipeline_tag": "text-generation",
        "title": f"Bytes of {source}: {kind} attention span",
        "text": (
            f"A language model of bytes with {result['parameters']:,} parameters and {kind} attention span (Sukhbaatar "
            "et al., arXiv:1905.07799), trained by `examples/train_char_lm.py` of `hf_efficient_attn` on "
            f"{result['train_tokens']:,} bytes. On held-out text it needs {result['bits_per_byte']:.3f} bits per byte "
            f"and reads {result['average_span']:.0f} bytes back on average (at most {result['max_span']:.0f}), "
            f"{result['flops_per_token'] / 1e6:.2f} million multiply-adds per byte."
        ),
        "usage": (
            "from transformers import pipeline\n\n"
            'generate = pipeline("text-generation", model="{folder}")\n'
            'print(generate("import ", max_new_tokens=200)[0]["generated_text"])'
        ),
        "limits": (
            "A demonstration at a small size, trained briefly from random weights. It continues text of the kind it "
            "was trained on and knows nothing else."
        ),
    }


def draw_curves(kinds: dict[str, dict[str, Any]]) -> Any:
    """Return a figure of three panels: bits per byte by step and by time, average span by step."""
    figure = new_figure(14, 4.2)
    by_step, by_time, spans = figure.subplots(1, 3)
    for kind, result in kinds.items():
        for panel, x in ((by_step, "step"), (by_time, "train_seconds")):
            curve = points(result["history"], x, "eval_bits_per_byte")
            panel.plot(*zip(*curve, strict=True), color=COLORS[kind], marker="o", markersize=4, label=kind)
        training = [entry for entry in result["history"] if "loss" in entry]
        curve = points(training, "step", "average_span")
        spans.plot(*zip(*curve, strict=True), color=COLORS[kind], label=kind)
    for panel, x in ((by_step, "step"), (by_time, "train_seconds"), (spans, "step")):
        panel.set_xlabel(AXES[x])
        panel.set_xlim(left=0)
        panel.legend()
    for panel in (by_step, by_time):
        panel.set_ylabel("bits per byte of the validation text")
    spans.set_ylabel("average span in training (bytes), ramp included")
    spans.set_yscale("log", base=2)
    figure.suptitle("Fixed, adaptive and dynamic attention span, equal but for it")
    return figure
