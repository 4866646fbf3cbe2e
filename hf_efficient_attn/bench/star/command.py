"""Time and memory of a Star-Transformer against an LSTM and a dense Transformer.

Encoders of equal width and depth, which take turns: `star`, ours; `dense`, transformers' BERT on torch's SDPA; `lstm`,
torch's LSTM in both directions, each half as wide. A star has no MLP. A training step is a forward and a backward pass.
Times are in milliseconds, memory is in MiB, lengths are in tokens:
    hf-efficient-attn bench star --lengths 64 512 2048 --threads 1
"""

from hf_efficient_attn.bench.encoders.cases import DENSE, LSTM, STAR
from hf_efficient_attn.bench.encoders.command import EncoderBenchmark

BENCHMARK = EncoderBenchmark(
    name="star",
    encoders=(STAR, DENSE, LSTM),
    lengths=(64, 128, 256, 512, 1024, 2048),
    sizes={
        "batch_size": (8, "texts"),
        "layers": (4, "updates of the star, layers of the others"),
        "hidden_size": (256, "width"),
        "heads": (8, "heads"),
    },
)
add_arguments, main = BENCHMARK.add_arguments, BENCHMARK.main
