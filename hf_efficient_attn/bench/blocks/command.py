"""Speed, memory and size of the blocks beside each other and beside transformers' GPT-2, all of one shape.

All models are held at once and timed in turns: in float32 this takes about 12 bytes for each of their
parameters, weights and AdamW. Each step is one of real training, in the chosen dtype throughout. Speeds are in tokens
a second, memory is in MiB:
    hf-efficient-attn bench blocks --quick
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import logging

from hf_efficient_attn.bench.blocks.counts import counts_table, paper_counts
from hf_efficient_attn.bench.blocks.models import (
    GPT2,
    Shape,
    build_model,
    build_training_step,
    count_parameters,
    decode_case,
    layers_case,
    prefill_case,
    training_case,
)
from hf_efficient_attn.bench.blocks.report import results_figure, results_markdown
from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.options import (
    add_counts,
    add_device,
    add_results,
    check_counts,
    fill_options,
    leave_open,
    make_folder,
    refuse_given,
)
from hf_efficient_attn.bench.harness.report import (
    describe_machine,
    publish,
    resolve_device,
)
from hf_efficient_attn.bench.harness.timing import Case, Timing, time_interleaved
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES

REFERENCE = "pre_ln"
# the models share their code: torch.compile counts one compilation of it per model, mode and length
RECOMPILE_LIMIT = 64
DTYPES = ("float32", "bfloat16")
COUNTS = {
    "hidden_size": (768, "width of the models"),
    "num_layers": (6, "blocks per model; SAS keeps W^V in the first alone, so more depth helps it slightly"),
    "num_heads": (12, "attention heads"),
    "intermediate_size": (3072, "width of the MLP"),
    "vocab_size": (8192, "rows of the tied embedding"),
    "batch_size": (8, "sequences per training step and prefill"),
    "tokens": (128, "tokens per sequence in training and prefill"),
    "prompt_tokens": (128, "tokens in the cache before decoding"),
    "decode_tokens": (32, "greedy steps per repeat"),
    "decode_batch_size": (1, "sequences decoded at once"),
    "repeats": (10, "timed rounds; a round runs every model once"),
}
QUICK = {"blocks": ["pre_ln", "sas_p"], "num_layers": 2, "repeats": 5, "no_memory": True}
# options of what is measured, for which `--counts` has no use
NOT_COUNTED = ("blocks", *COUNTS, "hidden_act", "dtype", "compile", "no_memory", "no_gpt2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench blocks`."""
    parser.add_argument(
        "--blocks",
        nargs="+",
        choices=list(BLOCK_STYLES),
        default=list(BLOCK_STYLES),
        help="blocks to compare (default all)",
    )
    add_counts(parser, COUNTS)
    parser.add_argument(
        "--hidden-act",
        choices=sorted(ACT2FN),
        default="relu",
        metavar="NAME",
        help="activation of all models, GPT-2 too, as transformers calls it (default relu)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=["float32"],
        help="dtype of weights and activations (default float32)",
    )
    add_device(parser)
    parser.add_argument("--compile", action="store_true", help="run everything through torch.compile")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--no-gpt2", action="store_true", help="leave transformers' GPT-2 out")
    parser.add_argument(
        "--quick", action="store_true", help="unless said otherwise, two blocks and GPT-2 of two layers"
    )
    parser.add_argument("--counts", action="store_true", help="only print the paper's parameter counts")
    add_results(parser, "outputs/bench_blocks")
    leave_open(parser, *NOT_COUNTED)


