"""Time and memory of learned attention spans, against all heads at the limit and against dense attention.

The authors' small network, with the spans of a trained one (`profile.py`), in five forms: `fixed`, all heads read the
whole limit; `adaptive`; `frozen`, the same spans as constants; `dynamic`, where each token has its own, around these;
`dense`, GPT-NeoX with torch's SDPA. All of a span limit take turns. A training step is forward, loss, backward and
AdamW on a segment of 512 tokens after a full memory; a decode step reads one token of one text, and of several side by
side, after a full cache. Times are in milliseconds, memory is in MiB, span limits are in tokens:
    hf-efficient-attn bench spans --limits 1024 4096 --positions rope
"""

import argparse
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.options import (
    add_attention_dropout,
    add_counts,
    add_results,
    add_step_options,
    check_attention_dropout,
    check_counts,
    device_settings,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.harness.report import (
    describe_machine,
    publish,
    resolve_device,
)
from hf_efficient_attn.bench.harness.timing import Case, clock_of, time_once, time_within
from hf_efficient_attn.bench.spans.cases import (
    ADAPTIVE,
    DENSE,
    FROZEN,
    MODELS,
    POSITIONS,
    Shape,
    build_model,
    build_training_step,
    cache_bytes,
    check_frozen,
    decode,
    full_cache,
    kept_keys,
    shorten,
    training_step,
    training_tokens,
)
from hf_efficient_attn.bench.spans.report import results_figure, results_markdown
from hf_efficient_attn.bench.spans.targets import TRAINING, Row, add_ratios, decode_measure
from hf_efficient_attn.models.spans.costs import average_span, span_flops

LIMITS = [1024, 2048, 4096, 8192]
# one text, for which every step reads all weights, and enough to share them
DECODE_BATCH_SIZES = [1, 8]
COUNTS = {
    "layers": (12, "layers; fewer are picked from all depths of the profile"),
    "hidden_size": (512, "width of the models"),
    "num_heads": (8, "attention heads"),
    "intermediate_size": (2048, "width of the MLP"),
    "segment_tokens": (512, "tokens that our models read in a training step"),
    "decode_tokens": (8, "tokens that are decoded for one sample of the time"),
    "batch_size": (1, "examples per training step"),
    "repeats": (10, "timed rounds, as far as there is time; a round runs every model once"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench spans`."""
    parser.add_argument(
        "--limits",
        nargs="+",
        type=int,
        default=LIMITS,
        metavar="S",
        help="span limits in tokens (default 1024 to 8192)",
    )
    parser.add_argument(
        "--positions", nargs="+", choices=POSITIONS, default=POSITIONS, help="positions of our models (default both)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="models to compare (default all)")
    add_counts(parser, COUNTS)
    parser.add_argument(
        "--decode-batch-sizes", nargs="+", type=int, default=DECODE_BATCH_SIZES, metavar="N",
        help="texts that are decoded side by side (default 1 8)",
    )  # fmt: skip
    add_attention_dropout(parser)
    add_step_options(parser, "all models", max_seconds=60, unit="span limit")
    parser.add_argument(
        "--memory-limits",
        nargs="*",
        type=int,
        default=LIMITS,
        metavar="S",
        help="span limits at which peak memory is measured (default 1024 to 8192)",
    )
    add_results(parser, "outputs/bench_spans")


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write spans.json, spans.md and spans.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a dropout out of range, frozen spans that compute something else,
            or CUDA without a device.
    """
    check_counts(args, COUNTS, "limits", "decode_batch_sizes")
    check_attention_dropout(args)
    set_threads(args)
    device = resolve_device(args.device)
    make_folder(args)
    results = measure(settings_of(args, device), device)
    publish(args, "spans", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "attention_dropout", "max_seconds")}
    settings |= device_settings(args, device)
    lists = {name: sorted(set(getattr(args, name))) for name in ("limits", "memory_limits", "decode_batch_sizes")}
    chosen = {name: list(dict.fromkeys(getattr(args, name))) for name in ("positions", "models")}
    return {**settings, **lists, **chosen}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `results` with a row per positions, limit and model."""
    shapes = [
        shape_of(settings, positions, limit, device)
        for positions in settings["positions"]
        for limit in settings["limits"]
    ]
    # first, while this process is small
    peaks = measure_memory(shapes, settings, device)
    rows: list[Row] = []
    for shape in logging.tqdm(shapes, desc="span limits", unit="limit", leave=False):
        rows += measure_shape(shape, settings)
    for row in rows:
        row["peak_memory_bytes"] = peaks.get((row["positions"], row["limit"], row["model"]))
    add_ratios(rows)
    return {"machine": describe_machine(device), "settings": settings, "results": rows}


def shape_of(settings: dict[str, Any], positions: str, limit: int, device: torch.device) -> Shape:
    """Return the shape of the models of one span limit."""
    names = ("hidden_size", "num_heads", "intermediate_size", "segment_tokens", "batch_size", "attention_dropout")
    sizes = {name: settings[name] for name in (*names, "dtype")}
    return Shape(positions=positions, limit=limit, num_layers=settings["layers"], device=device.type, **sizes)


def measure_memory(
    shapes: list[Shape], settings: dict[str, Any], device: torch.device
) -> dict[tuple[str, int, str], int]:
    """Return the peak bytes of a training step, beyond weights and memory, by positions, limit and model."""
    wanted = [(shape, name) for shape in shapes if shape.limit in settings["memory_limits"]
              for name in settings["models"]]  # fmt: skip
    peaks = {}
    for shape, name in logging.tqdm(wanted, desc="memory", unit="model", leave=False):
        arguments = {"name": name, "shape": asdict(shape)}
        peaks[shape.positions, shape.limit, name] = peak_memory(build_training_step, arguments, device)
    return peaks


def measure_shape(shape: Shape, settings: dict[str, Any]) -> list[Row]:
    """Return a row per model: what it costs by the formula, and `times` with {"milliseconds", "samples"} a measure.

    Training is per 1,000 tokens, decoding per step.
    """
    models = {name: build_model(name, shape) for name in settings["models"]}
    difference = check_frozen(models[ADAPTIVE], models[FROZEN], shape) if {ADAPTIVE, FROZEN} <= set(models) else None
    rows: list[Row] = []
    cases: dict[str, Case] = {}
    for name, model in models.items():
        rows.append({**describe(name, model, shape), "difference": difference if name == FROZEN else None})
        caches = {size: filled_cache(name, model, shape, size) for size in settings["decode_batch_sizes"]}
        num_texts, cache = next(iter(caches.items()))
        rows[-1]["cache_bytes"] = cache_bytes(cache) // num_texts
        its_cases = cases_of(name, model, caches, shape, settings["decode_tokens"])
        cases |= {f"{name} {measure}": case for measure, case in its_cases.items()}
    device = torch.device(shape.device)
    # the first steps make optimizer states and layouts
    for case in cases.values():
        time_once(case, device)
    limits = (settings["repeats"], settings["max_seconds"])
    timings = time_within(cases, *limits, shape.limit, device, clock_of(device))
    for row in rows:
        units = {TRAINING: row["training_tokens"] * shape.batch_size / 1000}
        units |= {decode_measure(num_texts): settings["decode_tokens"] for num_texts in settings["decode_batch_sizes"]}
        row["times"] = {measure: timings[f"{row['model']} {measure}"].record(count) for measure, count in units.items()}
    return rows


def filled_cache(name: str, model: PreTrainedModel, shape: Shape, num_texts: int) -> Cache:
    """Return a full cache of so many texts, with the room for new tokens that the first of them makes."""
    cache = full_cache(name, model, shape, num_texts)
    decode(model.eval(), cache, 1, num_texts)
    return cache


def cases_of(
    name: str, model: PreTrainedModel, caches: dict[int, Cache], shape: Shape, decode_tokens: int
) -> dict[str, Case]:
    """Return what is timed of a model, by measure."""
    step = training_step(name, model, shape)
    cases = {TRAINING: Case(lambda _: step(), model.train)}
    for num_texts, cache in caches.items():
        cases[decode_measure(num_texts)] = decode_case(model, cache, decode_tokens, num_texts, shape.limit)
    return cases


def decode_case(model: PreTrainedModel, cache: Cache, decode_tokens: int, num_texts: int, limit: int) -> Case:
    """Return the case of reading tokens one by one after a full cache."""

    def prepare() -> None:
        model.eval()
        shorten(cache, limit)

    return Case(lambda _: decode(model, cache, decode_tokens, num_texts), prepare)


def describe(name: str, model: PreTrainedModel, shape: Shape) -> Row:
    """Return the start of a row: which model, and what the formula says that it costs."""
    kept = kept_keys(model, shape)
    return {
        "positions": shape.positions,
        "limit": shape.limit,
        "model": name,
        "kept_keys": kept,
        "average_span": None if name == DENSE else average_span(model),
        "flops_per_token": span_flops(shape.config("fixed"), kept),
        "training_tokens": training_tokens(name, shape),
    }
