"""Tensors that a kernel captures: the values of terms, and where the tokens of every example stand."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.token_locations import TokenLocations


def captured(tensor: Tensor, dims: tuple[int, int]) -> Tensor:
    """Return the tensor, of a batch and a length in these dimensions, as a kernel captures it.

    torch 2.13 may write wrong code for CPUs where the size of a captured tensor varies. Few sizes occur if batch and
    length are powers of two; the entries that are added are never read.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    added = [(1 << (size - 1).bit_length()) - size if dim in dims else 0 for dim, size in enumerate(tensor.shape)]
    return pad(tensor.detach(), [number for end in reversed(added) for number in (0, end)])


def captured_locations(locations: TokenLocations) -> TokenLocations:
    """Return the locations as a kernel captures them."""
    documents, positions = (captured(tensor, (0, 1)) for tensor in (locations.documents, locations.positions))
    return TokenLocations(
        documents, positions, None if locations.is_global is None else captured(locations.is_global, (0, 1))
    )


def kind_of(tensor: Tensor) -> object:
    """Return all of a captured tensor that a compiled kernel depends on."""
    sizes = (size if tensor.device.type == "cpu" else size > 1 for size in tensor.shape)
    return tensor.dtype, tuple(sizes)
