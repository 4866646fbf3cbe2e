"""Work on a module that a compiler runs while it traces, and does not look into."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def run_untraced(work: Callable[..., object], module: nn.Module, *arguments: Any) -> None:
    """Call `work(module, *arguments)`; what it keeps with the module can be read afterwards, also by traced code.

    Args:
        work: a function of a Python module, no closure.
        arguments: constants to every compiler: numbers, text, functions, and tuples of them.
    """
    if torch.compiler.is_compiling():
        _run_at(id(module), work, *arguments)
    else:
        work(module, *arguments)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _run_at(address: int, work: Callable[..., object], *arguments: Any) -> bool:
    """Call `work` on the module at an address, as torch before 2.13 takes no module as an argument here.

    The code that is being traced holds the module, so it is there.
    """
    work(ctypes.cast(address, ctypes.py_object).value, *arguments)
    return True
