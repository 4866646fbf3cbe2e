"""Inputs that neither our models nor others on "efficient" take: no tokens, or masks with values besides 0 and 1."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.host_copies import on_host


def refuse_empty(name: str, given: Any, num_axes: int) -> None:
    """Raise InputError for an input without examples or tokens, one of whose first `num_axes` sizes is 0.

    transformers' own models cannot compute it either. While compiling, nothing is checked.
    """
    if not isinstance(given, Tensor) or torch.compiler.is_compiling():
        return
    if 0 in given.shape[:num_axes]:
        advice = "" if given.shape[0] == 0 else " If a cache holds the whole text already, pass a new one."
        raise InputError(f"There are no tokens: {name} has shape {list(given.shape)}. Leave such batches out.{advice}")


def check_mask_values(attention_mask: Any, name: str = "attention_mask") -> None:
    """Raise InputError for a padding mask with values other than 0 and 1, which every model would read differently.

    While compiling, nothing is checked. Bool masks need no check; others are copied from an accelerator once per
    forward pass. An assertion on the device would not wait, but it would end the process without this message.
    """
    is_padding_mask = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if torch.compiler.is_compiling() or not is_padding_mask or attention_mask.dtype == torch.bool:
        return
    values = on_host(attention_mask)
    is_other = (values != 0) & (values != 1)
    if bool(is_other.any()):
        raise InputError(
            f"{name} holds {values[is_other][0].item()}; it must hold 1 for tokens and 0 for padding. "
            "Global tokens, 2 in the authors' masks, belong into global_attention_mask, and a mask that is added to "
            "the scores has four dimensions, [batch, 1, queries, keys]."
        )
