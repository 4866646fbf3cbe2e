"""The tables and the picture of `bench content`."""

from collections.abc import Callable
from typing import Any

from hf_efficient_attn.bench.content.cases import (
    BLOCKS,
    DENSE,
    IN_TREE,
    NEARBY,
    PROJECTIONS,
    REFORMER,
    ROUTING,
    SHARED_PART,
    SHARING_QUERIES,
    TOKENS,
)
from hf_efficient_attn.bench.content.depth import MLP_FACTOR, STACKS
from hf_efficient_attn.bench.content.targets import (
    GROWTH_FROM,
    Row,
    crossover_of,
    highest_growth,
    rows_of,
    targets,
)
from hf_efficient_attn.bench.harness.curves import curve
from hf_efficient_attn.bench.harness.panels import Line, Panel, draw_panels
from hf_efficient_attn.bench.harness.report import clock_line, machine_line, markdown_table
from hf_efficient_attn.bench.harness.steps import MEASURES
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS

MEBIBYTE = 2**20
# layer -> what the picture calls it, and its colour
STYLES = {
    DENSE: ("dense (SDPA)", "#333333"),
    IN_TREE: ("Reformer in transformers", "#ee8866"),
    PROJECTIONS: ("linear maps alone", "#999999"),
    REFORMER: ("Reformer", "#4477aa"),
    ROUTING: ("Routing Transformer", "#44bb99"),
    BLOCKS: ("block top-k", "#aa3377"),
    TOKENS: ("chosen tokens", "#bbaa44"),
    NEARBY: ("chosen tokens nearby", "#66ccee"),
}
NONE = "–"


