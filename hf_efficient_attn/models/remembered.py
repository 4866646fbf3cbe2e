"""What a module works out once in Python, of things that a compiler cannot trace: the algebra of patterns."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn


def remembered(module: nn.Module, build: Callable[..., Any], *arguments: Hashable) -> Any:
    """Return `build(*arguments)`, kept with the module for as long as the arguments stay the same.

    A compiler does not look into `build`, and takes its result for granted.
    """
    # nor may it look at what is kept before it has been made for these arguments
    name = f"_{build.__name__}"
    if torch.compiler.is_compiling() or getattr(module, name, (None,))[0] != arguments:
        _remember(module, name, build, *arguments)
    # not from __dict__, of which the compiler may hold a copy that is older
    return getattr(module, name)[1]


@torch.compiler.assume_constant_result
def _remember(module: nn.Module, name: str, build: Callable[..., Any], *arguments: Hashable) -> bool:
    module.__dict__[name] = (arguments, build(*arguments))
    return True
