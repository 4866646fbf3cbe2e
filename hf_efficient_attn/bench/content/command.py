"""Time and memory of keys chosen by content, against dense attention and transformers' Reformer.

One causal layer each, projections included, which take turns: `dense`, torch's SDPA; `projections`, the linear maps of
the Reformers alone, which they take at least; `transformers_reformer`, the LSH attention in transformers; `reformer`,
ours; `routing`, heads that read their k-means cluster; `block_top_k`, the blocks of keys that fit a query best (MoBA);
`chosen_tokens`, keys that are given to every query (DSA), drawn at random from its past; `nearby_tokens`, such keys
that lie before the query or are shared with its neighbours. A training step is a forward and a backward pass. Then the
memory of Reformer layers against their number, reversible and plain. Times are in milliseconds, memory is in MiB,
lengths are in tokens:
    hf-efficient-attn bench content --lengths 1024 4096 16384 --layers dense reformer
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers.utils import logging

from hf_efficient_attn.bench.content.cases import (
    DENSE,
    IN_TREE,
    LAYERS,
    NEARBY,
    TOKENS,
    Shape,
    build_layer,
    build_training_step,
    training_step,
)
from hf_efficient_attn.bench.content.depth import STACKS, build_stack_step
from hf_efficient_attn.bench.content.report import results_figure, results_markdown
from hf_efficient_attn.bench.content.targets import Row, add_ratios
from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.options import (
    add_counts,
    add_results,
    add_step_options,
    check_counts,
    device_settings,
    fill_options,
    leave_open,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.harness.report import describe_machine, publish, resolve_device
from hf_efficient_attn.bench.harness.steps import Contestants
from hf_efficient_attn.errors import InputError

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
MEMORY_LENGTHS = [4096, 16384, 65536]
DEPTHS = [2, 4, 8, 12]
# {name: (default, help)}; the first are fields of `Shape`
SIZES = {
    "heads": (8, "heads"),
    "head_dim": (64, "width of a head"),
    "batch_size": (1, "texts"),
    "hashes": (1, "rounds of hashing of the Reformers"),
    "hash_chunk_tokens": (64, "tokens of a chunk of the Reformers; lengths are multiples of it"),
    "cluster_tokens": (256, "tokens of its cluster that a routing head reads at most"),
    "block_tokens": (512, "tokens of a block of block_top_k"),
    "chosen_blocks": (3, "blocks that a query of block_top_k reads"),
    "chosen_tokens": (256, "keys of a query of chosen_tokens and nearby_tokens"),
}
COUNTS = {
    **SIZES,
    "dense_limit": (16384, "longest text of dense attention"),
    "peer_limit": (16384, "longest text of transformers' Reformer"),
    "tokens_limit": (16384, "longest text of chosen_tokens and nearby_tokens"),
    "depth_tokens": (4096, "tokens of the text of the stacks of layers"),
    "repeats": (10, "timed rounds, as far as there is time; a round runs every layer once"),
}
QUICK = {"lengths": [1024, 4096], "memory_lengths": [4096], "depths": [2, 4], "repeats": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench content`."""
    lists = {
        "lengths": (LENGTHS, "lengths in tokens (default 1024 to 65536)"),
        "memory_lengths": (
            MEMORY_LENGTHS,
            "which of the lengths peak memory is measured at (default 4096 16384 65536)",
        ),
        "depths": (DEPTHS, "numbers of layers whose memory is measured (default 2 4 8 12)"),
    }
    for name, (default, text) in lists.items():
        how = "+" if name == "lengths" else "*"
        parser.add_argument(f"--{name.replace('_', '-')}", nargs=how, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="layers to compare (default all)"
    )
    add_counts(parser, COUNTS)
    add_step_options(parser, "all layers", max_seconds=30)
    parser.add_argument(
        "--quick", action="store_true", help="unless said otherwise, two lengths, two depths and two rounds"
    )
    add_results(parser, "outputs/bench_content")
    leave_open(parser, *QUICK)


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write content.json, content.md and content.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a length that the Reformers cannot cut into chunks, or CUDA without a
            device.
    """
    fill_options(args, QUICK)
    check_counts(args, COUNTS, "lengths", *(name for name in ("memory_lengths", "depths") if getattr(args, name)))
    set_threads(args)
    for tokens in (*args.lengths, *args.memory_lengths):
        if IN_TREE in args.layers and tokens % args.hash_chunk_tokens:
            raise InputError(
                f"{IN_TREE} needs a multiple of hash_chunk_tokens={args.hash_chunk_tokens} tokens, not {tokens}. Give "
                "such lengths, or leave it out of --layers."
            )
    device = resolve_device(args.device)
    make_folder(args)
    results = measure(settings_of(args, device), device)
    publish(args, "content", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "max_seconds")}
    settings |= device_settings(args, device)
    lists = {name: sorted(set(getattr(args, name))) for name in ("lengths", "memory_lengths", "depths")}
    return {**settings, **lists, "layers": [name for name in LAYERS if name in args.layers]}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `results` with a row per length and layer, `depth`."""
    # first, while this process is small
    depth = measure_depth(settings, device)
    contestants = Contestants("layer", shape_of, layers_of, build_layer, training_step, build_training_step)
    rows = contestants.measure(settings, device)
    add_ratios(rows)
    return {"machine": describe_machine(device), "settings": settings, "results": rows, "depth": depth}


def shape_of(tokens: int, settings: Mapping[str, Any], device: torch.device) -> Shape:
    """Return the shape of the layers at one length."""
    sizes = {name: settings[name] for name in (*SIZES, "dtype")}
    return Shape(tokens=tokens, device=device.type, **sizes)


def layers_of(tokens: int, settings: Mapping[str, Any]) -> list[str]:
    """Return the layers that are measured at a length."""
    limits = {DENSE: settings["dense_limit"], IN_TREE: settings["peer_limit"]}
    limits |= dict.fromkeys((TOKENS, NEARBY), settings["tokens_limit"])
    return [name for name in settings["layers"] if tokens <= limits.get(name, tokens)]


def measure_depth(settings: dict[str, Any], device: torch.device) -> list[Row]:
    """Return the peak bytes of a training step beyond weights and their gradients, by number of layers and stack."""
    shape = asdict(shape_of(settings["depth_tokens"], settings, device))
    rows = [{"layers": count, "stack": kind} for count in settings["depths"] for kind in STACKS]
    for row in logging.tqdm(rows, desc="memory against depth", unit="stack", leave=False):
        arguments = {"kind": row["stack"], "num_layers": row["layers"], "shape": shape}
        row["peak_memory_bytes"] = peak_memory(build_stack_step, arguments, device)
    return rows
