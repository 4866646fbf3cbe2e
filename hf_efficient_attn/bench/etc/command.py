"""Time and memory of an ETC against a dense Transformer.

Encoders of equal width and depth, which take turns: `etc`, ours, with a global token for every chunk of the text;
`dense`, transformers' BERT on torch's SDPA. A training step is a forward and a backward pass. Times are in
milliseconds, memory is in MiB, lengths are in long tokens:
    hf-efficient-attn bench etc --lengths 512 2048 8192 --threads 1
"""

from hf_efficient_attn.bench.encoders.cases import DENSE, ETC
from hf_efficient_attn.bench.encoders.command import EncoderBenchmark

BENCHMARK = EncoderBenchmark(
    name="etc",
    encoders=(ETC, DENSE),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    sizes={
        "batch_size": (1, "texts"),
        "layers": (4, "layers"),
        "hidden_size": (256, "width"),
        "heads": (8, "heads"),
        "local_radius": (84, "long tokens that a long token reads on each side"),
        "chunk_tokens": (32, "long tokens for each global token"),
    },
)
add_arguments, main = BENCHMARK.add_arguments, BENCHMARK.main
