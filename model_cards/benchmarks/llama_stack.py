"""Time prefill and training step of a stack of Llama layers with a pattern, and of the same stack without a pattern.

    python model_cards/benchmarks/llama_stack.py --device cuda --lengths 8192 32768 --output stack.json
    python model_cards/benchmarks/llama_stack.py --device cuda --lengths 131072 --checkpointing --output long.json
    python model_cards/benchmarks/llama_stack.py --hidden 128 --layers 2 --lengths 512     # on a CPU, to try it

Contestants take turns, each after one warm-up; the median of the rounds is printed in milliseconds, and written after
every pass. `sdpa` is causal attention by torch (FlashAttention-2 on GPUs), `window` a causal window of 1,024 computed
by --backend, `sinks` a causal window of 1,020 and the first 4 tokens. A training step of 131,072 tokens keeps about
120 GiB of activations without --checkpointing.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaModel

import hf_efficient_attn as hea
from hf_efficient_attn.bench.report import describe_machine
from hf_efficient_attn.patterns import Band, GlobalTokens

PATTERNS = {"sdpa": None, "window": Band(1023, 0), "sinks": Band(1019, 0) | GlobalTokens([0, 1, 2, 3]).causal()}


def model_of(name: str, args: argparse.Namespace) -> LlamaModel:
    """Return the layers, with a vocabulary that is too small to matter."""
    heads = max(1, args.hidden // 128)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=max(args.lengths),
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaModel(config).to(args.device, getattr(torch, args.dtype))
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    return model if PATTERNS[name] is None else hea.sparsify(model, PATTERNS[name])


def time_of(model: LlamaModel, ids: torch.Tensor, is_training: bool) -> float:
    """Return the milliseconds of a training step without an optimizer, or of a prefill."""
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    with nullcontext() if is_training else torch.no_grad():
        out = model.train(is_training)(input_ids=ids, use_cache=False).last_hidden_state
        if is_training:
            out.float().square().mean().backward()
            model.zero_grad()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Print a line per length, pass and contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hidden", type=int, default=2048, help="width; heads have 128 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="auto", help="backend of the patterns (default %(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="checkpoint activations, for long texts")
    parser.add_argument("--output", help="a file for the results as JSON")
    args = parser.parse_args()
    models = {name: model_of(name, args) for name in PATTERNS}
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    found = {"machine": describe_machine(torch.device(args.device)), "settings": settings, "results": []}
    for tokens in args.lengths:
        ids = torch.randint(3, 64, (1, tokens), device=args.device)
        for is_training in (False, True):
            medians = medians_of(models, ids, is_training, args)
            row = {"tokens": tokens, "pass": "training" if is_training else "prefill", "milliseconds": medians}
            found["results"].append(row)
            cells = (
                f"{name} {'out of memory' if each is None else f'{each:.1f} ms'}"
                + (f" ({medians['sdpa'] / each:.2f} ×)" if each and medians["sdpa"] else "")
                for name, each in medians.items()
            )
            print(f"{tokens:,} tokens, {row['pass']}: {', '.join(cells)}", flush=True)
            if args.output:
                Path(args.output).write_text(json.dumps(found, indent=2), encoding="utf-8")


def medians_of(
    models: dict[str, LlamaModel], ids: torch.Tensor, is_training: bool, args: argparse.Namespace
) -> dict[str, float | None]:
    """Return the median milliseconds of each model; None: there was not enough memory."""
    times: dict[str, list[float] | None] = {name: [] for name in models}
    for number in range(1 + args.rounds):
        for name, model in models.items():
            if times[name] is None:
                continue
            try:
                with hea.use_backend(args.backend) if PATTERNS[name] else nullcontext():
                    spent = time_of(model, ids, is_training)
                times[name] += [spent] if number else []
            except torch.OutOfMemoryError:
                times[name] = None
                model.zero_grad()
    return {name: None if each is None else statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    sys.exit(main())
