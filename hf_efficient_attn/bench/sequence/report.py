"""The table and the picture of `bench sequence`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.bench.sequence.contestants import ALL_GATHER, WAYS
from hf_efficient_attn.pictures import new_figure, plain_number

MEBIBYTE = 2**20
COLORS = ("#4477aa", "#99bbdd", "#ee8866", "#44bb99")


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables of bytes and of times, and what they mean."""
    settings = results["settings"]
    parts = [f"# A text of {settings['tokens']:,} tokens on several processes", machine_line(results["machine"])]
    for heading, text in sections(results).items():
        parts += [f"## {heading}", text]
    return "\n\n".join([*parts, legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    return {"Bytes": bytes_table(results), "Times": times_table(results)}


def bytes_table(results: dict[str, Any]) -> str:
    """Return what the process sends that sends most, by processes and way."""
    first = results["settings"]["gigabits"][0]
    rows = [row for row in results["results"] if row["gigabits"] == first]
    gathered = {row["processes"]: row for row in rows if row["way"] == ALL_GATHER}
    lines = [
        [
            f"{row['processes']} processes, {row['way']}",
            *(f"{row[name] / MEBIBYTE:,.2f}" for name in ("forward_bytes", "backward_bytes", "reduced_bytes")),
            f"{gathered[row['processes']]['forward_bytes'] / row['forward_bytes']:,.1f}×",
        ]
        for row in rows
    ]
    header = ["MiB sent by the busiest process", "forward", "backward", "added up", "fewer than all-gather"]
    return markdown_table(header, lines)


def times_table(results: dict[str, Any]) -> str:
    """Return the seconds of a forward and of both passes, by processes, link and way."""
    lines = [
        [
            f"{row['processes']} processes, {link(row['gigabits'])}, {row['way']}",
            *(
                cell
                for name in ("forward_seconds", "seconds")
                for cell in (f"{row[name]['median']:.2f}", f"{row[f'{name}_against_all_gather']['median']:.2f}×")
            ),
        ]
        for row in results["results"]
    ]
    header = ["seconds of the slowest process", "forward", "faster", "forward + backward", "faster"]
    return markdown_table(header, lines)


def link(gigabits: float) -> str:
    """Return the name of a link."""
    return f"{gigabits:g} Gbit/s" if gigabits else "one machine"


def legend(settings: dict[str, Any]) -> str:
    """Return what was measured, and what the columns mean."""
    heads = f"{settings['heads']} heads of {settings['head_dim']} ({settings['key_heads']} of keys)"
    return (
        f"One layer, {settings['pattern']}: {heads}, {settings['dtype']}, batch {settings['batch_size']}, "
        f"{settings['tokens']:,} tokens; gloo, torch threads in a process: {settings['threads']}. Medians of "
        f"{settings['repeats']} interleaved rounds; faster is against all-gather in the same round. Processes are on "
        "one machine; where a link is named, an exchange takes at least as long as its bytes would on it."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: bars of bytes, and of seconds of both passes, a panel each for every number of processes."""
    settings, rows = results["settings"], results["results"]
    counts = settings["processes"]
    figure = new_figure(11, 1.6 + 2.2 * len(counts))
    panels = figure.subplots(len(counts), 2, squeeze=False)
    for (sent, seconds), count in zip(panels, counts, strict=True):
        own = [row for row in rows if row["processes"] == count]
        first = [row for row in own if row["gigabits"] == settings["gigabits"][0]]
        draw_bars(sent, [row["way"] for row in first], [row["forward_bytes"] / MEBIBYTE for row in first], first)
        sent.set(title=f"{count} processes", xlabel="MiB sent forward by the busiest process")
        names = [f"{row['way']}, {link(row['gigabits'])}" for row in own]
        draw_bars(seconds, names, [row["seconds"]["median"] for row in own], own)
        seconds.set(title=f"{count} processes", xlabel="seconds, forward + backward")
    figure.suptitle(
        f"{settings['pattern']}, {settings['tokens']:,} tokens\n{machine_line(results['machine'])}", fontsize=11
    )
    return figure


def draw_bars(panel: Any, names: list[str], values: list[float], rows: list[dict[str, Any]]) -> None:
    """Draw a bar a row, its color that of its way."""
    colors = [COLORS[WAYS.index(row["way"])] for row in rows]
    panel.barh(range(len(values)), values, color=colors)
    for number, value in enumerate(values):
        panel.annotate(f" {value:,.2f}", (value, number), va="center", fontsize=8)
    panel.xaxis.set_major_formatter(plain_number)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.2)
    panel.spines[["top", "right"]].set_visible(False)
