"""Compile the kernels of every road of the flash backend to machine code, on a machine without a GPU.

    # beside any build of torch 2.11 or later
    pip install --pre "flash-attn-4[cu13]" triton==3.6.0 transformers accelerate
    PYTHONPATH=. python tests/flash_compile.py --arch sm_90     # sm_80 (forward alone), sm_90, sm_100

The backend runs on the CPU, and each kernel call is made again with fake tensors. Prints a line a road, and fails if
one is not compiled. With pytest installed, the cases of tests/backends/test_flash.py can be tried:

    --masks       computes their masks by CuTe DSL on the CPU, and compares them with torch
    --contract    compiles their kernels (half an hour on two cores), which FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
                  keeps in a folder for `pytest -m gpu tests/backends/test_flash.py`
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROADS = (
    "causal", "window", "band", "sinks and cap", "packed", "padded", "holes", "longformer", "attention sinks",
    "dilated", "short", "chunk", "cross", "heads", "globals", "sinks of a mask", "wide heads", "selected",
    "bigbird", "strided", "block local", "earlier keys", "grid", "shifted grid", "other values", "half",
    "gradient of lse",
)  # fmt: skip
# what kernels compute on Ampere, forward
WINDOWS = ("causal", "window", "band", "packed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", choices=("sm_80", "sm_90", "sm_100"))
    parser.add_argument("--roads", nargs="*", default=ROADS, choices=ROADS)
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--contract", action="store_true")
    args = parser.parse_args()
    is_ampere = args.arch == "sm_80"
    suffix = "" if is_ampere else "a"
    os.environ.update(FLASH_ATTENTION_ARCH=args.arch, CUTE_DSL_ARCH=args.arch + suffix, FLASH_ATTENTION_NUM_SMS="132")
    warnings.filterwarnings("ignore")
    pretend_driver()
    if args.masks or args.contract:
        return try_cases(int(args.arch.removeprefix("sm_")) // 10, args.contract)
    # of heads of 256, Hopper has windows
    left_out = () if args.arch == "sm_90" else ("wide heads",)
    num_failed = 0
    for road in (each for each in args.roads if (each in WINDOWS if is_ampere else each not in left_out)):
        start = time.time()
        try:
            compile_road(road, int(args.arch.removeprefix("sm_")) // 10, needs_grad=not is_ampere)
            print(f"{args.arch} {road}: {time.time() - start:.0f} s", flush=True)
        except Exception as error:
            if os.environ.get("TRACEBACK"):
                raise
            num_failed += 1
            print(f"{args.arch} {road}: FAILED, {type(error).__name__}: {str(error)[:300]}", flush=True)
    return int(num_failed > 0)


def pretend_driver() -> None:
    """Answer what a kernel asks the driver of a GPU for while it is compiled: how many clusters it runs at once."""
    import cutlass

    class Driver:
        def get_max_active_clusters(self, size: int) -> int:
            return 132 // size

        def get_device_multiprocessor_count(self) -> int:
            return 132

    cutlass.utils.HardwareInfo = Driver


def try_cases(generation: int, is_compiling: bool) -> int:
    """Compare the masks, or compile the kernels, of all cases of the contract; return 1 if one fails, otherwise 0."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from backends.test_flash import CASES
    from backends_cases import tensors_of
    from flash_standin import standin

    from hf_efficient_attn.backends.flash import execute, library

    functions = library.library()
    compiled, num_failed, num_masks = compiling(functions), 0, 0
    patch.object(library, "generation_of", lambda _: generation).start()
    for case in CASES:
        case = case if case.dtype != torch.float32 else replace(case, dtype=torch.bfloat16)
        tensors = tensors_of(case, case.dtype)
        call = case.call("cpu", tensors.values, tensors.sinks)
        call = replace(call, inputs=replace(call.inputs, device="cuda", dtype=case.dtype))
        try:
            if is_compiling:
                with patch.object(library, "library", lambda: compiled):
                    out, lse = execute.forward(tensors.q, tensors.k, tensors.v, call)
                    if case.needs_grad:
                        execute.backward(tensors.grad_out, None, tensors.q, tensors.k, tensors.v, out, lse, call)
                continue
            for heads in execute.parts_of_call(call):
                for part in (each for each in heads.parts if each.has_mask):
                    sizes = [
                        total if taken is None else len(taken)
                        for taken, total in ((part.queries, call.layout.num_queries), (part.keys, call.layout.num_keys))
                    ]
                    found = []
                    for used in (functions, standin()):
                        with patch.object(library, "library", lambda used=used: used):
                            mask = execute.mask_of(part, call, torch.device("cpu"))
                        shape = (call.inputs.batch_size, heads.count, *sizes)
                        found.append((in_cute if used is functions else in_torch)(*mask, shape))
                    num_masks += 1
                    if not torch.equal(*found):
                        num_failed += 1
                        print(
                            f"{case}: {int((found[0] != found[1]).sum())} of {found[0].numel()} pairs DIFFER",
                            flush=True,
                        )
        except Exception as error:
            num_failed += 1
            print(f"{case}: FAILED, {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{len(CASES)} cases, {num_masks} masks compared, {num_failed} failed")
    return int(num_failed > 0)


