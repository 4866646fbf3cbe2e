"""Inputs that neither our models nor others on "efficient" take: no tokens, masks with values besides 0 and 1."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import bring, on_host

# the argument by which a call marks its global tokens, as of transformers' Longformer
MARKED = "global_attention_mask"


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


def check_marked_shape(marked: Any, batch_size: int, num_tokens: int) -> None:
    """Raise InputError unless `global_attention_mask` has an entry for each token, the cached ones included."""
    if not isinstance(marked, Tensor) or tuple(marked.shape) != (batch_size, num_tokens):
        given = f"shape {list(marked.shape)}" if isinstance(marked, Tensor) else f"the type {type(marked).__name__}"
        raise InputError(
            f"{MARKED} has {given}; it must be [batch, tokens] = [{batch_size}, {num_tokens}], a tensor, cached "
            "tokens first (a PatternCache takes no such mask once it has dropped tokens)."
        )


def check_marked(marked: Tensor, is_token: Tensor | None) -> None:
    """Raise InputError if `global_attention_mask` has values besides 0 and 1, or marks padding alone in an example.

    is_token: [batch, tokens], 0 for padding; None: all are tokens. While compiling, nothing is checked.
    """
    if torch.compiler.is_compiling():
        return
    bring(marked, is_token)
    is_marked = on_host(marked)
    if bool(((is_marked != 0) & (is_marked != 1)).any()):
        raise InputError(
            f"{MARKED} holds {is_marked.unique().tolist()[:5]}; it must hold 0 and 1, apart from attention_mask. (The "
            "authors' single mask with 2 = global is attention_mask plus it.)"
        )
    if is_token is not None:
        on_padding = is_marked.any(1) & ~(is_marked.bool() & on_host(is_token).bool()).any(1)
        if bool(on_padding.any()):
            raise InputError(
                f"{MARKED} marks nothing but padding in example {int(on_padding.nonzero()[0])}: mask and padding are "
                "on different sides. Mark the tokens where attention_mask is 1."
            )
