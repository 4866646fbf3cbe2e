"""Results that modules compute once in Python because a compiler cannot trace them: the algebra of patterns."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.operator_args import read_pattern_text, to_text
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.patterns.pattern import Pattern

_results: BoundedCache[Any] = BoundedCache(SMALL_BYTES)


def remembered(module: nn.Module, build: Callable[..., Any], pattern: Pattern, *arguments: Hashable) -> Any:
    """Return `build(pattern, *arguments)`, computed once per module.

    A compiler does not trace `build`, and treats its result as a constant.
    """
    if not torch.compiler.is_compiling():
        return _build(build, pattern, *arguments)
    name = f"_{build.__name__}"
    # as text, whose writing is traced, so that the graph is guarded by the fields of the pattern
    run_untraced(_keep, module, name, build, to_text(pattern), *arguments)
    # not from __dict__, of which the compiler may hold an older copy
    return getattr(module, name)


def _build(build: Callable[..., Any], *arguments: Hashable) -> Any:
    return _results.get((build, arguments), lambda: build(*arguments))


def _keep(module: nn.Module, name: str, build: Callable[..., Any], text: str, *arguments: Hashable) -> None:
    module.__dict__[name] = _build(build, read_pattern_text(text), *arguments)
