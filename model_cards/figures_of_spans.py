"""The table of `compare_spans.py`, and sentences on how far its models read, for `figures.py`."""

from typing import Any

from committed import results

from hf_efficient_attn.analysis.span_report import SpanReport
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table

# a head that reads so many keys beyond its ramp has hardly grown
HARDLY_KEYS = 8


def kinds(found: dict[str, Any]) -> str:
    """Return what was measured of each kind of span, and of a fixed one of 64."""
    short = results("compare_spans_fixed_64")["kinds"]["fixed"]
    rows = {**found["kinds"], f"fixed at {short['max_span']:,}": short}
    lines = [
        [
            kind,
            f"{result['bits_per_byte']:.3f}",
            f"{result['average_span']:,.0f}",
            f"{result['flops_per_token'] / 1e6:.2f}",
        ]
        for kind, result in rows.items()
    ]
    header = ["span", "bits per byte", "average span", "million multiply-adds a byte"]
    num_steps, data = short["num_steps"], found["data"]
    return f"""{markdown_table(header, lines)}

{num_steps:,} steps of {short["train_tokens"] // num_steps:,} bytes of {data["source"]}, one seed; tested on \
{data["test_bytes"]:,} bytes. *{machine_line(found["machine"])}*"""


def heads(found: dict[str, Any]) -> str:
    """Return in a sentence how far the heads of a model read."""
    report = SpanReport.from_dict(found)
    keys = sorted(keys for layer in report.layers for keys in layer.keys)
    num_short = sum(each <= report.ramp + HARDLY_KEYS for each in keys)
    longest = ", ".join(f"{max(layer.keys):,}" for layer in report.layers)
    return (
        f"Of {len(keys)} heads {num_short} have hardly grown beyond the ramp of {report.ramp} keys; the longest of "
        f"each layer, from the first on, reads {longest} keys. `{found['command']}`"
    )


def along_text(found: dict[str, Any]) -> str:
    """Return in a sentence how far a dynamic model reads in the text of its picture."""
    cost, text = SpanReport.from_dict(found).cost, found["settings"]["text"]
    (beside,) = (each for each in results("spans_adaptive")["compared"] if each["kind"] == cost.kind)
    tested = results("compare_spans")["kinds"][cost.kind]
    return (
        f"Over {text} it reads {cost.average_span:,.1f} keys on average, {cost.max_span:,} at most. The picture above "
        f"has {beside['average_span']:,.1f}, over all of it, of which this one leaves out the end; the table has "
        f"{tested['average_span']:,.1f}, over the code it was tested on. Multiply-adds are those of these averages: "
        f"{cost.flops_per_token:,.0f}, {beside['flops_per_token']:,.0f} and {tested['flops_per_token']:,.0f}. "
        f"`{found['command']}`"
    )