def results_markdown(results: dict[str, Any]) -> str:
    """Return the targets, the tables and what the figures mean."""
    settings = results["settings"]
    parts = [f"# Keys chosen by content: {caption(settings)}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings, targets first."""
    settings, rows, depth = results["settings"], results["results"], results["depth"]
    judged = [[*cells, "yes" if is_reached else "no"] for *cells, is_reached in targets(rows, depth)]
    found = {"Targets": markdown_table(["what", "target", "measured", "reached"], judged)} if judged else {}
    for measure, title in MEASURES.items():
        found[f"Speed against {DENSE} and {IN_TREE}, {title}"] = _table(rows, settings, _speeds(measure))
    for measure, title in MEASURES.items():
        found[f"Milliseconds, {title}"] = _table(rows, settings, _time(measure))
    found["Crossover and growth"] = _summary_table(rows, settings)
    if any(row["peak_memory_bytes"] is not None for row in rows):
        found["Peak MiB of a training step beyond weights and states"] = _table(rows, settings, _memory)
    if depth:
        found[f"Peak MiB of {settings['depth_tokens']:,} tokens against depth"] = _depth_table(depth, settings)
    return found


def caption(settings: dict[str, Any]) -> str:
    """Return the shape of the layers in a line."""
    return f"{settings['heads']} heads of {settings['head_dim']}, {settings['dtype']}, batch {settings['batch_size']}"


def legend(settings: dict[str, Any]) -> str:
    """Return what was measured, and what the columns mean."""
    return (
        f"One causal attention layer with its projections, {caption(settings)}. Training step: forward and backward. "
        "Speed: how many times as fast as dense attention / as transformers' Reformer, median of the ratios within a "
        f"round. Up to {settings['repeats']} rounds, as many as fit into {settings['max_seconds']:g} seconds a length, "
        f"at least {LEAST_ROUNDS}, after one that does not count. "
        f"{clock_line(settings)}{DENSE}: torch's SDPA, measured up to "
        f"{settings['dense_limit']:,} tokens. {REFORMER}, {IN_TREE} (LSHSelfAttention, up to "
        f"{settings['peer_limit']:,} tokens): {settings['hashes']} round(s) of hashing, chunks of "
        f"{settings['hash_chunk_tokens']} tokens that read themselves and the one before, new rotations at every "
        f"training step. {ROUTING}: all heads route; a query reads the last {settings['cluster_tokens']} tokens of its "
        "cluster, of which there is one for as many tokens of the text; training moves the centroids. "
        f"{BLOCKS}: {settings['chosen_blocks']} blocks of {settings['block_tokens']}. {TOKENS}: "
        f"{settings['chosen_tokens']} tokens of its past for every query, drawn at random, which neighbouring queries "
        f"share least; {NEARBY}: as many, the last ones but 1 / {SHARED_PART} that {SHARING_QUERIES} neighbours share; "
        "their choice is not timed. Growth: the highest factor of time per doubling of the length from "
        f"{GROWTH_FROM:,} tokens on; 2 is linear. Depth: Reformer layers with an MLP {MLP_FACTOR} times as wide; "
        "gradients of the weights lie in memory before, so that the peak is that of activations."
    )


def _table(rows: list[Row], settings: dict[str, Any], cell: Callable[[Row], str]) -> str:
    lines = [[name, *(cell(row) for row in rows_of(rows, name))] for name in settings["layers"]]
    lines = [line for line in lines if set(line[1:]) != {NONE}]
    return markdown_table(["layer", *(f"{tokens:,}" for tokens in settings["lengths"])], lines)


def _time(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row[measure]['milliseconds']['median']:,.1f}" if row[measure] else NONE


def _speeds(measure: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        speeds = [row[measure].get("speed_against", {}).get(name) for name in (DENSE, IN_TREE)]
        shown = [NONE if speed is None else f"{speed['median']:.2f}" for speed in speeds]
        return NONE if set(shown) == {NONE} else " / ".join(shown)

    return cell


def _memory(row: Row) -> str:
    return NONE if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}"


def _summary_table(rows: list[Row], settings: dict[str, Any]) -> str:
    header = ["layer"]
    for title in MEASURES.values():
        header += [f"{title}: beats {DENSE} from", "growth"]
    lines = []
    for name in settings["layers"]:
        cells = [name]
        for measure in MEASURES:
            tokens = None if name == DENSE else crossover_of(rows, name, measure)
            growth = highest_growth(curve(rows_of(rows, name), measure))
            cells += [NONE if tokens is None else f"{tokens:,.0f}", NONE if growth is None else f"{growth[0]:.2f}×"]
        lines.append(cells)
    return markdown_table(header, lines)


def _depth_table(depth: list[Row], settings: dict[str, Any]) -> str:
    lines = [
        [kind, *(f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}" for row in depth if row["stack"] == kind)]
        for kind in STACKS
    ]
    return markdown_table(["stack", *(f"{count} layers" for count in settings["depths"])], lines)


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time of a forward pass and of a training step, and peak memory, against the length."""
    settings, rows = results["settings"], results["results"]
    panels = [
        Panel(title.capitalize(), "milliseconds", _lines(rows, settings, measure))
        for measure, title in MEASURES.items()
    ]
    memory = [_line(name, _peaks(rows_of(rows, name))) for name in settings["layers"]]
    panels.append(Panel("Peak memory of a training step", "MiB beyond weights and states", memory))
    heading = f"Keys chosen by content: {caption(settings)}\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "tokens", settings["lengths"])


def _lines(rows: list[Row], settings: dict[str, Any], measure: str) -> list[Line]:
    return [_line(name, curve(rows_of(rows, name), measure)) for name in settings["layers"]]


def _line(name: str, points: list[tuple[int, float]]) -> Line:
    title, color = STYLES[name]
    return Line(title, points, {"color": color, "marker": "o"})


def _peaks(rows: list[Row]) -> list[tuple[int, float]]:
    known = [row for row in rows if row["peak_memory_bytes"] is not None]
    return [(row["tokens"], row["peak_memory_bytes"] / MEBIBYTE) for row in known]
