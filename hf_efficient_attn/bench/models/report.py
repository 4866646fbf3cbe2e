"""The tables and the picture of `bench models`."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hf_efficient_attn.bench.harness.panels import Line, Panel, draw_panels
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS
from hf_efficient_attn.bench.models.cases import OURS, SELF_ONLY, THEIRS, VOCAB_SIZE
from hf_efficient_attn.bench.models.targets import OPPONENTS, Row, targets

MEBIBYTE = 2**20
TITLES = {"training": "training step", "forward": "forward"}
COLORS = {"longformer": "#4477aa", "led": "#44bb99", "big_bird": "#ee8866", "bert": "#333333", SELF_ONLY: "#bbbbbb"}
LINES = {OURS: "-", THEIRS: "--"}
MARKERS = {"longformer": "o", "led": "s", "big_bird": "^", "bert": "D", SELF_ONLY: "v"}
# what the picture calls them
NAMES = {"longformer": "Longformer", "led": "LED", "big_bird": "BigBird", "bert": "BERT", SELF_ONLY: "self only"}
NONE = "–"


def results_markdown(results: dict[str, Any]) -> str:
    """Return the targets, the tables, what could not be measured and why, and what the figures mean."""
    settings = results["settings"]
    parts = [f"# Encoders: {_caption(settings)}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, _reasons(results["results"]), _legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings, targets first."""
    settings, rows = results["settings"], results["results"]
    judged = [
        [what, target, value, NONE if bound is None else f"{bound:.2f} x", "yes" if is_reached else "no"]
        for what, target, value, bound, is_reached in targets(rows)
    ]
    found = {}
    if judged:
        header = ["what", "target", "measured", "with no attention at all", "reached"]
        found["Targets"] = markdown_table(header, judged)
    for measure, title in TITLES.items():
        found[f"Speed of ours, {title}"] = _speed_table(rows, settings, measure)
    for measure, title in TITLES.items():
        found[f"Milliseconds, {title}"] = _table(rows, settings["lengths"], _time_of(measure))
    if any(row["peak_memory_bytes"] for row in rows):
        heading = f"Peak MiB of a training step beyond the weights, {settings['memory_layers']} layers"
        found[heading] = _table(rows, settings["memory_lengths"], _memory)
    found["Largest difference between ours and theirs"] = _differences(results)
    return found


def _caption(settings: dict[str, Any]) -> str:
    return (
        f"width {settings['hidden_size']}, {settings['num_heads']} heads, MLP {settings['intermediate_size']:,}, "
        f"{settings['dtype']}, batch {settings['batch_size']}, attention dropout {settings['attention_dropout']:g}"
    )


