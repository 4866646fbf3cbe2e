"""Time and memory of a vision Transformer whose patches read their neighbourhood, against the same with all patches.

Encoders of equal weights, which take turns: `dinov2`, of transformers on torch's SDPA; `neighbourhood`, the same model
after `hea.sparsify` with a `Grid`, whose patches read the 7 × 7 around them and the class token, which reads all.
Images are square, and lengths are in patches: of 14 pixels, 1,024 patches are an image of 448 × 448 pixels, and 16,384
one of 1,792 × 1,792. A training step is a forward and a backward pass. Times are in milliseconds, memory is in MiB:
    hf-efficient-attn bench images --lengths 1024 4096 --threads 1
"""

from hf_efficient_attn.bench.encoders.cases import DINOV2, NEIGHBOURHOOD
from hf_efficient_attn.bench.encoders.command import EncoderBenchmark

BENCHMARK = EncoderBenchmark(
    name="images",
    encoders=(NEIGHBOURHOOD, DINOV2),
    lengths=(1024, 4096, 9216, 16384),
    sizes={
        "batch_size": (1, "images"),
        "layers": (2, "layers"),
        "hidden_size": (384, "width"),
        "heads": (6, "heads"),
        "patch_pixels": (14, "pixels of a patch's side"),
        "grid_radius": (3, "patches that a patch reads on each side along each axis"),
    },
)
add_arguments, main = BENCHMARK.add_arguments, BENCHMARK.main
