"""The cost of attention on a machine, by which backends and block lengths are chosen; results do not depend on it.

The costs are those that the user has measured on this machine (`hf-efficient-attn bench calibrate`), or else those of
the most similar machine in `KNOWN_JSON` (see `nearest`).
"""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.block_layout import BlockCosts
from hf_efficient_attn.layout.call import AttentionCall

# environment variable with the path of the user's own measurements, in place of the file in the cache
VARIABLE = "HF_EFFICIENT_ATTN_MACHINES"
# major number of the compute capability -> parts of the names of GPUs
HOPPER = 9
GENERATIONS = {
    8: ("A100", "A10", "A30", "A40", "L4", "RTX 30", "RTX 40"),
    10: ("B200", "B300", "GB200"),
    12: ("RTX 50",),
}
# short name of a GPU, for explanations -> part of the name that its driver gives
KNOWN_GPUS = {"h200": "H200", "h100": "H100", "a100": "A100"}
# queries per block of the kernel `Explicit`
EXPLICIT_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class PassCosts:
    """Times of one score in a forward or a backward pass, in scores of dense attention without a mask in that pass.

    Attributes:
        blocks: times in torch's fused kernel for CPUs, as blocked calls it, by the number of queries in a block.
        explicit: time in the kernel `Explicit`: with soft caps, terms or dropout, and on other devices.
        masked: time in dense attention with a mask.
        is_widened: whether blocked and gathered compute bfloat16 in float32, which takes less time if a processor has
            no instructions for bfloat16. sdpa does so in both passes if it is True for the backward pass.
    """

    blocks: BlockCosts
    explicit: float
    masked: float
    is_widened: bool = False

    def of_kernel(self, is_fused: bool) -> BlockCosts:
        """Return the costs of the kernel that computes blocks, by the number of queries in a block."""
        return self.blocks if is_fused else BlockCosts.only(EXPLICIT_BLOCK_TOKENS, self.explicit)

    def fast_dtype(self, dtype: torch.dtype, device: str) -> torch.dtype:
        """Return the dtype to compute in. On CPUs, float16 takes five times as long as float32."""
        is_slow = (dtype == torch.float16 and device == "cpu") or (dtype == torch.bfloat16 and self.is_widened)
        return torch.float32 if is_slow else dtype

    def in_fast_dtype(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, which have the same dtype, in the dtype in which they are computed."""
        dtype = self.fast_dtype(tensors[0].dtype, tensors[0].device.type)
        return tensors if dtype == tensors[0].dtype else tuple(tensor.to(dtype) for tensor in tensors)


@dataclass(frozen=True)
class Costs:
    """What attention in one dtype costs on a machine.

    Attributes:
        dense_backward: time of a score in the backward pass, divided by that in the forward pass, in dense attention.
        key: time to read a key for a single query. This time and those below are in scores of a forward pass.
        gathered: time to copy a key and its value to their place in a block.
        call: fixed time of a call that is computed in blocks.
        run: fixed time of one kernel of such a call, with the code around it.
        moved: time to move a query to its place in a token order and back.
        flex: time of a score in flex's kernel, the same forward and backward.
        flex_call: fixed time of a call of flex beyond that of dense attention.
        flash, flash_call: the same for FlashAttention-4, `flash_call` per kernel; rows that several kernels compute
            also take `moved`.
        tile_key: time of a key in a tile of selected keys, in addition to its scores: it is gathered, and read from
            memory several times.
        listed: time to find the tile of a pair in a list of selected keys, and to make its mask.
    """

    forward: PassCosts
    backward: PassCosts
    dense_backward: float
    key: float
    gathered: float
    call: float
    run: float
    moved: float
    flex: float = 1.2
    flex_call: float = 0.0
    flash: float = 1.1
    flash_call: float = 5e7
    tile_key: float = 80.0
    listed: float = 5.0

    def shares(self, needs_grad: bool) -> tuple[tuple[PassCosts, float], ...]:
        """Return the passes of a call, and their shares in the time of a score of dense attention."""
        if not needs_grad:
            return ((self.forward, 1.0),)
        both = 1.0 + self.dense_backward
        return (self.forward, 1.0 / both), (self.backward, self.dense_backward / both)

    def masked(self, needs_grad: bool) -> float:
        """Return the time of a score of dense attention with a mask."""
        return sum(share * each.masked for each, share in self.shares(needs_grad))


@dataclass(frozen=True)
class Processor:
    """A processor, or a GPU.

    Attributes:
        device: "cpu", or the type of another device.
        name: as the system or the driver gives it; "" in the user's own file: any processor.
        vendor: as the processor reports it; "" if the system does not say.
        vectors: the widest instructions that torch's kernels use, such as "AVX2" or "AVX512".
        has_tiles: whether it multiplies matrices in tiles (AMX), as far as the system shows it.
    """

    device: str
    name: str
    vendor: str = ""
    vectors: str = ""
    has_tiles: bool = False

    def __str__(self) -> str:
        return ", ".join(part for part in (self.name, self.vectors, "AMX" if self.has_tiles else "") if part)


@dataclass(frozen=True)
class Machine:
    """A processor and the costs of attention on it.

    Attributes:
        source: where its costs come from, in words.
        costs: (name of a dtype, its costs).
    """

    processor: Processor
    source: str
    costs: tuple[tuple[str, Costs], ...]

    def __str__(self) -> str:
        return f"{self.processor}: {self.source}" if self.processor.name else self.source

    def costs_in(self, dtype: str) -> Costs:
        """Return the costs in a dtype, or in the first dtype that was measured if it was not."""
        return dict(self.costs).get(dtype, self.costs[0][1])

    def to_dict(self) -> dict[str, Any]:
        """Return the machine in JSON types."""
        costs = {name: asdict(each) for name, each in self.costs}
        return {"processor": asdict(self.processor), "source": self.source, "costs": costs}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Machine":
        """Return the machine that `to_dict` wrote.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: `to_dict` did not write this.
        """
        costs = tuple((name, _costs_from(each)) for name, each in data["costs"].items())
        # older files also hold the number of cores, which is not used
        processor = {name: value for name, value in data["processor"].items() if name != "num_cores"}
        return cls(Processor(**processor), data["source"], costs)


def _costs_from(data: dict[str, Any]) -> Costs:
    passes = {}
    for name in ("forward", "backward"):
        blocks = tuple((int(tokens), float(time)) for tokens, time in data[name]["blocks"]["per_score"])
        passes[name] = PassCosts(**{**data[name], "blocks": BlockCosts(blocks)})
    return Costs(**{**data, **passes})


# the innermost `on_machine` block comes last
_pretended: list[Machine] = []


def costs_of(call: AttentionCall) -> Costs:
    """Return the costs for the dtype and the device of a call's inputs.

    float16 and float64 have the costs of float32: float16 is computed in float32, and backends in float64 are compared
    only with each other.
    """
    return machine_of(call.inputs.device).costs_in("bfloat16" if call.inputs.dtype == torch.bfloat16 else "float32")


def machine_of(device: str) -> Machine:
    """Return the machine whose costs are used for a type of device."""
    return _pretended[-1] if _pretended else _found(device)


@contextmanager
def on_machine(machine: Machine) -> Iterator[None]:
    """Choose block lengths, and backends for calls without a cached choice, as on another machine, in all threads."""
    _pretended.append(machine)
    try:
        yield
    finally:
        _pretended.remove(machine)


@lru_cache
def _found(device: str) -> Machine:
    processor = processor_of(device)
    own = [each for each in measured() if each.processor in (processor, Processor(device, ""))]
    return nearest(processor, own or known_machines())


def nearest(processor: Processor, machines: Sequence[Machine]) -> Machine:
    """Return the machine whose processor is most similar to this one; the first if several are.

    Device, name, vendor and instructions are compared in this order. Name and vendor come before instructions, because
    virtual machines hide instructions that the processor has.
    """

    def matching_fields(machine: Machine) -> list[bool]:
        return [value == getattr(machine.processor, name) for name, value in asdict(processor).items()]

    return max(machines, key=matching_fields)


def known_gpu(name: str) -> Machine | None:
    """Return the GPU with a short name, such as "h100"; None: there is none."""
    found = KNOWN_GPUS.get(name.lower())
    return None if found is None else next(each for each in known_machines() if found in each.processor.name)


def is_there(device: str) -> bool:
    """Return whether this machine has such a device; explanations may be for one that it does not have."""
    return device != "cuda" or torch.cuda.is_available()


# compiled programs take the result as a constant
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def gpu_generation(device: str) -> int:
    """Return the major number of the compute capability of a GPU, also if a call is only explained for it."""
    if torch.cuda.is_available() and not _pretended:
        return torch.cuda.get_device_capability()[0]
    name = machine_of(device).processor.name
    return next((number for number, names in GENERATIONS.items() if any(each in name for each in names)), HOPPER)


@lru_cache
def processor_of(device: str) -> Processor:
    """Return the processor of a type of device."""
    if device != "cpu":
        return Processor(device, torch.cuda.get_device_name() if device == "cuda" and is_there(device) else "")
    listing = Path("/proc/cpuinfo")
    # what Linux lists for the first core
    text = listing.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0] if listing.exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    name = fields.get("model name") or platform.processor() or platform.machine()
    has_tiles = "amx_tile" in fields.get("flags", "").split()
    return Processor(device, name, fields.get("vendor_id", ""), torch.backends.cpu.get_cpu_capability(), has_tiles)


def path_of_measured() -> Path:
    """Return the path of the machines that the user has measured: `VARIABLE`, or a file in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "hf_efficient_attn" / "machines.json")