def by_encoder(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (architecture, maker, its rows) in the order of their first appearance."""
    for name, by in dict.fromkeys((row["model"], row["by"]) for row in rows):
        yield name, by, [row for row in rows if (row["model"], row["by"]) == (name, by)]


def _table(rows: list[Row], lengths: list[int], cell: Callable[[Row], str]) -> str:
    lines = []
    for name, by, its_rows in by_encoder(rows):
        cells = {row["tokens"]: cell(row) for row in its_rows}
        lines.append([f"{name}, {by}", *(cells.get(tokens, NONE) for tokens in lengths)])
    return markdown_table(["encoder, by", *(f"{tokens:,}" for tokens in lengths)], lines)


def _speed_table(rows: list[Row], settings: dict[str, Any], measure: str) -> str:
    lengths = settings["lengths"]
    lines = []
    for name, others in OPPONENTS.items():
        own = {row["tokens"]: row["speed_against"] for row in rows if row["model"] == name and row["by"] == OURS}
        for other in others:
            cells = [_speed(own.get(tokens, {}).get(other, {}).get(measure)) for tokens in lengths]
            if set(cells) != {NONE}:
                lines.append([f"{name} / {other}", *cells])
    found = {row["tokens"]: row for row in rows if "samples" in row[measure]}
    header = [
        f"{tokens:,} ({row['layers']} layers, {len(row[measure]['samples'])} rounds)" for tokens, row in found.items()
    ]
    return markdown_table(["ours / transformers'", *header], lines)


def _speed(speed: dict[str, float] | None) -> str:
    if speed is None:
        return NONE
    return f"{speed['median']:.2f} ({speed['first_quartile']:.2f}–{speed['third_quartile']:.2f})"


def _time_of(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row[measure]['milliseconds']['median']:,.0f}" if "milliseconds" in row[measure] else NONE


def _memory(row: Row) -> str:
    amount = _mebibytes(row)
    return NONE if amount is None else f"{amount:,.0f}"


def _mebibytes(row: Row) -> float | None:
    return None if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] / MEBIBYTE


def _differences(results: dict[str, Any]) -> str:
    lengths = results["settings"]["lengths"]
    lines = []
    for name, by_length in results["differences"].items():
        cells = (by_length.get(str(tokens)) for tokens in lengths)
        lines.append([name, *(NONE if cell is None else f"{cell:.0e}" for cell in cells)])
    return markdown_table(["last hidden state", *(f"{tokens:,}" for tokens in lengths)], lines)


def _reasons(rows: list[Row]) -> str:
    reasons = dict.fromkeys(
        f"- {row['model']}, {row['by']}, {row['tokens']:,} tokens, {title}: {row[measure]['reason']}"
        for row in rows
        for measure, title in TITLES.items()
        if "reason" in row[measure]
    )
    return "\n".join(["Not measured:", "", *reasons]) if reasons else "Everything asked for was measured."


def _legend(settings: dict[str, Any]) -> str:
    return (
        f"Speed: medians and quartiles of the ratios within a round; above 1 = ours is faster. Up to "
        f"{settings['repeats']} rounds, as many as fit into {settings['max_seconds']:g} seconds a length, at least "
        f"{LEAST_ROUNDS}, after one that does not count; on a CPU every encoder has a process of its own. Layers are "
        f"alike; long inputs have fewer of them (layers × tokens at most {settings['layer_tokens']:,}), "
        f"{settings['layers']} at most. Weights are the same: ours are converted from "
        "transformers', and their last hidden states compared in eval mode first, BigBird's in its parity mode. "
        "Training step: forward, mean squared distance of the last hidden state from a fixed random one, backward, "
        f"AdamW (fused), gradients freed; no head, {VOCAB_SIZE:,} words. Forward: eval mode, no gradients; ours read "
        "BigBird's random blocks there too, transformers' copies of block 0. Dropout of hidden states 0.1, "
        "transformers' default; of attention weights as above. longformer, led: window 512, first token global; led: "
        "the encoder; big_bird: blocks of 64, 3 random, full attention on up to 704 tokens, as transformers; bert: "
        "SDPA; self_only, with no attention at all: BERT made ours, each token reading only itself; no attention "
        "around the same linear maps can be faster by more than the few percent that this one still takes. "
        "The bound of an encoder whose tokens read k keys of width d each, with its own arithmetic at the speed of the "
        "linear maps, is the time of self_only x (1 + 2·k·d / (4d² + 2·d·d_ff)): x 1.11 for 512 keys and base width. "
        f"Sparse encoders of transformers, and our led and bert, up to {settings['peer_limit']:,} tokens."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time per layer of a training step and of a forward pass, and peak memory, against length."""
    settings, rows = results["settings"], results["results"]
    memory_title = f"Peak memory of a training step, {settings['memory_layers']} layers"
    panels = [
        Panel(title.capitalize(), "milliseconds per layer", _lines(rows, _per_layer(measure)))
        for measure, title in TITLES.items()
    ]
    panels.append(Panel(memory_title, "MiB beyond the weights", _at_one_length(_lines(rows, _mebibytes))))
    heading = f"Encoders: {_caption(settings)}\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "tokens", settings["lengths"])


def _lines(rows: list[Row], value: Callable[[Row], float | None]) -> list[Line]:
    lines = []
    for name, by, its_rows in by_encoder(rows):
        values = {row["tokens"]: value(row) for row in its_rows}
        points = [(tokens, found) for tokens, found in values.items() if found is not None]
        style = {"color": COLORS[name], "linestyle": LINES[by], "marker": MARKERS[name]}
        lines.append(Line(f"{NAMES[name]}, {by}", points, style))
    return lines


def _at_one_length(lines: list[Line]) -> list[Line]:
    """Return the points at the length that most lines have, the longest of these."""
    counts = Counter(tokens for line in lines for tokens, _ in line.points)
    length = max(counts, key=lambda tokens: (counts[tokens], tokens), default=None)
    return [replace(line, points=[point for point in line.points if point[0] == length]) for line in lines]


def _per_layer(measure: str) -> Callable[[Row], float | None]:
    def milliseconds(row: Row) -> float | None:
        found = row[measure].get("milliseconds")
        return None if found is None else found["median"] / row["layers"]

    return milliseconds
