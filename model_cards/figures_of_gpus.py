"""The table of `gpu_kernels.py`, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table

# of a pair and a number of its head: two products, each a multiplication and an addition; backward there are five
FLOPS, BACKWARD = 4, 2.5
NONE = "–"


def kernels(found: dict[str, Any]) -> str:
    """Return the times of all ways, and TFLOP/s of the allowed pairs."""
    lines = []
    for row in found["rows"]:
        flops = FLOPS * row["num_pairs"] * row["head_dim"]
        speeds = [
            NONE if name not in row else f"{factor * flops / row[name] / 1e9:,.0f}"
            for name, factor in (("forward", 1.0), ("backward", BACKWARD))
        ]
        times = [NONE if name not in row else f"{row[name]:.2f}" for name in ("forward", "backward", "both")]
        what = [row["way"], row["pattern"], f"{row['tokens']:,}", str(row["head_dim"])]
        lines.append([*what, *times, " / ".join(speeds)])
    header = ["way", "pattern", "tokens", "D", "forward, ms", "backward, ms", "both, ms", "TFLOP/s"]
    said = f"{machine_line(found['machine'])}. {found['note']}".strip()
    return f"{markdown_table(header, lines)}\n\n*{said}*"
