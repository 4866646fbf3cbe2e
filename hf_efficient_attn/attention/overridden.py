"""Attention functions that another library has replaced, as the sequence parallelism of DeepSpeed does (Ulysses).

Its function gathers the whole sequence for some of the heads, calls the one it has replaced with no mask at all, and
tells it the positions of all tokens.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.table_form import has_rows
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.messages import shown


def is_overridden(implementation: str) -> bool:
    """Return whether models call another function than the one registered under this name."""
    registered = AttentionInterface._global_mapping.get(implementation)
    return ALL_ATTENTION_FUNCTIONS.get(implementation) is not registered


def refuse_lost_padding(table: Tensor, implementation: str) -> None:
    """Raise UnsupportedBackendError for a token table with padding that the layers would never see."""
    if torch.compiler.is_compiling() or not has_rows(table) or not is_overridden(implementation):
        return
    if bool((table[:, 0, 0] == 0).any()):
        raise UnsupportedBackendError(
            f"Another library has replaced the attention function {shown(implementation)} (DeepSpeed Ulysses does), "
            "and its calls have no masks, so this batch's padding would be read. Pass texts without padding and "
            "without attention_mask, packed with position_ids that restart with every document."
        )


def refuse_overridden(implementation: str | None, model: str) -> None:
    """Raise UnsupportedBackendError where a model would compute without the function that replaces its attention."""
    if torch.compiler.is_compiling() or implementation is None or not is_overridden(implementation):
        return
    raise UnsupportedBackendError(
        f"Another library has replaced the attention function {shown(implementation)}, as the sequence parallelism of "
        f"DeepSpeed (Ulysses) does, but {model} computes more from its tokens than that function knows of: every "
        "process would read its own part of the text only. Use data parallelism (DDP, FSDP), or a sparsified model of "
        "transformers."
    )
