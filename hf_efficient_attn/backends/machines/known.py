"""The machines that were measured by `hf-efficient-attn bench calibrate`, for those that were not: the most similar."""

from dataclasses import replace

from hf_efficient_attn.backends.machines.costs import EXPLICIT_BLOCK_TOKENS, Costs, PassCosts
from hf_efficient_attn.backends.machines.machine import Machine
from hf_efficient_attn.backends.machines.processor import Processor
from hf_efficient_attn.layout.blocks.block_costs import BlockCosts

EPYC_FLOAT32 = Costs(
    forward=PassCosts(
        BlockCosts(((32, 1.37), (64, 1.3), (96, 1.27), (128, 1.24), (192, 1.26), (256, 1.23))),
        explicit=3.01,
        masked=1.13,
    ),
    backward=PassCosts(
        BlockCosts(((32, 1.45), (64, 1.25), (96, 1.19), (128, 1.15), (192, 1.13), (256, 1.13))),
        explicit=2.84,
        masked=1.05,
    ),
    dense_backward=2.61,
    key=5.17,
    gathered=6.51,
    call=24300,
    run=39600,
    moved=112,
)
EPYC_BFLOAT16 = Costs(
    forward=PassCosts(
        BlockCosts(((32, 1.54), (64, 1.34), (96, 1.4), (128, 1.38), (192, 1.28), (256, 1.25))),
        explicit=3.43,
        masked=1.13,
    ),
    backward=PassCosts(
        BlockCosts(((32, 2.59), (64, 2.16), (96, 2.13), (128, 2.01), (192, 1.6), (256, 1.5))),
        explicit=4.46,
        masked=1.07,
    ),
    dense_backward=1.96,
    key=34.3,
    gathered=5.82,
    call=24200,
    run=41100,
    moved=121,
)
EPYC = Machine(
    Processor("cpu", "AMD EPYC", "AuthenticAMD", "AVX512", False),
    "measured on 2026-11-24 with torch 2.13.0+cpu, 1 threads",
    (("float32", EPYC_FLOAT32), ("bfloat16", EPYC_BFLOAT16)),
)
# measured with float32, forward and without this command, on blocks of keys of a band; the rest is that of EPYC
XEON_FORWARD = BlockCosts(((32, 1.33), (64, 1.33), (96, 1.28), (128, 1.29), (192, 1.05), (256, 1.04)))
XEON_FLOAT32 = replace(EPYC_FLOAT32, forward=replace(EPYC_FLOAT32.forward, blocks=XEON_FORWARD))
XEON = Machine(
    Processor("cpu", "Intel(R) Xeon(R) Processor", "GenuineIntel", "AVX512", True, 2),
    "forward in float32 measured, the rest taken from an AMD EPYC",
    (("float32", XEON_FLOAT32), ("bfloat16", EPYC_BFLOAT16)),
)
TILELESS_XEON_FLOAT32 = Costs(
    forward=PassCosts(
        BlockCosts(((32, 1.54), (64, 1.41), (96, 1.42), (128, 1.46), (192, 1.4), (256, 1.32))),
        explicit=3.36,
        masked=1.24,
    ),
    backward=PassCosts(
        BlockCosts(((32, 2.46), (64, 1.97), (96, 1.7), (128, 1.68), (192, 1.39), (256, 1.33))),
        explicit=3.71,
        masked=1.14,
    ),
    dense_backward=2.37,
    key=10.5,
    gathered=47.7,
    call=44500,
    run=43600,
    moved=154,
)
TILELESS_XEON_BFLOAT16 = Costs(
    forward=PassCosts(
        BlockCosts(((32, 1.7), (64, 1.59), (96, 1.64), (128, 1.61), (192, 1.44), (256, 1.41))),
        explicit=2.78,
        masked=1.16,
    ),
    backward=PassCosts(
        BlockCosts(((32, 2.62), (64, 1.94), (96, 1.76), (128, 1.69), (192, 1.43), (256, 1.37))),
        explicit=3.98,
        masked=1.07,
        is_widened=True,
    ),
    dense_backward=2.21,
    key=14.8,
    gathered=21.2,
    call=56900,
    run=42600,
    moved=82.9,
)
TILELESS_XEON = Machine(
    Processor("cpu", "Intel(R) Xeon(R) Processor", "GenuineIntel", "AVX512", False, 2),
    "measured on 2026-11-27, and bfloat16 on 2026-11-28, with torch 2.13.0+cpu, 1 threads",
    (("float32", TILELESS_XEON_FLOAT32), ("bfloat16", TILELESS_XEON_BFLOAT16)),
)
# from times of 256 to 32,768 tokens, in 16 heads of 64 numbers in bfloat16. In blocked a score takes 58 times as long
# as in dense attention, 39 times in the backward pass, and a call 2 ms; passes with one number share their layouts. In
# flex a score takes 3.5 times as long, and a call 0.13 ms longer, or 0.7 ms with the backward pass.
ON_GPU = PassCosts(BlockCosts.only(EXPLICIT_BLOCK_TOKENS, 50), explicit=50, masked=1.9)
GPU_COSTS = Costs(
    ON_GPU,
    ON_GPU,
    dense_backward=2.6,
    key=8,
    gathered=40,
    call=3e9,
    run=5e7,
    moved=600,
    flex=3.5,
    flex_call=2.5e8,
)
GPU = Machine(
    Processor("cuda", "NVIDIA H200"),
    "measured on 2026-11-27 with torch 2.11.0+cu130 but for gathered keys and moved queries, which are estimated",
    (("bfloat16", GPU_COSTS),),
)
# the first of those that are equally similar is taken
KNOWN = (EPYC, XEON, TILELESS_XEON, GPU)
