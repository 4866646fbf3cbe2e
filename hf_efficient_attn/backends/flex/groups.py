"""The patterns of the heads in the form for kernels: drawn, and with tensors as lookup tables."""

from hashlib import sha256
from operator import index
from threading import Lock
from types import SimpleNamespace

import torch
from torch.fx.experimental.symbolic_shapes import has_static_value

from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call_text import read_call_text, read_layout, write_call_text
from hf_efficient_attn.layout.device_copies import tables_on
from hf_efficient_attn.layout.layout import Heads, Layout
from hf_efficient_attn.patterns.pattern import Pattern

# (first head, pattern) of each run of heads with equal patterns
Groups = tuple[tuple[int, Pattern], ...]
# a program whose groups were evicted is recompiled
MAX_KEPT = 1024
_for_programs = SimpleNamespace()
_lock = Lock()


def head_groups(layout: Layout, device: torch.device) -> Groups:
    """Return the patterns of the heads with tensors on the device as lookup tables."""
    if torch.compiler.is_compiling():
        return getattr(_for_programs, _keep(*_known(layout), device))  # type: ignore[no-any-return]
    return _groups(layout, device)


def is_traceable(layout: Layout) -> bool:
    """Return whether a compiler can expand the patterns in reasonable time."""
    if torch.compiler.is_compiling():
        return _is_constant_traceable(*_known(layout))
    return all(drawn.is_traceable for _, _, drawn in layout.head_groups())


def is_causal(layout: Layout) -> bool:
    """Return whether it is known that no key lies after its query."""
    return _is_constant_causal(layout_text(layout)) if torch.compiler.is_compiling() else layout.pattern.is_causal


def is_drawn(pattern: Pattern) -> bool:
    """Return whether the pattern depends on the length or is random."""
    return pattern.depends_on_length or pattern.is_random


def is_length_known(layout: Layout) -> bool:
    """Return whether the lengths are numbers, not symbols of a program that is being compiled."""
    lengths = layout.num_keys, layout.num_positions or 0
    return not torch.compiler.is_compiling() or all(has_static_value(length) for length in lengths)


def layout_text(layout: Layout) -> str:
    """Return pattern, layer and heads as text, whose fields guard a program that is being compiled."""
    heads = layout.first_head, layout.num_model_heads
    return write_call_text(layout.pattern, layout.layer, (), *heads, layout.is_cross)


def _known(layout: Layout) -> tuple[str, int, int | None]:
    """Return the parts of a layout that are no symbols: text, number of heads, length to draw for."""
    # while compiling, a number may be a symbol; as an index it has a value
    drawn_tokens = index(layout.drawn_tokens) if is_drawn(layout.pattern) else None
    return layout_text(layout), index(layout.num_heads), drawn_tokens


# a compiler runs this while tracing, and treats the result as a constant; it could not call methods of an object
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keep(text: str, num_heads: int, drawn_tokens: int | None, device: torch.device) -> str:
    """Store the groups where traced code can read them, and return their name there."""
    values = repr((text, num_heads, drawn_tokens, str(device)))
    name = f"groups_{sha256(values.encode()).hexdigest()}"
    with _lock:
        kept = vars(_for_programs)
        if name not in kept and len(kept) >= MAX_KEPT:
            del kept[next(iter(kept))]
        kept[name] = _groups_of_text(text, num_heads, drawn_tokens, device)
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_constant_traceable(text: str, num_heads: int, drawn_tokens: int | None) -> bool:
    groups = _groups_of_text(text, num_heads, drawn_tokens, torch.device("cpu"))
    return all(pattern.is_traceable for _, pattern in groups)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_constant_causal(text: str) -> bool:
    return read_call_text(text)[0].is_causal


def _groups_of_text(text: str, num_heads: int, drawn_tokens: int | None, device: torch.device) -> Groups:
    if drawn_tokens is not None:
        return _groups(read_layout(text, num_heads, drawn_tokens, drawn_tokens, 0), device)
    pattern, _, _, first_head, num_model_heads, _ = read_call_text(text)
    return _undrawn_groups(pattern, (first_head, num_heads, num_model_heads or num_heads), device)


@cached()
def _groups(layout: Layout, device: torch.device) -> Groups:
    return _with_tensors(tuple((first, drawn) for first, _, drawn in layout.head_groups()), device)


@cached()
def _undrawn_groups(pattern: Pattern, heads: Heads, device: torch.device) -> Groups:
    first, count, total = heads
    own = pattern.heads(total)[first : first + count]
    starts = [head for head in range(count) if head == 0 or own[head] != own[head - 1]]
    return _with_tensors(tuple((head, own[head]) for head in starts), device)


def _with_tensors(groups: Groups, device: torch.device) -> Groups:
    for _, pattern in groups:
        # computes what the pattern caches, which the compiler cannot trace
        pattern.allowed(0, 0)
    tabled = tables_on([pattern for _, pattern in groups], device)
    return tuple((first, pattern) for (first, _), pattern in zip(groups, tabled, strict=True))
