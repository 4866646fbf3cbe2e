"""Explain which backend computes a pattern and why, how many pairs there are, and what they cost.

The pattern is an expression, JSON, or a file with JSON, also the config.json of a model:
    hf-efficient-attn explain "band(256, 256) | global(0)" --tokens 8192 --training
"""

import argparse

import torch

from hf_efficient_attn.analysis.draw import read_pattern
from hf_efficient_attn.attention.explain import explain
from hf_efficient_attn.attention.select import AUTO, BACKENDS

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("pattern", help="an expression such as 'band(4, 4) | global(0)', JSON, or a file with JSON")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="number of queries (default %(default)s)")
    parser.add_argument("--key-tokens", type=int, metavar="N", help="number of keys (default: as many as queries)")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="number of query heads (default %(default)s)")
    parser.add_argument(
        "--key-heads", type=int, metavar="N", help="number of key heads (default: as many as query heads)"
    )
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="width of a head (default %(default)s)")
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, ..., which this machine need not have (default %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the inputs (default %(default)s)")
    parser.add_argument("--cross", action="store_true", help="queries and keys are of different sequences")
    parser.add_argument("--training", action="store_true", help="ask for gradients")
    parser.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="dropout of attention weights (default %(default)s)"
    )
    parser.add_argument(
        "--backend", choices=[AUTO, *sorted(BACKENDS)], default=AUTO, help="backend to ask for (default %(default)s)"
    )
    parser.add_argument("--layer", type=int, default=0, help="index of the layer, if layers differ (default 0)")
    parser.add_argument("--causal", action="store_true", help="explain the causal form of the pattern")


def main(args: argparse.Namespace) -> None:
    """Print the explanation.

    Raises:
        EfficientAttentionError: no such pattern, lengths or heads it cannot have, a backend that cannot compute it.
    """
    pattern = read_pattern(args.pattern, args.layer)
    explanation = explain(
        pattern.causal() if args.causal else pattern,
        query_tokens=args.tokens,
        key_tokens=args.key_tokens,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        num_heads=args.heads,
        num_key_heads=args.key_heads,
        head_dim=args.head_dim,
        training=args.training,
        dropout=args.dropout,
        backend=args.backend,
        layer=args.layer,
        cross=args.cross,
    )
    print(explanation)
