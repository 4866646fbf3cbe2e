"""Which kernel computes attention fastest on a GPU: this package's backends beside torch's own, in two minutes.

    python examples/experiments/gpu_kernels.py --seconds 120

Every call is timed by the events of the device, the median of several, in bfloat16 with 16 heads: a forward pass
without gradients, a backward pass alone, and both together. "flash" is FlashAttention 2 within torch with a window,
which "auto" does not use; "flex_attention" is torch's function with a block mask made beforehand. flex compiles for
seconds at its first length and at the second; a row that would begin after `--seconds` is left out. The rows are
printed as they come, and written to `outputs/gpu_kernels/results.json` with the machine; `python model_cards/record.py
outputs/gpu_kernels` keeps them for the card of the engine, whose table has TFLOP/s of the allowed pairs, too.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from comparison.run_folder import open_run, run_experiment, write_results
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.bench.attention.cases import pattern_of
from hf_efficient_attn.bench.attention.measure import one_line
from hf_efficient_attn.bench.harness.report import resolve_device

HEADS = 16
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Arguments:
    """What is timed, and for how long."""

    output_dir: str = HfArg(default="outputs/gpu_kernels", help="Folder of the run.")
    seconds: float = HfArg(default=120.0, help="No row begins later.")
    device: str = HfArg(default="cuda", help="Where: cuda, or cpu to try the script.")
    short: list[int] = HfArg(default_factory=lambda: [1024, 2048, 4096, 8192], help="Lengths in tokens, D = 64.")
    long: int = HfArg(default=32768, help="Length in tokens of every way and pattern.")


@dataclass
class Row:
    """A way to compute a pattern, and how long it takes."""

    way: str
    pattern: str
    tokens: int
    head_dim: int
    run: Way
    num_pairs: int


def ours(pattern: hea.patterns.Pattern, backend: str, dropout: float = 0.0) -> Way:
    return lambda q, k, v: hea.attention(q, k, v, pattern, backend=backend, dropout=dropout)


def dense(is_causal: bool = False) -> Way:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def flash(left: int, right: int, tokens: int, device: torch.device) -> Way:
    from torch.nn.attention.varlen import varlen_attn

    # made beforehand: the device would wait for it
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (each[0].transpose(0, 1) for each in (q, k, v))
        out: Any = varlen_attn(*rows, ends, ends, q.shape[2], k.shape[2], window_size=(left, right))
        return out.transpose(0, 1)[None]

    return run


def torch_flex(left: int, right: int, tokens: int, device: torch.device) -> Way:
    def allowed(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key <= left) & (key - query <= right)

    mask = create_block_mask(allowed, None, None, tokens, tokens, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def rows(args: Arguments, device: torch.device) -> Iterator[Row]:
    """Yield what is timed, the most telling first."""
    long, triangle = args.long, hea.patterns.Causal()
    window, band = hea.patterns.Band(1024, 0), hea.patterns.Band(256, 256)
    ways = [
        ("dense", "causal", long // 2, 128, dense(is_causal=True), triangle),
        ("flash", "window of 1,024", long, 128, flash(1024, 0, long, device), window),
        ("flex", "window of 1,024", long, 128, ours(window, "flex"), window),
        ("flex_attention", "window of 1,024", long, 128, torch_flex(1024, 0, long, device), window),
        ("blocked", "window of 1,024", long, 128, ours(window, "blocked"), window),
        *(("flex", "band of 513", tokens, 64, ours(band, "flex"), band) for tokens in [*args.short, long]),
        *(("sdpa", "band of 513", tokens, 64, ours(band, "sdpa"), band) for tokens in args.short),
        *(("dense", "full", tokens, 64, dense(), hea.patterns.Full()) for tokens in args.short),
        ("flex, dropout", "band of 513", long, 64, ours(band, "flex", dropout=0.1), band),
    ]
    for name in ("longformer", "bigbird", "dilated"):
        pattern = pattern_of(name, long)
        ways += [(backend, name, long, 64, ours(pattern, backend), pattern) for backend in ("flex", "blocked")]
    for way, name, tokens, head_dim, run, pattern in ways:
        num_pairs = hea.explain(pattern, tokens, num_heads=HEADS, head_dim=head_dim).allowed_pairs
        yield Row(way, name, tokens, head_dim, run, num_pairs)


def measured(row: Row, device: torch.device) -> dict[str, Any]:
    """Return the times of a row in milliseconds, or why there are none."""
    said = {"way": row.way, "pattern": row.pattern, "tokens": row.tokens, "head_dim": row.head_dim}
    said["num_pairs"] = row.num_pairs
    shape = (1, HEADS, row.tokens, row.head_dim)
    *leaves, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        with torch.no_grad():
            said["forward"] = milliseconds(lambda: row.run(*leaves), device)
        out = row.run(*leaves)
        said["backward"] = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), device)
        said["both"] = milliseconds(lambda: torch.autograd.grad(row.run(*leaves), leaves, grad), device)
    except Exception as error:  # whatever a way fails by is its result
        said["reason"] = one_line(error)[:200]
    return said


def milliseconds(run: Callable[[], Any], device: torch.device, most: int = 20, seconds: float = 0.3) -> float:
    """Return the median time of a call, after one that is not timed."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < most and time.perf_counter() < end):
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
        else:
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
    return round(median(times), 4)


def main(args: Arguments) -> None:
    device, end = resolve_device(args.device), time.perf_counter() + args.seconds
    folder, found = open_run(args), []
    for row in rows(args, device):
        if time.perf_counter() > end:
            break
        found.append(measured(row, device))
        print({name: each for name, each in found[-1].items() if name != "num_pairs"}, flush=True)
    text = f"Milliseconds of {len(found)} calls: {folder / 'results.json'}"
    print(write_results(folder, "Kernels of attention", {"rows": found}, text))


if __name__ == "__main__":
    run_experiment(main, Arguments)
