"""What attention modules of transformers may ask for, but the engine cannot compute."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.errors import UnsupportedBackendError

# parts of scores that the engine does not have, by the argument that brings them
UNSUPPORTED = {
    "sinks": "has attention sinks of each query (sinks)",
    "indices": "chooses its keys by content (indices)",
    "block_indices": "chooses its keys by content (block_indices)",
}
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_unsupported(module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
    """Raise UnsupportedBackendError for calls that would be computed wrongly.

    These have sinks per query (sinks per head, `s_aux`, are computed), keys chosen by content, paged caches, or
    sequences that are divided into shards.
    """
    for option, what in UNSUPPORTED.items():
        if options.get(option) is not None:
            raise UnsupportedBackendError(
                f'{type(module).__name__} {what}, which attn_implementation="{NAME}" cannot compute. Load the model '
                'with attn_implementation="eager" and without attention_pattern.'
            )
    if options.get("cache") is not None:
        raise UnsupportedBackendError(
            f'attn_implementation="{NAME}" cannot read a paged cache (generate_batch). Use generate.'
        )
    if torch.compiler.is_compiling():
        return
    context_parallel = sys.modules.get(CONTEXT_PARALLEL)
    if hasattr(query, "placements") or (context_parallel and getattr(context_parallel, "_replaced_functions", None)):
        raise UnsupportedBackendError(
            "Context parallelism cuts the sequence into shards and would drop the pattern. Let processes share texts "
            "(hea.shard_sequence) instead, or train with data parallelism (DDP, FSDP)."
        )
