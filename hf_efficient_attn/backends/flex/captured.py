"""Tensors that a kernel captures: the values of terms, and the locations of the tokens of every example."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.token_locations import TokenLocations


def captured(tensor: Tensor, dims: tuple[int, int]) -> Tensor:
    """Return a tensor as a kernel captures it; `dims` are its batch and its length.

    torch 2.13 may generate wrong code for CPUs if the size of a captured tensor varies. Padding batch and length to
    powers of two leaves few sizes; the added entries are never read.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    added = [(1 << (size - 1).bit_length()) - size if dim in dims else 0 for dim, size in enumerate(tensor.shape)]
    return pad(tensor.detach(), [number for end in reversed(added) for number in (0, end)])


def by_pair(values: Tensor) -> Tensor:
    """Return the values of a term, [.., .., queries or 1, labels], such that a pair finds its own by query or label.

    torch compiles no backward pass where a head has a single value for all of its pairs: it gets a second label.
    """
    return pad(values, (0, 1)) if values.shape[2] == values.shape[3] == 1 and values.requires_grad else values


def captured_locations(locations: TokenLocations) -> TokenLocations:
    """Return the locations as a kernel captures them."""
    documents, positions = (_captured_numbers(tensor) for tensor in (locations.documents, locations.positions))
    is_global = None if locations.is_global is None else _captured_numbers(locations.is_global)
    return TokenLocations(documents, positions, is_global)


def _captured_numbers(tensor: Tensor) -> Tensor:
    return in_memory(tensor) if torch.compiler.is_compiling() else captured(tensor, (0, 1))


@torch.library.custom_op("hf_efficient_attn::in_memory", mutates_args=())
def in_memory(tensor: Tensor) -> Tensor:
    """Return a copy that a compiler has to write to memory, as kernels of flex capture no tensor still to compute."""
    return tensor.clone(memory_format=torch.contiguous_format)


@in_memory.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def kind_of(tensor: Tensor) -> object:
    """Return the properties of a captured tensor that a compiled kernel depends on."""
    sizes = (size if tensor.device.type == "cpu" else size > 1 for size in tensor.shape)
    return tensor.dtype, tuple(sizes)
