"""How often a computation waits for its device, by the line that makes it wait; `pretended_cuda` counts."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
PACKAGE = "hf_efficient_attn"
# whose code makes the host wait: that which stands nearest
PLACES = rf"/({PACKAGE}|transformers)/(?!tests/)"

# whose answer is a number or a size that the host needs
WAITING = {
    getattr(aten, name)
    for name in (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "linalg_inv_ex",
        "_linalg_check_errors",
    )
}
# take indices from the host
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class Waits(Counter[str]):
    """How often each line of the package, or of transformers, waited for the device or copied from one to the other."""

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if re.search(PLACES, frame.filename)]
        name = re.split(PLACES, frames[-1].filename)[1] if frames else "elsewhere"
        place = f"{frames[-1].filename.rpartition(name)[2]}:{frames[-1].lineno}" if frames else ""
        self[f"{name}: {what} at {place}"] += 1

    def of_package(self) -> Waits:
        """Return those that are not transformers' own."""
        return Waits({key: count for key, count in self.items() if not key.startswith("transformers")})


waits = Waits()


def is_sized_by_values(packet: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the host must learn how large a result is: of true entries, or of repeats."""
    if packet is aten.repeat_interleave:
        return isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
    if packet not in INDEXED:
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
