"""Numbers of the host as tensors on a device, copied once, since the host waits for every copy."""

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import cached


def device_numbers(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers as a tensor [numbers], which is shared, so nobody may change it.

    dtype: None means the default of `torch.tensor`.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _kept(numbers, device, dtype)


@cached()
def _kept(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