def in_torch(mask: Callable[..., Any], aux: list[Any], shape: tuple[int, ...]) -> Any:
    """Return which pairs a mask allows, bool [batch, heads, queries, keys]."""
    import torch

    indices = (
        torch.arange(size).view(*(-1 if axis == each else 1 for each in range(4))) for axis, size in enumerate(shape)
    )
    return torch.as_tensor(mask(*indices, None, aux)).expand(shape).bool()


def in_cute(mask: Callable[..., Any], aux: list[Any], shape: tuple[int, ...]) -> Any:
    """Return the same, computed by CuTe DSL on the CPU."""
    import cutlass
    import torch
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack
    from flash_attn.cute import utils
    from flash_attn.cute.cute_dsl_utils import get_aux_tensor_metadata, to_cute_aux_tensor

    @cute.jit  # type: ignore[untyped-decorator]
    def fill(out: cute.Tensor, aux: list, batch: Int32, heads: Int32, queries: Int32, keys: Int32):  # type: ignore
        for example in cutlass.range(batch, unroll=1):
            for head in cutlass.range(heads, unroll=1):
                for query in cutlass.range(queries, unroll=1):
                    for key in cutlass.range(keys, unroll=1):
                        place = [utils.scalar_to_ssa(each, Int32) for each in (example, head, query, key)]
                        is_allowed = cutlass.Boolean(utils.ssa_to_scalar(mask(*place, None, aux)))
                        out[example, head, query, key] = Int32(is_allowed)

    out = torch.full(shape, 7, dtype=torch.int32)
    # an empty list is no argument
    aux = aux or [torch.zeros(2, dtype=torch.int32)]
    get_aux_tensor_metadata(aux)
    fill(from_dlpack(out), [to_cute_aux_tensor(each, enable_tvm_ffi=False) for each in aux], *map(Int32, shape))
    assert out.max() < 2
    return out.bool()


