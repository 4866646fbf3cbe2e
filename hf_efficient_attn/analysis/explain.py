"""Show which backend computes the attention of a pattern or a model, its relative cost, and its memory.

    hf-efficient-attn explain "band(256, 256) | global(0)" --tokens 8192 --training
    hf-efficient-attn explain path/to/model --tokens 32768 --device h100 --dtype bfloat16 --why

No attention is computed, so the device need not exist on this machine. The config of a model sets the heads, their
width, the dtype, and whether attention is causal. If only some layers of a model are sparse, the first sparse layer is
shown; --layer shows another one. "all layers" is the cost of all layers together.

Lengths are in tokens, memory is in MiB, and pairs of queries and keys are counted in all heads of one example. A cost
is an estimated time divided by the estimated time of the baseline: dense causal attention for causal layers, dense
attention for others. Estimates are optimistic: on a CPU, the times that `hf-efficient-attn bench attention` measured
were 1.0 to 2.8 times the estimates.

--json prints an object with these keys:
    "model"           the model and its layer; null for a pattern
    "pattern"         the pattern, in JSON types
    "call"            heads, lengths, dtype, device and options of the attention call
    "backend"         the backend that computes the call
    "remark"          a sentence on what this backend computes
    "reasons"         for each other backend, why it was not chosen
    "allowed_pairs"   pairs that the pattern allows
    "computed_pairs"  pairs that the backend computes, allowed or not
    "total_pairs"     queries × keys
    "baseline"        what the cost is relative to
    "relative_cost"   the cost of the layer, 1 for the baseline
    "memory_bytes"    estimated peak memory of one example, beyond queries, keys and values
    "costs_of"        the machine whose measured costs are used for the estimates
    "notes"           sentences on what the numbers leave out
    "beside"          the same fields for the other heads, if the heads of the layer differ; else null
    "exchange"        with --sequence-ranks: how many bytes the processes send to each other; otherwise null
    "all_layers"      {"num_layers", "relative_cost", "baseline"} of all layers of a model; null for a pattern
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_efficient_attn.analysis.model_sources import load_span_model
from hf_efficient_attn.analysis.pattern_sources import PATTERN_OR_MODEL, read_config, read_pattern, refuse_misplaced
from hf_efficient_attn.attention.select import AUTO, BACKENDS
from hf_efficient_attn.integration.explain import explain
from hf_efficient_attn.integration.layer_patterns import PARTS

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("what", metavar="PATTERN_OR_MODEL", help=PATTERN_OR_MODEL)
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="number of queries (default %(default)s)")
    text = "number of keys (default: the number of queries); for a decoding step, use --tokens 1 --key-tokens 4096"
    parser.add_argument("--key-tokens", type=int, metavar="N", help=text)
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads, for a pattern (default 8)")
    text = "key and value heads (grouped-query attention), for a pattern (default: the number of attention heads)"
    parser.add_argument("--key-heads", type=int, metavar="N", help=text)
    parser.add_argument("--head-dim", type=int, metavar="N", help="width of a head, for a pattern (default 64)")
    text = "cpu, cuda, h100, h200, a100 or another device of torch; this machine need not have it (default cpu)"
    parser.add_argument("--device", help=text)
    text = "dtype of queries, keys and values (default: the model's; for a pattern, float32 on a CPU, else bfloat16)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    text = "cross-attention: queries and keys are tokens of different sequences"
    parser.add_argument("--cross", action="store_true", help=text)
    parser.add_argument("--training", action="store_true", help="forward and backward (default: forward only)")
    text = "dropout probability of the attention weights (default %(default)s)"
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help=text)
    text = "explain this backend; an error if it cannot compute the attention (default %(default)s)"
    parser.add_argument("--backend", choices=[AUTO, *sorted(BACKENDS)], default=AUTO, help=text)
    text = "layer to explain, counted from 0 (default: the first sparse layer of a model)"
    parser.add_argument("--layer", type=int, metavar="N", help=text)
    text = "part of an encoder-decoder (default encoder)"
    parser.add_argument("--part", choices=sorted(PARTS), help=text)
    text = "processes that share each sequence (shard_sequence): also print how many bytes each sends in the layer"
    parser.add_argument("--sequence-ranks", type=int, metavar="N", help=text)
    text = "explain the causal form of a pattern, which a decoder uses"
    parser.add_argument("--causal", action="store_true", help=text)
    parser.add_argument("--why", action="store_true", help="also say why each other backend was not chosen")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def main(args: argparse.Namespace) -> None:
    """Print the explanation.

    Raises:
        EfficientAttentionError: an unknown pattern or model, lengths or heads that it cannot have, or a backend that
            cannot compute it.
    """
    config = read_config(args.what)
    refuse_misplaced(args.what, config, args.part, args.causal)
    if config is None:
        what: Any = read_pattern(args.what, args.layer or 0)
        what = what.causal() if args.causal else what
    else:
        is_folder = Path(args.what).is_dir()
        # learned spans are saved only in the weights
        what = load_span_model(args.what, seed=0) if is_folder and getattr(config, "span", None) else config
    explanation = explain(
        what,
        query_tokens=args.tokens,
        key_tokens=args.key_tokens,
        device=args.device,
        # a model with spans is loaded in float32, whatever dtype it is saved in
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
    print(json.dumps(explanation.to_dict(), indent=1) if args.json else explanation.to_text(why=args.why))
