"""The tables of `bench attention --profile`, each with the sentence that says what limits the figure."""

from itertools import pairwise
from typing import Any

from hf_efficient_attn.bench.attention.summary import Row
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table

# figures of which each two neighbouring calls are compared
COMPARED = ("time", "growth")
GRANULARITY = "block granularity"
MEANINGS = {
    GRANULARITY: "scores computed that the pattern does not allow",
    "kernel speed": "the kernel is slower per score on these blocks than on the rows of dense attention",
    "kernel in place": "the kernel is slower within the call than alone (cold data, or masks evaluated in the kernel)",
    "kernel share": "time outside the kernel",
}
TITLES = {"forward": "forward", "forward_backward": "forward + backward"}


def profile_markdown(results: dict[str, Any]) -> str:
    """Return all sections as Markdown."""
    settings = results["settings"]
    shape = f"{settings['batch_size']} × {settings['num_heads']} heads of {settings['head_dim']}, {settings['dtype']}"
    parts = [f"# Where the time of attention goes: {shape}", machine_line(results["machine"]), legend(results)]
    for case in results["cases"]:
        parts += case_section(case)
    for figure in COMPARED:
        for first, second in pairwise(case for case in results["cases"] if case["figure"] == figure):
            parts += comparison_section(first, second)
    for layout in results["layouts"]:
        parts += layout_section(layout, results["layout_target"])
    return "\n\n".join(parts)


def legend(results: dict[str, Any]) -> str:
    """Return what the figures mean."""
    threads = results["machine"]["torch_threads"]
    return (
        f"`hf-efficient-attn bench attention --profile` with {threads} thread{'s' if threads > 1 else ''} "
        "(`OMP_NUM_THREADS`; other work on the machine moves the ratios of a single thread less than those of "
        "several, but it moves them, and they differ from the benchmark's). A round times the call, dense attention, "
        "the call under torch.profiler, and its kernel calls alone; of each measurement the least of all rounds "
        "counts. Factors: block granularity, allowed pairs over computed ones; kernel speed, scores per second of the "
        "kernel calls alone over those of dense attention; kernel in place, their time alone over that within the "
        "call; kernel share, of the whole time. Their product is the efficiency but for the residual, which is noise "
        "and the cost of profiling. Alone: each call repeated at once, its data still in the caches; of flex, which "
        "is one call: the time per score of a pattern of whole blocks, where no mask is evaluated. Dense attention "
        "beyond "
        f"{results['dense_tokens']:,} tokens is extrapolated from there by its pairs."
    )


def case_section(case: Row) -> list[str]:
    """Return heading, sentence and tables of one call."""
    heading = f"## {case['pattern']}, {case['backend']}, {case['tokens']:,} tokens, {TITLES[case['measure']]}"
    kernels = [
        [
            f"{kernel['direction']}, {kernel['queries']:,} × {kernel['keys']:,}",
            f"{kernel['calls']:,}",
            f"{kernel['pairs']:,}",
            f"{kernel['milliseconds']:.3g}",
            f"{kernel['speed']:.2f}",
        ]
        for kernel in case["kernels"]
    ]
    kernel_table = markdown_table(
        ["kernel, queries × keys of a block", "calls", "pairs", "ms alone", "speed per pair against dense"], kernels
    )
    return [heading, limit_sentence(case), factor_table(case), kernel_table, purpose_table(case)]


def limit_sentence(case: Row) -> str:
    """Return what was reached, and the largest loss: what it is and what the figure would be without it."""
    losses = losses_of(case)
    name = min(losses, key=lambda key: losses[key])
    reached, target = figure_of(case)
    text = f"Computed by {case['computed_by']} in {case['milliseconds']:.3g} ms: {reached}"
    if target is not None:
        text += f" (target {target})"
    better = case["speed" if case["figure"] == "speed" else "efficiency"] / losses[name]
    unit = f"{better:.2f} times as fast as dense" if case["figure"] == "speed" else f"{better:.0%}"
    text += f". The largest loss is {name} (× {losses[name]:.2f}), without it alone {unit}: {MEANINGS[name]}"
    if name == "kernel share":
        others = {purpose: value for purpose, value in case["purposes"].items() if not purpose.startswith("kernel")}
        text += f", most of it {max(others, key=lambda key: others[key])}"
    return f"{text}."


