"""What a pattern that chooses keys by their content becomes once there are queries and keys: a choice among keys."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.key_tokens import unknown_start
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.select import AUTO, preferred_backend
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import choose_blocks
from hf_efficient_attn.layout.tracing import shown
from hf_efficient_attn.patterns.bands import Causal
from hf_efficient_attn.patterns.pattern import Pattern


def with_choice(
    followed: LayerPattern,
    chosen: ChosenKeys | None,
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    query_offset: int | Tensor | None,
    backend: str = AUTO,
) -> tuple[LayerPattern, ChosenKeys | None]:
    """Return what a layer follows by position, and the keys that are chosen; without such a pattern, what it was given.

    Args:
        query, key: [B, H, Nq, D] and [B, Hkv, Nk, D], after rotary positions.
        query_offset, backend: as for `attention`.

    Raises:
        InputError: keys were chosen already, or masks that do not fit.
        UnsupportedBackendError: queries and keys are of different sequences.
    """
    pattern: Any = followed.pattern
    # what is no pattern is refused where the call is built
    if not getattr(pattern, "chooses_by_content", False):
        return followed, chosen
    if chosen is not None:
        raise InputError(f"{shown(pattern)} chooses the keys itself: leave chosen out, or give Causal() with it.")
    if followed.is_cross:
        raise UnsupportedBackendError(f"{shown(pattern)} is for self-attention: leave cross=True out.")
    # lengths may be symbols to a compiler
    is_short = not torch.compiler.is_compiling() and key.shape[2] <= pattern.reads_all_up_to()
    if is_short and not is_for_choices(backend):
        return replace(followed, pattern=Causal()), None
    tokens.check(query.shape[0], key.shape[2], query.device)
    start = unknown_start(query_offset)
    if query_offset is None or start is not None:
        query_offset = key.shape[2] - query.shape[2]
    sizes = (pattern.block_tokens, pattern.num_chosen)
    blocks = choose_blocks(query.detach(), key.detach(), list(tokens.tensors), *sizes, int(query_offset), start)
    return replace(followed, pattern=Causal()), ChosenBlocks(blocks, pattern.block_tokens)


def is_for_choices(backend: str) -> bool:
    """Return whether the backend that was asked for computes nothing but choices, also those of all keys."""
    return (preferred_backend() if backend == AUTO else backend) == gathered.NAME


def planned_choice(
    pattern: Any, num_heads: int, num_queries: int, num_keys: int, backend: str = AUTO
) -> tuple[Pattern, ChosenKeys | None]:
    """Return what `with_choice` would make of a pattern, with a choice that has a shape but no contents."""
    if not pattern.chooses_by_content:
        return pattern, None
    if num_keys <= pattern.reads_all_up_to() and not is_for_choices(backend):
        return Causal(), None
    blocks = torch.empty(1, num_heads, num_queries, pattern.num_chosen, dtype=torch.int32, device="meta")
    return Causal(), ChosenBlocks(blocks, pattern.block_tokens)
