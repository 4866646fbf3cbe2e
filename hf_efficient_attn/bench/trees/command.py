"""Time and memory of a BP-Transformer against a dense Transformer.

Encoders of equal width and depth, which take turns: `tree`, ours; `dense`, transformers' BERT on torch's SDPA. A tree
has as many spans as tokens, and its MLPs transform both. A training step is a forward and a backward pass. Times are in
milliseconds, memory is in MiB, lengths are in tokens:
    hf-efficient-attn bench trees --lengths 512 2048 8192 --threads 1
"""

from hf_efficient_attn.bench.encoders.cases import DENSE, TREE
from hf_efficient_attn.bench.encoders.command import EncoderBenchmark

BENCHMARK = EncoderBenchmark(
    name="trees",
    encoders=(TREE, DENSE),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    sizes={
        "batch_size": (1, "texts"),
        "layers": (4, "layers"),
        "hidden_size": (256, "width"),
        "heads": (8, "heads"),
        "num_nodes": (4, "nodes of each size and side that a token of the tree reads (k)"),
    },
)
add_arguments, main = BENCHMARK.add_arguments, BENCHMARK.main