def compile_road(road: str, generation: int, needs_grad: bool) -> None:
    """Compile the forward and, with gradients, the backward kernels of one call."""
    import torch

    from hf_efficient_attn.backends.flash import execute, library
    from hf_efficient_attn.layout.call import AttentionCall, Inputs
    from hf_efficient_attn.layout.layout import Layout
    from hf_efficient_attn.layout.listed_keys import ChosenBlocks
    from hf_efficient_attn.layout.token_mask import TokenMask
    from hf_efficient_attn.patterns.algebra import PerHead
    from hf_efficient_attn.patterns.bands import Band, Causal, Dilated, Strided
    from hf_efficient_attn.patterns.big_bird import bigbird
    from hf_efficient_attn.patterns.blocks import BlockLocal
    from hf_efficient_attn.patterns.global_tokens import GlobalTokens
    from hf_efficient_attn.patterns.grid import SizedGrid

    tokens, num_queries, heads, key_heads, width = 4096, None, 8, 8, 128
    patterns = {
        "causal": Causal(), "band": Band(256, 256), "longformer": Band(256, 256) | GlobalTokens([0, 700, 1500]),
        "attention sinks": Band(1019, 0) | GlobalTokens([0, 1, 2, 3]).causal(), "dilated": Dilated(512, 512, 4),
        "bigbird": bigbird(block_tokens=64), "strided": Strided(64) | Band(64, 64), "block local": BlockLocal(256),
        "earlier keys": Band(300, -1), "grid": SizedGrid([64, 64], [Band(3, 3), Band(3, 3)]), "short": BlockLocal(16),
        "shifted grid": SizedGrid([64, 64], [Band(3, 3), Dilated(6, 6, 2)], borders="shifted"),
        "heads": PerHead([Band(64, 64), Dilated(64, 64, 4)]), "sinks of a mask": BlockLocal(256),
        "chunk": BlockLocal(256) & Causal(),
    }  # fmt: skip
    tokens = 20 if road == "short" else tokens
    index = torch.arange(tokens).expand(2, -1)
    masks = {
        "packed": TokenMask(segment_ids=index // 1000),
        "padded": TokenMask(key_mask=index < torch.tensor([[4096], [3000]])),
        "holes": TokenMask(key_mask=index % 7 != 3),
        "globals": TokenMask(key_mask=index < torch.tensor([[4096], [3000]]), global_mask=index < 2),
    }
    pattern, mask = patterns.get(road, Band(1023, 0)), masks.get(road, TokenMask())
    if road in ("band", "longformer"):
        width = 64
    if road in ("window", "attention sinks", "holes"):
        key_heads = 2
    if road == "wide heads":
        width = 256
    if road == "other values":
        width = library.UNEQUAL[0]
    value_width = library.UNEQUAL[1] if road == "other values" else width
    dtype = torch.float16 if road == "half" else torch.bfloat16
    if road in ("chunk", "cross"):
        num_queries = 1000
    has_sinks, is_cross = road.startswith("sinks"), road == "cross"
    lengths = (num_queries or tokens, tokens, 0 if num_queries is None or is_cross else tokens - num_queries)
    inputs = Inputs("cuda", dtype, width, value_width, key_heads, 2, needs_grad=needs_grad)
    layout = Layout(pattern, heads, *lengths, is_cross=is_cross)
    sinks, cap = torch.zeros(heads) if has_sinks else None, 50.0 if road == "sinks and cap" else None
    call = AttentionCall(layout, inputs, mask, sinks=sinks, softcap=cap, scale=0.1)
    if road == "selected":
        blocks = torch.zeros(2, key_heads, tokens, 3, dtype=torch.int32)
        call = replace(call, layout=Layout(Causal(), heads, tokens, tokens), chosen=ChosenBlocks(blocks, 128))
    q = torch.zeros(2, heads, lengths[0], width, dtype=dtype)
    k, v = (torch.zeros(2, key_heads, tokens, each, dtype=dtype) for each in (width, value_width))
    functions = compiling(library.library())
    with (
        patch.object(library, "library", lambda: functions),
        patch.object(library, "generation_of", lambda _: generation),
    ):
        out, lse = execute.forward(q, k, v, call)
        if needs_grad:
            execute.backward(out, lse if road == "gradient of lse" else None, q, k, v, out, lse, call)


def compiling(functions: Any) -> Any:
    """Return functions that compile the kernel of a call, and return zeros of its shapes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with FakeTensorMode(allow_non_fake_inputs=True):

                def fake(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor):
                        return value
                    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

                found = function(*tree_map(fake, args), **tree_map(fake, options))

            def real(value: Any) -> Any:
                return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

            return tree_map(real, found)

        return call

    return functions._replace(
        forward=compiled(functions.forward), backward=compiled(functions.backward), combine=compiled(functions.combine)
    )


if __name__ == "__main__":
    sys.exit(main())
