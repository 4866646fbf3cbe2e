"""The table and the picture of `bench blocks`."""

from collections.abc import Callable, Sequence
from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.pictures import new_figure

# measure -> its title; in the results, its speed against the reference block has the same key
MEASURES = {
    "training": "training, whole model",
    "layers": "training, layers alone",
    "prefill": "reading a prompt (prefill)",
    "decode": "decoding with a cache",
}
MEBIBYTE = 2**20
QUARTILES = ("first_quartile", "third_quartile")
COLORS = ("#4477aa", "#ee8866", "#44bb99", "#bbbbbb")


def results_markdown(results: dict[str, Any]) -> str:
    """Return one table per dtype, a line that places Pre-LN against GPT-2, and what the columns mean."""
    settings = results["settings"]
    parts = [
        f"# Blocks at width {settings['hidden_size']}, {settings['num_layers']} layers, {settings['num_heads']} heads",
        machine_line(results["machine"]),
    ]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return by dtype the table, and behind it a line that places Pre-LN against GPT-2 if both were measured."""
    found = {}
    for dtype in results["settings"]["dtype"]:
        rows = [row for row in results["results"] if row["dtype"] == dtype]
        found[dtype] = _table(rows, results["reference"])
        against = results["pre_ln_against_gpt2"].get(dtype)
        if against:
            speeds = ", ".join(f"{MEASURES[measure]} {_ratio(against[measure])}" for measure in MEASURES)
            found[dtype] += f"\n\n`pre_ln` against transformers' GPT-2: {speeds}."
    return found


def _table(rows: list[dict[str, Any]], reference: str) -> str:
    against = f"× {reference}"
    header = ["model", "training tok/s", against, "layers tok/s", against, "prefill tok/s", against]
    header += ["decode ms/tok", against, "peak MiB", "parameters M", "matrices M"]
    return markdown_table(header, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["model"]]
    for measure in ("training", "layers", "prefill"):
        speed = row[f"{measure}_tokens_per_second"]["median"]
        cells += [f"{speed:,.0f}", _ratio(row["speed_against_reference"][measure])]
    cells += [f"{row['decode_milliseconds_per_token']['median']:.2f}", _ratio(row["speed_against_reference"]["decode"])]
    peak = row["peak_memory_bytes"]
    cells.append("–" if peak is None else f"{peak / MEBIBYTE:,.0f}")
    return cells + [f"{row['parameters'][count] / 1e6:.2f}" for count in ("all", "weight_matrices")]


def _ratio(summary: dict[str, float]) -> str:
    return f"{summary['median']:.2f} ({summary['first_quartile']:.2f}–{summary['third_quartile']:.2f})"


def legend(settings: dict[str, Any]) -> str:
    """Return what the columns mean."""
    return (
        f"Medians of {settings['repeats']} interleaved rounds; × is the speed against the reference in the same round, "
        "median and quartiles, above 1 = faster. "
        f"Training: {settings['batch_size']} × {settings['tokens']} tokens a step; whole = forward, loss, backward, "
        "AdamW; layers = forward and backward of the blocks alone. "
        f"Decode: batch {settings['decode_batch_size']}, {settings['decode_tokens']} steps after "
        f"{settings['prompt_tokens']} tokens. "
        "Peak: of a training step, above the weights. Matrices: 2-D parameters without position tables."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: four panels of speed against the reference block, one of memory, one of parameters."""
    rows = results["results"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    dtypes = results["settings"]["dtype"]
    figure = new_figure(11, 2.4 + 0.5 * len(names) * (1 + len(dtypes)) / 2)
    panels = figure.subplots(2, 3, sharey=True)
    for panel, (measure, title) in zip(panels.flat, MEASURES.items(), strict=False):
        _draw_bars(panel, rows, names, dtypes, lambda row, measure=measure: row["speed_against_reference"][measure])
        panel.axvline(1, color="black", linewidth=1, linestyle="--", zorder=0)
        panel.set_title(title.capitalize())
        panel.set_xlabel(f"speed against {results['reference']} (×)")
    memory, parameters = panels.flat[4:]
    _draw_bars(memory, rows, names, dtypes, _peak_mebibytes)
    memory.set_title("Peak memory of a training step")
    memory.set_xlabel("above the weights (MiB)")
    # the same in every dtype
    one_dtype = [row for row in rows if row["dtype"] == dtypes[0]]
    _draw_bars(parameters, one_dtype, names, dtypes[:1], lambda row: row["parameters"]["all"] / 1e6, ("#888888",))
    parameters.set_title("Parameters")
    parameters.set_xlabel("millions")
    if len(dtypes) > 1:
        figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=len(dtypes))
    figure.suptitle(_caption(results), fontsize=11)
    return figure


def _draw_bars(
    panel: Any,
    rows: list[dict[str, Any]],
    names: list[str],
    dtypes: list[str],
    value: Callable,
    colors: Sequence[str] = COLORS,
) -> None:
    """Draw one bar per model and dtype. `value(row)` is a number, a summary with quartiles, or None if not measured."""
    thickness = 0.8 / len(dtypes)
    for row in rows:
        amount = value(row)
        if amount is None:
            panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color="gray")
            panel.set_xticks([])
            break
        summary = amount if isinstance(amount, dict) else dict.fromkeys(("median", *QUARTILES), amount)
        median, first, third = summary["median"], *(summary[quartile] for quartile in QUARTILES)
        order = dtypes.index(row["dtype"])
        height = names.index(row["model"]) + (order - (len(dtypes) - 1) / 2) * thickness
        whisker = [[median - first], [third - median]] if isinstance(amount, dict) else None
        label = row["dtype"] if row["model"] == names[0] else None
        panel.barh(height, median, 0.9 * thickness, xerr=whisker, color=colors[order], label=label, capsize=2)
        text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}" if whisker is None else f"{median:.2f}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        panel.annotate(text, (third, height), (6, 0), textcoords="offset points", va="center", bbox=box)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.margins(x=0.18)
    panel.spines[["top", "right"]].set_visible(False)


def _peak_mebibytes(row: dict[str, Any]) -> float | None:
    return None if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] / MEBIBYTE


def _caption(results: dict[str, Any]) -> str:
    settings = results["settings"]
    return (
        f"Width {settings['hidden_size']}, {settings['num_layers']} layers, {settings['num_heads']} heads, "
        f"{settings['batch_size']} × {settings['tokens']} tokens; {settings['repeats']} rounds: median, quartiles\n"
        f"{machine_line(results['machine'])}"
    )