def measured() -> list[Machine]:
    """Return the machines that the user has measured; several may share a home folder.

    Raises:
        ConfigurationError: the file is not one that `remember` has written.
    """
    path = path_of_measured()
    if not path.is_file():
        return []
    try:
        return [Machine.from_dict(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is not a file of machine costs as written by 'hf-efficient-attn bench calibrate' "
            f"({type(error).__name__}: {error}). Delete it, or name another file in {VARIABLE}."
        ) from error


def remember(machine: Machine) -> Path:
    """Write a machine into the user's file, in place of an earlier measurement; return the path of the file."""
    machines = [*(each for each in measured() if each.processor != machine.processor), machine]
    path = path_of_measured()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps([each.to_dict() for each in machines], indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    _found.cache_clear()
    return path


@lru_cache
def known_machines() -> tuple[Machine, ...]:
    """Return the machines in `KNOWN_JSON`."""
    return tuple(map(Machine.from_dict, json.loads(KNOWN_JSON)))


# In the format that `remember` writes; text in a module, because a copy of the package's code has no other files. Of
# machines that are equally near, the first is taken. The costs of the H200 are from times for 256 to 32,768 tokens in
# 16 heads of width 64 in bfloat16. In blocked, a score takes 58 times as long as in dense attention, 39 times in the
# backward pass, and a call 2 ms; both passes have the same number here, so that they share their layouts. In flex, a
# score takes 3.5 times as long, and a call 0.13 ms longer, or 0.7 ms with the backward pass.
KNOWN_JSON = """
[
  {"processor": {"device": "cpu", "name": "AMD EPYC",
    "vendor": "AuthenticAMD", "vectors": "AVX512", "has_tiles": false},
   "source": "measured on 2026-11-24 with torch 2.13.0+cpu, 1 threads",
   "costs": {
    "float32": {
     "forward": {"blocks": {"per_score":
      [[32, 1.37], [64, 1.3], [96, 1.27], [128, 1.24], [192, 1.26], [256, 1.23]]},
      "explicit": 3.01, "masked": 1.13},
     "backward": {"blocks": {"per_score":
      [[32, 1.45], [64, 1.25], [96, 1.19], [128, 1.15], [192, 1.13], [256, 1.13]]},
      "explicit": 2.84, "masked": 1.05},
     "dense_backward": 2.61, "key": 5.17, "gathered": 6.51, "call": 24300, "run": 39600, "moved": 112},
    "bfloat16": {
     "forward": {"blocks": {"per_score":
      [[32, 1.54], [64, 1.34], [96, 1.4], [128, 1.38], [192, 1.28], [256, 1.25]]},
      "explicit": 3.43, "masked": 1.13},
     "backward": {"blocks": {"per_score":
      [[32, 2.59], [64, 2.16], [96, 2.13], [128, 2.01], [192, 1.6], [256, 1.5]]},
      "explicit": 4.46, "masked": 1.07},
     "dense_backward": 1.96, "key": 34.3, "gathered": 5.82, "call": 24200, "run": 41100, "moved": 121}}},
  {"processor": {"device": "cpu", "name": "Intel(R) Xeon(R) Processor",
    "vendor": "GenuineIntel", "vectors": "AVX512", "has_tiles": true},
   "source": "forward in float32 measured, the rest taken from an AMD EPYC",
   "costs": {
    "float32": {
     "forward": {"blocks": {"per_score":
      [[32, 1.33], [64, 1.33], [96, 1.28], [128, 1.29], [192, 1.05], [256, 1.04]]},
      "explicit": 3.01, "masked": 1.13},
     "backward": {"blocks": {"per_score":
      [[32, 1.45], [64, 1.25], [96, 1.19], [128, 1.15], [192, 1.13], [256, 1.13]]},
      "explicit": 2.84, "masked": 1.05},
     "dense_backward": 2.61, "key": 5.17, "gathered": 6.51, "call": 24300, "run": 39600, "moved": 112},
    "bfloat16": {
     "forward": {"blocks": {"per_score":
      [[32, 1.54], [64, 1.34], [96, 1.4], [128, 1.38], [192, 1.28], [256, 1.25]]},
      "explicit": 3.43, "masked": 1.13},
     "backward": {"blocks": {"per_score":
      [[32, 2.59], [64, 2.16], [96, 2.13], [128, 2.01], [192, 1.6], [256, 1.5]]},
      "explicit": 4.46, "masked": 1.07},
     "dense_backward": 1.96, "key": 34.3, "gathered": 5.82, "call": 24200, "run": 41100, "moved": 121}}},
  {"processor": {"device": "cpu", "name": "Intel(R) Xeon(R) Processor",
    "vendor": "GenuineIntel", "vectors": "AVX512", "has_tiles": false},
   "source": "measured on 2026-11-27, and bfloat16 on 2026-11-28, with torch 2.13.0+cpu, 1 threads",
   "costs": {
    "float32": {
     "forward": {"blocks": {"per_score":
      [[32, 1.54], [64, 1.41], [96, 1.42], [128, 1.46], [192, 1.4], [256, 1.32]]},
      "explicit": 3.36, "masked": 1.24},
     "backward": {"blocks": {"per_score":
      [[32, 2.46], [64, 1.97], [96, 1.7], [128, 1.68], [192, 1.39], [256, 1.33]]},
      "explicit": 3.71, "masked": 1.14},
     "dense_backward": 2.37, "key": 10.5, "gathered": 47.7, "call": 44500, "run": 43600, "moved": 154},
    "bfloat16": {
     "forward": {"blocks": {"per_score":
      [[32, 1.7], [64, 1.59], [96, 1.64], [128, 1.61], [192, 1.44], [256, 1.41]]},
      "explicit": 2.78, "masked": 1.16},
     "backward": {"blocks": {"per_score":
      [[32, 2.62], [64, 1.94], [96, 1.76], [128, 1.69], [192, 1.43], [256, 1.37]]},
      "explicit": 3.98, "masked": 1.07, "is_widened": true},
     "dense_backward": 2.21, "key": 14.8, "gathered": 21.2, "call": 56900, "run": 42600, "moved": 82.9}}},
  {"processor": {"device": "cuda", "name": "NVIDIA H200"},
   "source": "measured on 2026-11-27 with torch 2.11.0+cu130; copies and FlashAttention-4 are estimated",
   "costs": {
    "bfloat16": {
     "forward": {"blocks": {"per_score": [[64, 50]]}, "explicit": 50, "masked": 1.9},
     "backward": {"blocks": {"per_score": [[64, 50]]}, "explicit": 50, "masked": 1.9},
     "dense_backward": 2.6, "key": 8, "gathered": 40, "call": 3e+09, "run": 5e+07, "moved": 600,
     "flex": 3.5, "flex_call": 2.5e+08, "flash": 1.6, "flash_call": 5e+07}}},
  {"processor": {"device": "cuda", "name": "NVIDIA H100 80GB HBM3"},
   "source": "estimated: as an H200",
   "costs": {
    "bfloat16": {
     "forward": {"blocks": {"per_score": [[64, 50]]}, "explicit": 50, "masked": 1.9},
     "backward": {"blocks": {"per_score": [[64, 50]]}, "explicit": 50, "masked": 1.9},
     "dense_backward": 2.6, "key": 8, "gathered": 40, "call": 3e+09, "run": 5e+07, "moved": 600,
     "flex": 3.5, "flex_call": 2.5e+08, "flash": 1.6, "flash_call": 5e+07}}},
  {"processor": {"device": "cuda", "name": "NVIDIA A100-SXM4-80GB"},
   "source": "estimated from published figures: FlexAttention at 0.9 and 0.85 of FlashAttention-2",
   "costs": {
    "bfloat16": {
     "forward": {"blocks": {"per_score": [[64, 50]]}, "explicit": 50, "masked": 1.9},
     "backward": {"blocks": {"per_score": [[64, 50]]}, "explicit": 50, "masked": 1.9},
     "dense_backward": 2.6, "key": 8, "gathered": 40, "call": 3e+09, "run": 5e+07, "moved": 600,
     "flex": 1.2, "flex_call": 2.5e+08, "flash": 1.1, "flash_call": 5e+07}}}
]
"""
