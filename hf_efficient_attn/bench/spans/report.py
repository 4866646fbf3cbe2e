"""The tables and the picture of `bench spans`."""

from collections.abc import Callable
from typing import Any

from hf_efficient_attn.bench.harness.panels import Line, Panel, draw_panels
from hf_efficient_attn.bench.harness.report import clock_line, machine_line, markdown_table
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS
from hf_efficient_attn.bench.spans.cases import ADAPTIVE, DENSE, DYNAMIC, FIXED, FROZEN
from hf_efficient_attn.bench.spans.targets import (
    MOST_OVER_FLOPS,
    RATIOS,
    TRAINING,
    Row,
    decode_measure,
    targets,
    title_of,
)

MEBIBYTE = 2**20
COLORS = {FIXED: "#ee8866", ADAPTIVE: "#4477aa", FROZEN: "#44bb99", DYNAMIC: "#aa3377", DENSE: "#333333"}
LINES = {"relative_keys": "-", "rope": "--"}
MARKERS = {FIXED: "o", ADAPTIVE: "s", FROZEN: "D", DYNAMIC: "v", DENSE: "^"}
# what the picture calls the positions
NAMES = {"relative_keys": "relative positions", "rope": "rotary"}
NONE = "–"


def results_markdown(results: dict[str, Any]) -> str:
    """Return the targets, the tables and what the figures mean."""
    settings, rows = results["settings"], results["results"]
    parts = [f"# Attention spans: {_caption(settings)}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, _legend(rows, settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings, targets first."""
    settings, rows = results["settings"], results["results"]
    judged = [[*cells, "yes" if is_reached else "no"] for *cells, is_reached in targets(rows)]
    found = {}
    if judged:
        found["Targets"] = markdown_table(["what", "target", "measured", "reached"], judged)
    for measure in _measures(settings):
        found[f"Time ratios, {title_of(measure)}"] = _ratio_table(rows, settings, measure)
    for measure in _measures(settings):
        found[f"{title_of(measure).capitalize()}, {_unit(measure)}"] = _table(rows, settings, _time_of(measure))
    found["Million multiply-adds of a token"] = _table(rows, settings, _flops)
    found["Keys that a head reads on average"] = _table(rows, settings, _kept_keys)
    found["MiB of the cache, an example"] = _table(rows, settings, _cache)
    if any(row["peak_memory_bytes"] for row in rows):
        found["Peak MiB of a training step beyond weights and memory"] = _table(rows, settings, _memory)
    return found


def _measures(settings: dict[str, Any]) -> list[str]:
    return [TRAINING, *map(decode_measure, settings["decode_batch_sizes"])]


def _unit(measure: str) -> str:
    return "milliseconds per 1,000 tokens" if measure == TRAINING else "milliseconds"


def _caption(settings: dict[str, Any]) -> str:
    return (
        f"{settings['layers']} layers, width {settings['hidden_size']}, {settings['num_heads']} heads, MLP "
        f"{settings['intermediate_size']:,}, {settings['dtype']}, batch {settings['batch_size']}, attention dropout "
        f"{settings['attention_dropout']:g}"
    )


def _models(rows: list[Row], settings: dict[str, Any]) -> list[tuple[str, str, dict[int, Row]]]:
    """Return (positions, model, {limit: row}) in the order of the settings."""
    return [
        (positions, name, {row["limit"]: row for row in rows if (row["positions"], row["model"]) == (positions, name)})
        for positions in settings["positions"]
        for name in settings["models"]
    ]


def _label(name: str, positions: str) -> str:
    return f"{name}, rope, beside {positions}" if name == DENSE else f"{name}, {positions}"


def _plain_label(name: str, positions: str) -> str:
    # dense attention has rotary positions in either case, and is measured in the rounds of both
    return f"{name}, run beside {NAMES[positions]}" if name == DENSE else f"{name}, {NAMES[positions]}"


def _table(rows: list[Row], settings: dict[str, Any], cell: Callable[[Row], str]) -> str:
    lines = [
        [_label(name, positions), *(cell(found[limit]) for limit in settings["limits"])]
        for positions, name, found in _models(rows, settings)
    ]
    return markdown_table(["model", *(f"S = {limit:,}" for limit in settings["limits"])], lines)


def _ratio_table(rows: list[Row], settings: dict[str, Any], measure: str) -> str:
    lines = []
    for positions, name, found in _models(rows, settings):
        for own, other in RATIOS:
            if name == own and other in settings["models"]:
                cells = [_ratio(found[limit], other, measure) for limit in settings["limits"]]
                lines.append([f"{name} / {other}, {positions}", *cells])
    return markdown_table(["models", *(f"S = {limit:,}" for limit in settings["limits"])], lines)


def _ratio(row: Row, other: str, measure: str) -> str:
    found = row["time_over"][other][measure]
    quartiles = f"{found['first_quartile']:.2f}–{found['third_quartile']:.2f}"
    return f"{found['median']:.2f} ({quartiles}), multiply-adds {row['flops_over'][other]:.2f}"


def _time_of(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row['times'][measure]['milliseconds']['median']:,.{0 if measure == TRAINING else 1}f}"


def _flops(row: Row) -> str:
    return f"{row['flops_per_token'] / 1e6:.1f}"


def _kept_keys(row: Row) -> str:
    return f"{row['kept_keys']:,.0f}"


def _cache(row: Row) -> str:
    return f"{row['cache_bytes'] / MEBIBYTE:,.1f}"


def _memory(row: Row) -> str:
    return NONE if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}"


