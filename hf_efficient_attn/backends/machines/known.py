"""The machines that were measured by `hf-efficient-attn bench calibrate`, for those that were not: the most similar."""

from dataclasses import replace

from hf_efficient_attn.backends.machines.costs import EXPLICIT_BLOCK_TOKENS, Costs, PassCosts
from hf_efficient_attn.backends.machines.machine import Machine
from hf_efficient_attn.backends.machines.processor import Processor
from hf_efficient_attn.layout.blocks.block_costs import BlockCosts

EPYC_FLOAT32 = Costs(
    forward=PassCosts(
        BlockCosts(((32, 1.32), (64, 1.28), (96, 1.28), (128, 1.27), (192, 1.22), (256, 1.19))),
        explicit=4.51,
        masked=1.15,
    ),
    backward=PassCosts(
        BlockCosts(((32, 1.59), (64, 1.33), (96, 1.17), (128, 1.15), (192, 1.12), (256, 1.1))),
        explicit=4.41,
        masked=1.04,
    ),
    dense_backward=2.69,
    key=9.06,
    gathered=18.4,
    run=162000,
    moved=77.2,
)
EPYC_BFLOAT16 = Costs(
    forward=PassCosts(
        BlockCosts(((32, 1.45), (64, 1.38), (96, 1.37), (128, 1.32), (192, 1.25), (256, 1.23))),
        explicit=3.69,
        masked=1.11,
    ),
    backward=PassCosts(
        BlockCosts(((32, 2.79), (64, 2.23), (96, 2.21), (128, 1.99), (192, 1.56), (256, 1.48))),
        explicit=5.43,
        masked=1.07,
    ),
    dense_backward=1.88,
    key=35.1,
    gathered=8.24,
    run=165000,
    moved=88.6,
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
    Processor("cpu", "Intel(R) Xeon(R) Processor", "GenuineIntel", "AVX512", True),
    "forward in float32 measured, the rest taken from an AMD EPYC",
    (("float32", XEON_FLOAT32), ("bfloat16", EPYC_BFLOAT16)),
)
# no fused kernel runs there, and a run waits for about twenty launches
ON_GPU = PassCosts(BlockCosts.only(EXPLICIT_BLOCK_TOKENS, 12), explicit=12, masked=3)
GPU_COSTS = Costs(ON_GPU, ON_GPU, dense_backward=2.5, key=8, gathered=40, run=5e7, moved=600)
GPU = Machine(Processor("cuda", ""), "estimated, not measured", (("float32", GPU_COSTS),), is_estimated=True)
# the first of those that are equally similar is taken
KNOWN = (EPYC, XEON, GPU)
