"""Work on a module that a compiler runs while tracing, without tracing it."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_efficient_attn import messages


def run_untraced(work: Callable[..., object], module: nn.Module, *arguments: Any) -> None:
    """Call `work(module, *arguments)`; traced code, too, can read afterwards what it stores in the module.

    Args:
        work: a function of a Python module, not a closure.
        arguments: constants to a compiler: numbers, strings, functions, and tuples of these.
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