def _legend(rows: list[Row], settings: dict[str, Any]) -> str:
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    frozen = f"Logits of adaptive and frozen differ by at most {max(differences):.0e}. " if differences else ""
    return (
        f"Time ratios: medians and quartiles of the ratios within a round; below 1 = the first is faster. Up to "
        f"{settings['repeats']} rounds, as many as fit into {settings['max_seconds']:g} seconds a limit, at least "
        f"{LEAST_ROUNDS}, after one that does not count. "
        f"{clock_line(settings)}fixed: every head reads S keys; adaptive: the authors' "
        "network with the spans of figure 4 of arXiv:1905.07799, in proportion to S (longest head of each layer as "
        "there, a second of 0.3 of it, the others at the ramp of 32); frozen: the same after freeze_spans; dynamic: "
        "each token has its own, around these. Training "
        f"step of these: one segment of {settings['segment_tokens']} tokens after a full memory, forward, mean loss, "
        "backward, AdamW (fused). dense: GPT-NeoX of transformers in the same shape with rotary positions and SDPA; "
        "it trains on texts of S tokens, of which each reads all before it, S / 2 on average, and decodes with S of "
        "them cached. Multiply-adds: L(4d² + 2·d·d_ff + 2·span·d) a token, with the mean over all heads of the keys "
        "kept, min(S, ⌈z⌉ + R), as span; projections of the memory and products with position vectors are not in it. "
        f"{frozen}Target: the time ratio of adaptive to fixed is at most {MOST_OVER_FLOPS} x that of multiply-adds."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time of a training step and of decode steps, and peak memory, against the span limit."""
    settings, rows = results["settings"], results["results"]
    values = [(title_of(name).capitalize(), _unit(name), _median_of(name)) for name in _measures(settings)]
    values.append(("Peak memory of a training step", "MiB beyond weights and memory", _mebibytes))
    panels = [Panel(title, unit, _lines(rows, settings, value)) for title, unit, value in values]
    heading = f"Attention spans: {_caption(settings)}\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "span limit, tokens", settings["limits"])


def _lines(rows: list[Row], settings: dict[str, Any], value: Callable[[Row], float | None]) -> list[Line]:
    lines = []
    for positions, name, found in _models(rows, settings):
        values = {limit: value(row) for limit, row in found.items()}
        points = [(limit, number) for limit, number in values.items() if number is not None]
        style = {"color": COLORS[name], "linestyle": LINES[positions], "marker": MARKERS[name]}
        lines.append(Line(_plain_label(name, positions), points, style))
    return lines


def _median_of(measure: str) -> Callable[[Row], float | None]:
    return lambda row: row["times"][measure]["milliseconds"]["median"]  # type: ignore[no-any-return]


def _mebibytes(row: Row) -> float | None:
    return None if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] / MEBIBYTE
