"""The tables and the picture of `bench etc`, `bench images`, `bench star` and `bench trees`."""

from collections.abc import Callable
from typing import Any

from hf_efficient_attn.bench.encoders.cases import DENSE, DINOV2, ETC, LSTM, NEIGHBOURHOOD, STAR, TREE
from hf_efficient_attn.bench.harness.curves import curve
from hf_efficient_attn.bench.harness.panels import Line, Panel, draw_panels
from hf_efficient_attn.bench.harness.report import clock_line, machine_line, markdown_table
from hf_efficient_attn.bench.harness.steps import MEASURES
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS, times_faster

Row = dict[str, Any]
MEBIBYTE = 2**20
OTHERS = {DENSE: "#333333", DINOV2: "#333333", LSTM: "#ee8866"}
COLORS = {ETC: "#aa3377", STAR: "#4477aa", TREE: "#228833", NEIGHBOURHOOD: "#aa3377", **OTHERS}
# ours -> its paper's name; each is compared with the others of a benchmark
TITLES = {ETC: "ETC", STAR: "Star-Transformer", TREE: "BP-Transformer", NEIGHBOURHOOD: "a DINOv2 of neighbourhoods"}
ABOUT = {
    ETC: (
        "our EtcTransformerModel, with MLPs four times as wide; a long token reads {local_radius} on each side and all "
        "global tokens, one for {chunk_tokens} long ones"
    ),
    STAR: "our StarTransformerModel, an update of tokens and relay for each layer, without MLPs",
    TREE: (
        "our BPTransformerModel, with MLPs four times as wide over tokens and as many spans; a token reads {num_nodes} "
        "nodes of each size and side"
    ),
    NEIGHBOURHOOD: (
        "transformers' DINOv2 after hea.sparsify: a patch of {patch_pixels} × {patch_pixels} pixels reads "
        "{grid_radius} patches on each side along both axes, and the class token, which reads all"
    ),
    DINOV2: "transformers' DINOv2 on torch's SDPA",
    DENSE: "transformers' BERT on torch's SDPA, with MLPs four times as wide",
    LSTM: "torch's LSTM in both directions, each half as wide",
}
NONE = "–"


def add_ratios(rows: list[Row]) -> None:
    """Write `speed_against`, {other encoder: quartiles}, into the measures of ours: how many times as fast.

    Rounds are compared one by one.
    """
    found = {(row["tokens"], row["encoder"]): row for row in rows}
    for row in rows:
        others = {name: found.get((row["tokens"], name)) for name in OTHERS if row["encoder"] in TITLES}
        for measure in MEASURES:
            own = row[measure]["samples"]
            row[measure]["speed_against"] = {
                name: times_faster(own, other[measure]["samples"])
                for name, other in others.items()
                if other is not None
            }


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables and what the figures mean."""
    settings = results["settings"]
    parts = [f"# {title(settings)}: {caption(settings)}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    settings, rows = results["settings"], results["results"]
    found = {}
    for own in set(TITLES).intersection(settings["encoders"]):
        for measure, called in MEASURES.items():
            lines = [
                [f"as {name}", *(_speed(row, measure, name) for row in rows_of(rows, own))]
                for name in settings["encoders"]
                if name != own
            ]
            found[f"How many times as fast {TITLES[own]} is, {called}"] = _table("", lines, settings)
    for measure, called in MEASURES.items():
        found[f"Milliseconds, {called}"] = _by_encoder(rows, settings, _time(measure))
    if any(row["peak_memory_bytes"] is not None for row in rows):
        found["Peak MiB of a training step beyond weights and embeddings"] = _by_encoder(rows, settings, _memory)
    return found


def title(settings: dict[str, Any]) -> str:
    """Return the name of what is compared with the others."""
    return ", ".join(TITLES[name] for name in settings["encoders"] if name in TITLES) or "Encoders"


def caption(settings: dict[str, Any]) -> str:
    """Return the shape of the encoders in a line."""
    return (
        f"{settings['layers']} layers, width {settings['hidden_size']}, {settings['heads']} heads, "
        f"{settings['dtype']}, batch {settings['batch_size']}"
    )


def legend(settings: dict[str, Any]) -> str:
    """Return what was measured."""
    about = "; ".join(f"{name}: {ABOUT[name].format(**settings)}" for name in settings["encoders"])
    start = "pixels" if settings.get("patch_pixels") else "embeddings"
    return (
        f"{caption(settings)}; from {start} to the last hidden state, without dropout. Training step: forward and "
        f"backward. Up to {settings['repeats']} rounds, as many as fit into {settings['max_seconds']:g} seconds a "
        f"length, at least {LEAST_ROUNDS}, after one that does not count; medians, of ratios within a round. "
        f"{clock_line(settings)}{about}."
    )


def rows_of(rows: list[Row], encoder: str) -> list[Row]:
    """Return the rows of an encoder."""
    return [row for row in rows if row["encoder"] == encoder]


def _table(title: str, lines: list[list[str]], settings: dict[str, Any]) -> str:
    return markdown_table([title, *(f"{tokens:,}" for tokens in settings["lengths"])], lines)


def _by_encoder(rows: list[Row], settings: dict[str, Any], cell: Callable[[Row], str]) -> str:
    lines = [[name, *(cell(row) for row in rows_of(rows, name))] for name in settings["encoders"]]
    return _table("encoder", lines, settings)


def _speed(row: Row, measure: str, other: str) -> str:
    return f"{row[measure]['speed_against'][other]['median']:.2f}"


def _time(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row[measure]['milliseconds']['median']:,.1f}"


def _memory(row: Row) -> str:
    return NONE if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}"


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time of a forward pass and of a training step, and peak memory, against the length."""
    settings, rows = results["settings"], results["results"]
    names = settings["encoders"]
    panels = [
        Panel(called.capitalize(), "milliseconds", [_line(name, curve(rows_of(rows, name), measure)) for name in names])
        for measure, called in MEASURES.items()
    ]
    known = [row for row in rows if row["peak_memory_bytes"] is not None]
    memory = [
        _line(name, [(row["tokens"], row["peak_memory_bytes"] / MEBIBYTE) for row in rows_of(known, name)])
        for name in names
    ]
    panels.append(Panel("Peak memory of a training step", "MiB beyond weights and embeddings", memory))
    heading = f"{title(settings)}: {caption(settings)}\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "tokens", settings["lengths"])


def _line(name: str, points: list[tuple[int, float]]) -> Line:
    return Line(name, points, {"color": COLORS[name], "marker": "o"})
