"""Which processor this is, as far as the times of kernels depend on it."""

import os
import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

LISTING = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A processor, or a GPU.

    Attributes:
        device: "cpu", or the type of another device.
        name: as the system or the driver knows it.
        vendor: as the processor reports it; "" where the system does not say.
        vectors: the widest instructions that torch's kernels use, such as "AVX2" or "AVX512".
        has_tiles: whether it multiplies matrices in tiles (AMX), as far as the system shows it.
        num_cores: how many cores the system shows; 0: unknown.
    """

    device: str
    name: str
    vendor: str = ""
    vectors: str = ""
    has_tiles: bool = False
    num_cores: int = 0

    def likeness(self, other: "Processor") -> tuple[bool, ...]:
        """Return how alike two are, the greater the more: by device, name, make, instructions, and number of cores.

        Virtual machines hide instructions that the processor has, so its name and its make count first.
        """
        fields = ("device", "name", "vendor", "vectors", "has_tiles", "num_cores")
        return tuple(getattr(self, field) == getattr(other, field) for field in fields)

    def is_model_of(self, other: "Processor") -> bool:
        """Return whether two are one model of processor, with as many cores or others."""
        return replace(self, num_cores=0) == replace(other, num_cores=0)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.name, self.vectors, "AMX" if self.has_tiles else "") if part)


@lru_cache
def processor_of(device: str) -> Processor:
    """Return the processor behind a type of device."""
    if device != "cpu":
        # an explanation may ask for a device that is not there
        is_there = device == "cuda" and torch.cuda.is_available()
        return Processor(device, torch.cuda.get_device_name() if is_there else "")
    fields = _listed() if LISTING.exists() else {}
    name = fields.get("model name") or platform.processor() or platform.machine()
    has_tiles = "amx_tile" in fields.get("flags", "").split()
    vendor, vectors = fields.get("vendor_id", ""), torch.backends.cpu.get_cpu_capability()
    return Processor(device, name, vendor, vectors, has_tiles, os.cpu_count() or 0)


def _listed() -> dict[str, str]:
    """Return what Linux says of the first of the processors."""
    first = LISTING.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
