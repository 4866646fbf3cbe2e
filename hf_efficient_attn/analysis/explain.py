"""Explain which backend computes a pattern or a layer of a model and why, how many pairs there are, and their cost.

The first argument is an expression, JSON, a file with JSON, or a saved model: its folder or config.json, which says
heads, key heads, width, dtype and direction itself:
    hf-efficient-attn explain "band(256, 256) | global(0)" --tokens 8192 --training
    hf-efficient-attn explain path/to/model --layer 3 --tokens 32768 --device cuda

Lengths are in tokens, memory is in MiB. Pairs are those of all heads of one example. The cost is the estimated time
over that of the baseline that is named beside it: dense attention, or dense causal attention where the layer is causal.
Estimates are low: what `bench attention` measured on a CPU was 1.0 to 2.8 times as much.
Of a model the cost of all its layers is printed beside that of the one layer. With --json: {"model", "pattern", "call",
"backend", "remark", "reasons", "allowed_pairs", "computed_pairs", "total_pairs", "baseline", "relative_cost",
"memory_bytes", "costs_of", "notes", "beside", "exchange", "all_layers"}, where "remark" says what the backend computes,
"reasons" why not the others, "beside" is the same of the other heads of a layer in which some do something else, or
null, and "all_layers" is null for patterns, else {"num_layers", "relative_cost", "baseline"}.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_efficient_attn.analysis.model_sources import load_span_model
from hf_efficient_attn.analysis.pattern_sources import read_config, read_pattern
from hf_efficient_attn.attention.select import AUTO, BACKENDS
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.explain import explain
from hf_efficient_attn.integration.layer_patterns import PARTS

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    text = "an expression such as 'band(4, 4) | global(0)', JSON, a file with JSON, or the folder of a saved model"
    parser.add_argument("what", help=text)
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="number of queries (default %(default)s)")
    parser.add_argument("--key-tokens", type=int, metavar="N", help="number of keys (default: as many as queries)")
    parser.add_argument("--heads", type=int, metavar="N", help="number of query heads of a pattern (default 8)")
    text = "number of key heads of a pattern (default: as many as query heads)"
    parser.add_argument("--key-heads", type=int, metavar="N", help=text)
    parser.add_argument("--head-dim", type=int, metavar="N", help="width of a head of a pattern (default 64)")
    parser.add_argument(
        "--device", help="cpu, cuda, h100, h200, a100, ..., which this machine need not have (default cpu)"
    )
    text = "dtype of the inputs (default: that of the model, or float32)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    parser.add_argument("--cross", action="store_true", help="queries and keys are of different sequences")
    parser.add_argument("--training", action="store_true", help="ask for gradients")
    parser.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="dropout of attention weights (default %(default)s)"
    )
    parser.add_argument(
        "--backend", choices=[AUTO, *sorted(BACKENDS)], default=AUTO, help="backend to ask for (default %(default)s)"
    )
    parser.add_argument("--layer", type=int, default=0, help="index of the layer, if layers differ (default 0)")
    parser.add_argument("--part", choices=sorted(PARTS), help="part of an encoder-decoder (default encoder)")
    text = "number of processes that share the text: print how many bytes each sends in the layer (see shard_sequence)"
    parser.add_argument("--sequence-ranks", type=int, metavar="N", help=text)
    parser.add_argument("--causal", action="store_true", help="explain the causal form of a pattern")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def main(args: argparse.Namespace) -> None:
    """Print the explanation.

    Raises:
        EfficientAttentionError: no such pattern or model, lengths or heads it cannot have, a backend that cannot
            compute it.
    """
    config = read_config(args.what)
    if config is None:
        what: Any = read_pattern(args.what, args.layer)
        what = what.causal() if args.causal else what
        if args.part is not None:
            raise InputError(f"--part {args.part} is for models that are encoder-decoders; a pattern has no parts.")
    elif args.causal:
        raise InputError(f"--causal is for patterns; {args.what} is a model, which says itself whether it is causal.")
    else:
        is_folder = Path(args.what).is_dir()
        # learned spans are known from the weights alone
        what = load_span_model(args.what, seed=0) if is_folder and getattr(config, "span", None) else config
    explanation = explain(
        what,
        query_tokens=args.tokens,
        key_tokens=args.key_tokens,
        device=args.device,
        # spans are loaded in float32, whatever the model is saved in
        dtype=getattr(torch, args.dtype) if args.dtype else getattr(config, "dtype", None),
        num_heads=args.heads,
        num_key_heads=args.key_heads,
        head_dim=args.head_dim,
        training=args.training,
        dropout=args.dropout,
        backend=args.backend,
        layer=args.layer,
        cross=args.cross,
        part=args.part,
        sequence_ranks=args.sequence_ranks,
    )
    print(json.dumps(explanation.to_dict(), indent=1) if args.json else explanation)
