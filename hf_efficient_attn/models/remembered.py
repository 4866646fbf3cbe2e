"""What a module works out once in Python, of things that a compiler cannot trace: the algebra of patterns."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from hf_efficient_attn.attention.untraced import run_untraced
from hf_efficient_attn.layout.plan import read_pattern_text, to_text
from hf_efficient_attn.patterns.pattern import Pattern


def remembered(module: nn.Module, build: Callable[..., Any], pattern: Pattern, *arguments: Hashable) -> Any:
    """Return `build(pattern, *arguments)`, kept with the module for as long as these stay the same.

    A compiler does not look into `build`, and takes its result for granted.
    """
    name = f"_{build.__name__}"
    # a compiler may not look at what is kept before it has been made for these arguments
    if torch.compiler.is_compiling():
        # as text, whose making is traced: so the graph is guarded by the fields of the pattern
        run_untraced(_remember_written, module, name, build, to_text(pattern), *arguments)
    else:
        _remember(module, name, build, pattern, *arguments)
    # not from __dict__, of which the compiler may hold a copy that is older
    return getattr(module, name)[1]


def _remember_written(module: nn.Module, name: str, build: Callable[..., Any], text: str, *arguments: Hashable) -> None:
    _remember(module, name, build, read_pattern_text(text), *arguments)


def _remember(module: nn.Module, name: str, build: Callable[..., Any], *arguments: Hashable) -> None:
    if module.__dict__.get(name, (None,))[0] != arguments:
        module.__dict__[name] = (arguments, build(*arguments))
