"""Every picture of `pictures/`, by its name: a function that makes it from committed data; for `figures.py`."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import figures_of_training
import pictures_of_families
from committed import CARDS, files, results

from hf_efficient_attn.analysis.draw import patterns_figure
from hf_efficient_attn.analysis.pattern_sources import read_pattern
from hf_efficient_attn.analysis.signal_report import signal_figure
from hf_efficient_attn.analysis.span_report import spans_figure
from hf_efficient_attn.analysis.signal_report import SignalReport
from hf_efficient_attn.analysis.span_report import SpanCost, SpanReport
from hf_efficient_attn.bench.attention.figure import results_figure as attention_figure
from hf_efficient_attn.bench.blocks.report import results_figure as blocks_figure
from hf_efficient_attn.bench.content.report import results_figure as content_figure
from hf_efficient_attn.bench.encoders.report import results_figure as encoders_figure
from hf_efficient_attn.bench.mechanisms.report import results_figure as mechanisms_figure
from hf_efficient_attn.bench.models.report import results_figure as models_figure
from hf_efficient_attn.bench.sequence.report import results_figure as sequence_figure
from hf_efficient_attn.bench.spans.report import results_figure as bench_spans_figure

# what experiments draw at the end of a run
sys.path.append(str(CARDS.parent / "examples" / "experiments"))

from comparison.list_scores import draw_listops  # noqa: E402
from comparison.marked_vectors import draw_errors  # noqa: E402
from comparison.named_sections import draw_named  # noqa: E402
from comparison.span_curves import draw_span_curves  # noqa: E402
from comparison.tree_reading import draw_trees  # noqa: E402

PIXELS_PER_INCH, PIXELS_PER_INCH_OF_FAMILIES = 160, 100
# title -> an expression that `hf-efficient-attn draw` draws, too
PATTERNS = {
    "Band": "band(6, 6)",
    "Dilated": "dilated(24, 24, 6)",
    "Strided": "strided(6)",
    "BlockLocal": "block_local(12)",
    "Band | GlobalTokens": "band(4, 4) | global(0, 20, 41)",
    "BigBird": "bigbird(3, 2)",
    "Band | GlobalTokens, causal": "(band(16, 0) | global(0)) & causal()",
    "SpanTree": "span_tree(2)",
}
PRESETS = {
    "longformer": "band(5, 5) | global(0)",
    "longformer, causal": "(band(10, 0) | global(0)) & causal()",
    "bigbird_itc": "bigbird(4, 2)",
    "bigbird_itc, causal": "bigbird(4, 2, 0, 'seeded', True)",
    "block_local": "block_local(8)",
    "strided": "(band(6, 0) | strided(6)) & causal()",
    "sliding, causal": "band(8, 0)",
    "longformer, dilated": "dilated(20, 20, 4)",
}


def drawn_patterns(expressions: Mapping[str, str], num_tokens: int) -> Any:
    """Return the picture of patterns by title."""
    return patterns_figure({title: read_pattern(text).draw(num_tokens) for title, text in expressions.items()})


def signal_propagation() -> Any:
    """Return the picture of signals through models at their start."""
    return signal_figure([SignalReport.from_dict(model) for model in results("signal_propagation")["models"]])


def spans(kind: str) -> Any:
    """Return the picture of the spans that a model has learned."""
    found = results(f"spans_{kind}")
    report = SpanReport.from_dict(found)
    costs = [report.cost, *(SpanCost(**cost) for cost in found["compared"])]
    short = [replace(cost, model=Path(cost.model).name) for cost in costs]
    return spans_figure(
        replace(report, cost=replace(report.cost, model="A model of bytes")), short, found["settings"]["text"]
    )


def pixels_per_inch(file: Path) -> int:
    """Return the resolution of a picture; those of families stand in the cells of a table."""
    return PIXELS_PER_INCH_OF_FAMILIES if file.parent.name == "families" else PIXELS_PER_INCH


PICTURES: dict[str, Callable[[], Any]] = {
    "patterns": partial(drawn_patterns, PATTERNS, 63),
    "sparse_presets": partial(drawn_patterns, PRESETS, 48),
    "signal_propagation": signal_propagation,
    "spans": partial(spans, "adaptive"),
    "spans_dynamic": partial(spans, "dynamic"),
    "span_curves": lambda: draw_span_curves(results("compare_spans")["kinds"], by=["step"]),
    "compare_blocks": lambda: figures_of_training.learning_figure(results("compare_blocks")),
    "sparsify_llama": lambda: figures_of_training.llama_figure(results("sparsify_llama")),
    "bench_attention": lambda: attention_figure(results("attention")),
    "bench_blocks": lambda: blocks_figure(results("blocks")),
    "bench_content": lambda: content_figure(results("content")),
    "bench_models": lambda: models_figure(results("models")),
    "bench_sequence": lambda: sequence_figure(results("sequence")),
    "bench_spans": lambda: bench_spans_figure(results("spans")),
    "compare_structure": lambda: draw_named(results("compare_structure")),
    "masked_summation": lambda: draw_errors(results("masked_summation")),
    "families/sparse_transformer": pictures_of_families.sparse_transformer,
    "families/sparse_seq2seq": pictures_of_families.sparse_seq2seq,
    "families/adaptive_span": lambda: pictures_of_families.adaptive_span(
        SpanReport.from_dict(results("spans_adaptive"))
    ),
    "families/simplified_transformer": pictures_of_families.simplified_transformer,
    "families/efficient_reformer": pictures_of_families.efficient_reformer,
    "families/routing_transformer": pictures_of_families.routing_transformer,
    "families/star_transformer": pictures_of_families.star_transformer,
    "families/etc_transformer": pictures_of_families.etc_transformer,
    "families/bp_transformer": pictures_of_families.bp_transformer,
    "families/compressed_transformer": pictures_of_families.compressed_transformer,
    "families/any_model": pictures_of_families.any_model,
}
# of results that may not be committed yet
LATER: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bench_etc": ("etc", encoders_figure),
    "bench_mechanisms": ("mechanisms", mechanisms_figure),
    "bench_mechanisms_causal": ("mechanisms_causal", mechanisms_figure),
    "bench_star": ("star", encoders_figure),
    "bench_trees": ("trees", encoders_figure),
    "compare_trees": ("compare_trees", draw_trees),
    "listops": ("listops", draw_listops),
    "listops_long": ("listops_long", draw_listops),
}
PICTURES |= {
    name: partial(lambda draw, source: draw(results(source)), draw, source)
    for name, (source, draw) in LATER.items()
    if files(source)
}