def main(args: argparse.Namespace) -> None:
    """Measure, print the table, and write blocks.json, blocks.md and blocks.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a shape no model can have, CUDA without a CUDA device, or options of
            what is measured beside `--counts`.
    """
    if args.counts:
        refuse_given(args, "--counts", NOT_COUNTED)
        counts = paper_counts()
        print(json.dumps(counts, indent=2) if args.json else counts_table(counts))
        return
    fill_options(args, QUICK)
    check_counts(args, COUNTS)
    for block in args.blocks:
        shape_of(args).config(block)
    make_folder(args)
    results = measure(args, resolve_device(args.device))
    publish(args, "blocks", results, results_markdown(results), results_figure)


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `reference`, `results`, `pre_ln_against_gpt2`.

    `results` has a row per model and dtype. The reference of its ratios is `pre_ln`, or else the first block given.
    """
    settings = settings_of(args)
    blocks = settings["blocks"]
    reference = REFERENCE if REFERENCE in blocks else blocks[0]
    names = blocks if args.no_gpt2 else [*blocks, GPT2]
    rows, against_gpt2 = [], {}
    for dtype in settings["dtype"]:
        peaks = measure_memory(args, names, dtype, device)
        building = logging.tqdm(names, desc=f"building in {dtype}", unit="model", leave=False)
        models = {name: build_model(name, shape_of(args), dtype, device, args.compile) for name in building}
        timings = measure_speed(args, models, device)
        for name in names:
            row = {"model": name, "dtype": dtype, **speeds(args, timings, name), "peak_memory_bytes": peaks[name]}
            row["speed_against_reference"] = ratios(timings, name, reference)
            rows.append({**row, "parameters": count_parameters(models[name])})
        if {REFERENCE, GPT2} <= set(names):
            against_gpt2[dtype] = ratios(timings, REFERENCE, GPT2)
    return {
        "machine": describe_machine(device),
        "settings": settings,
        "reference": reference,
        "results": rows,
        "pre_ln_against_gpt2": against_gpt2,
    }


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the shape that all models share; its position table is as long as the longest sequence."""
    return Shape(
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        intermediate_size=args.intermediate_size,
        vocab_size=args.vocab_size,
        num_positions=max(args.tokens, args.prompt_tokens + args.decode_tokens),
        hidden_act=args.hidden_act,
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "hidden_act", "compile")}
    return {**settings, "blocks": list(dict.fromkeys(args.blocks)), "dtype": list(dict.fromkeys(args.dtype))}


def measure_speed(
    args: argparse.Namespace, models: dict[str, PreTrainedModel], device: torch.device
) -> dict[str, dict[str, Timing]]:
    """Return measure → model → timing; the models take turns within each measure."""
    size = (args.batch_size, args.tokens)
    builders: dict[str, Callable[[PreTrainedModel], Case]] = {
        "training": lambda model: training_case(model, *size),
        "layers": lambda model: layers_case(model, *size, args.compile),
        "prefill": lambda model: prefill_case(model, *size),
        "decode": lambda model: decode_case(model, args.decode_batch_size, args.prompt_tokens, args.decode_tokens),
    }
    warmup = 3 if args.compile or device.type == "cuda" else 1
    timings = {}
    for name, build in builders.items():
        torch.compiler.reset()
        cases = {model_name: build(model) for model_name, model in models.items()}
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            timings[name] = time_interleaved(cases, args.repeats, device, warmup, description=name)
    return timings


def measure_memory(
    args: argparse.Namespace, names: list[str], dtype: str, device: torch.device
) -> dict[str, int | None]:
    """Return model → peak bytes of a training step above the weights, or None if not asked for."""
    if args.no_memory:
        return dict.fromkeys(names)
    arguments = {
        "shape": asdict(shape_of(args)),
        "dtype": dtype,
        "device": str(device),
        "is_compiled": args.compile,
        "batch_size": args.batch_size,
        "tokens": args.tokens,
    }
    progress = logging.tqdm(names, desc="memory", unit="model", leave=False)
    return {name: peak_memory(build_training_step, {"name": name, **arguments}, device) for name in progress}


def speeds(args: argparse.Namespace, timings: dict[str, dict[str, Timing]], name: str) -> dict[str, dict[str, float]]:
    """Return tokens per second of a model in training and prefill, and its milliseconds per decoded token."""
    tokens = args.batch_size * args.tokens
    result = {f"{key}_tokens_per_second": timings[key][name].speed(tokens) for key in ("training", "layers", "prefill")}
    return {**result, "decode_milliseconds_per_token": timings["decode"][name].duration(args.decode_tokens)}


def ratios(timings: dict[str, dict[str, Timing]], name: str, other: str) -> dict[str, dict[str, float]]:
    """Return measure → how many times faster `name` is than `other`."""
    return {measure: by_model[name].speed_against(by_model[other]) for measure, by_model in timings.items()}
