"""Attention functions that another library has replaced, such as DeepSpeed's sequence parallelism (Ulysses).

DeepSpeed's function gathers the whole sequence for some of the heads, and calls the function that it has replaced
without a mask, but with the positions of all tokens.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.notices import warn_once
from hf_efficient_attn.attention.table_form import has_rows
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.messages import shown

# the module in which DeepSpeed keeps the groups of processes that share a sequence, once it is used
DEEPSPEED_GROUPS = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def is_overridden(implementation: str) -> bool:
    """Return whether models call another function than the one that we registered under this name."""
    registered = AttentionInterface._global_mapping.get(implementation)
    return ALL_ATTENTION_FUNCTIONS.get(implementation) is not registered


def shard_of_heads(implementation: str) -> tuple[int, int] | None:
    """Return (rank of this process, number of processes) among which DeepSpeed divides the heads; None: it does not.

    All processes get equally many heads, in the order of their ranks.
    """
    groups: Any = sys.modules.get(DEEPSPEED_GROUPS)
    if not is_overridden(implementation) or getattr(groups, "_SEQUENCE_PARALLEL_GROUP", None) is None:
        return None
    return groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()


def warn_of_parts(position_ids: Tensor, implementation: str) -> None:
    """Warn of positions, [batch, tokens], that each process has counted from 0 for its part of a sequence."""
    shard = shard_of_heads(implementation)
    if shard is None or position_ids.shape[1] % shard[1]:
        return
    parts = position_ids.unflatten(1, (shard[1], -1))
    if bool((parts == torch.arange(parts.shape[2], device=parts.device)).all()):
        warn_once(
            "Under the sequence parallelism of DeepSpeed (Ulysses), position_ids restart exactly where the part of "
            "each process begins, as in a model that was called without any: every part counts as a document of its "
            "own. If texts continue from part to part, pass each process the position_ids of its part, as "
            "UlyssesSPDataLoaderAdapter does."
        )


def refuse_lost_padding(table: Tensor, implementation: str) -> None:
    """Raise UnsupportedBackendError for a token table with padding that the layers would never see."""
    if torch.compiler.is_compiling() or not has_rows(table) or not is_overridden(implementation):
        return
    if bool((on_host(table)[:, 0, 0] == 0).any()):
        raise UnsupportedBackendError(
            f"Another library has replaced the attention function {shown(implementation)} (DeepSpeed Ulysses does), "
            "and its calls have no masks, so this batch's padding would be read. Pass texts without padding and "
            "without attention_mask, packed with position_ids that restart with every document."
        )


def refuse_overridden(implementation: str | None, model: str) -> None:
    """Raise UnsupportedBackendError for a model that would bypass the function that replaces its attention."""
    if torch.compiler.is_compiling() or implementation is None or not is_overridden(implementation):
        return
    raise UnsupportedBackendError(
        f"Another library has replaced the attention function {shown(implementation)}, as the sequence parallelism of "
        f"DeepSpeed (Ulysses) does, but {model} computes more from its tokens than that function knows of: every "
        "process would read its own part of the text only. Use hea.shard_sequence, if it takes this model, "
        "data parallelism (DDP, FSDP), or a sparsified model of transformers."
    )