def losses_of(case: Row) -> dict[str, float]:
    """Return the factors that count as losses; dense attention with a mask means to compute all pairs."""
    return {
        name: factor for name, factor in case["factors"].items() if case["figure"] != "speed" or name != GRANULARITY
    }


def figure_of(case: Row) -> tuple[str, str | None]:
    """Return the figure that has a target, and the target, as text; those of `COMPARED` belong to two calls."""
    if case["figure"] == "speed":
        return f"{case['speed']:.2f} times the speed of dense attention", f"{case['target']:.2f}"
    efficiency = f"{case['efficiency']:.0%} useful-pair efficiency"
    return efficiency, None if case["figure"] in COMPARED else f"{case['target']:.0%}"


def factor_table(case: Row) -> str:
    """Return the factors, the residual and the efficiency that they multiply up to."""
    named = {**case["factors"], "residual": case["residual"], "= efficiency": case["efficiency"]}
    return markdown_table(["factor", *named], [["", *(f"{value:.3f}" for value in named.values())]])


def purpose_table(case: Row) -> str:
    """Return the profiled time by purpose, largest first."""
    total = sum(case["purposes"].values())
    ordered = sorted(case["purposes"].items(), key=lambda item: -item[1])
    lines = [[name, f"{value:.3g}", f"{value / total:.1%}"] for name, value in ordered]
    return markdown_table(["where", "ms", "share"], lines)


def comparison_section(first: Row, second: Row) -> list[str]:
    """Return how much longer every part takes in the second of two calls: at another length, or of another pattern."""
    ratio = second["milliseconds"] / first["milliseconds"]
    expected = second["tokens"] / first["tokens"]
    parts = [(name, first["purposes"].get(name, 0.0), time) for name, time in second["purposes"].items()]
    added = {name: after - expected * before for name, before, after in parts}
    lines = [
        [name, f"{before:,.3g}", f"{after:,.3g}", f"{after / before:.2f}" if before else "–"]
        for name, before, after in parts
    ]
    title = TITLES[second["measure"]]
    if first["pattern"] == second["pattern"]:
        heading = f"Growth from {first['tokens']:,} to {second['tokens']:,} tokens: {first['pattern']}, "
        heading += f"{second['backend']}, {title}"
        names = [f"{case['tokens']:,}" for case in (first, second)]
    else:
        names = [first["pattern"], second["pattern"]]
        heading = f"{names[1]} against {names[0]}: {second['backend']}, {second['tokens']:,} tokens, {title}"
    return [
        f"## {heading}",
        f"{ratio:.2f} times the time (target {second['target']:.2f}). {added_most(added, expected)}",
        markdown_table(["where", *(f"ms, {name}" for name in names), "×"], lines),
    ]


def added_most(added: dict[str, float], expected: float) -> str:
    """Return which part takes most milliseconds beyond the expected multiple of its time in the first call.

    >>> added_most({"masks": 1.5, "kernel, forward": -3.0}, 2.0)
    'In the profiled runs, most beyond 2 × the first call is added by masks: +1.5 ms.'
    """
    most = max(added, key=lambda name: added[name])
    if added[most] <= 0.0:
        return f"In the profiled runs, no part takes more than {expected:g} × its time in the first call."
    return (
        f"In the profiled runs, most beyond {expected:g} × the first call is added by {most}: {added[most]:+,.3g} ms."
    )


def layout_section(layout: Row, target: float) -> list[str]:
    """Return what building a layout costs, against the forward pass it is first built for."""
    steps = dict(layout["milliseconds"])
    forward = steps.pop("forward pass")
    again = steps.pop("finding it again")
    share = sum(steps.values()) / forward
    most = max(steps, key=lambda name: steps[name])
    lines = [[name, f"{value:,.3g}", f"{value / forward:.2%}"] for name, value in layout["milliseconds"].items()]
    return [
        f"## Building the layout: {layout['pattern']}, {layout['tokens']:,} tokens",
        f"{share:.1%} of a forward pass (target {target:.0%}), once per length: {most} takes the most; later calls "
        f"find it in {again:.2g} ms.",
        markdown_table(["step", "ms", "of a forward pass"], lines),
    ]
