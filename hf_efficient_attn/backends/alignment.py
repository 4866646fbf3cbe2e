"""What torch's memory-efficient attention on GPUs assumes of its inputs, and does not check before it fails."""

from torch import Tensor

# a load of the kernel
BYTES = 16


def aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors [batch, heads, tokens, width] that the kernel can read, by copies if need be."""
    return tuple(tensor if is_aligned(tensor) else tensor.contiguous() for tensor in tensors)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows are contiguous and start at multiples of a load, as long as they are themselves such.

    >>> import torch
    >>> is_aligned(torch.empty(2, 8, 10, 16).transpose(1, 2)), is_aligned(torch.empty(2, 8, 10, 17)[..., :16])
    (True, False)
    """
    *strides, stride = tensor.stride()
    if stride != 1 or tensor.storage_offset() * tensor.element_size() % BYTES:
        return False
    is_multiple = (
        size == 1 or each * tensor.element_size() % BYTES == 0
        for size, each in zip(tensor.shape, strides, strict=False)
    )
    return all(is_multiple)
