"""Exporting, autocast and compiling: how a call detects them, and how it behaves under them."""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

# imported by name: after a graph break, a compiler would separately compile a function that names the module
from torch.compiler import is_exporting as exports

from hf_efficient_attn import messages
from hf_efficient_attn.errors import UnsupportedBackendError


# in traced code, torch 2.11 always returns True, whatever it compiles for
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Return whether a model is being traced by `torch.export`, not by `torch.compile`."""
    return exports()


# Autocast: the dtype in which a call of attention is computed, and how the computation is shielded from autocast.
#
# Under autocast, attention behaves as torch's `scaled_dot_product_attention`: queries, keys and values are cast to its
# dtype on entry, and nothing inside is cast again, so that scores, softmax and lse stay as wide as without autocast.


def autocast_states(*states: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype of autocast if it is on for the device of the first, otherwise as they are.

    As in torch, tensors in float64 and those that are not floating-point are never cast.
    """
    device = states[0].device.type
    if not is_autocast(device):
        return states
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 and each.device.type == device
        else each
        for each in states
    )  # fmt: skip


def autocast_off(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which autocast is off for this type of device."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else nullcontext()  # type: ignore[return-value]


def is_autocast(device_type: str) -> bool:
    """Return whether autocast is on for a type of device; some, such as "meta", have none."""
    return (device_type in ("cpu", "cuda") or _has_autocast(device_type)) and torch.is_autocast_enabled(device_type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device_type: str) -> bool:
    # torch before 2.13 cannot trace this call
    return torch.amp.is_autocast_available(device_type)


# Work on a module that a compiler runs while tracing, without tracing it.


def run_untraced(work: Callable[..., object], module: nn.Module, *arguments: Any) -> None:
    """Call `work(module, *arguments)`; afterwards, traced code can also read what it stores in the module.

    Args:
        work: a module-level function, not a closure.
        arguments: constants for a compiler: numbers, strings, functions, and tuples of these.
    """
    if torch.compiler.is_compiling():
        _run_at(id(module), work, *arguments)
    else:
        work(module, *arguments)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _run_at(address: int, work: Callable[..., object], *arguments: Any) -> bool:
    """Call `work` on the module at an address, since torch before 2.13 takes no module as an argument here.

    The traced code holds a reference to the module, so it exists.
    """
    work(ctypes.cast(address, ctypes.py_object).value, *arguments)
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def shown(value: Any) -> str:
    """Return a constant as messages show it; torch before 2.13 cannot trace `messages.shown`."""
    return messages.shown(value)


# `torch.jit.trace`, which would turn the masks and lengths of one input into constants.


def refuse_tracing() -> None:
    """Raise UnsupportedBackendError under `torch.jit.trace`, which would keep the masks and lengths of one input."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise UnsupportedBackendError(
            "torch.jit.trace (which torch.onnx.export(dynamo=False) and TensorBoard's add_graph call) would keep the "
            "masks, buckets and lengths of its example inputs as constants, and compute other inputs wrongly. Use "
            "torch.export.export, or torch.onnx.export(dynamo=True), which take masks and lengths as inputs."
        )
