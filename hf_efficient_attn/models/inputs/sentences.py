"""Pairs of sentences in a row, which their tokens' types tell apart, as documents of their own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.packing import said_starts
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import on_host


def check_sentences(
    token_type_ids: Tensor | None, position_ids: Tensor | None, embedded: Tensor, options: Mapping[str, Any]
) -> None:
    """Raise InputError if a call does not say which tokens are the two sentences, or says something else, too."""
    batch_size, tokens = embedded.shape[:2]
    if token_type_ids is None or token_type_ids.shape != (batch_size, tokens):
        shape = None if token_type_ids is None else list(token_type_ids.shape)
        raise InputError(
            f"token_type_ids has shape {shape}; with separate_sentences=True it must be [batch, tokens] = "
            f"[{batch_size}, {tokens}], 0 for tokens of the first sentence and 1 for those of the second."
        )
    if position_ids is not None or said_starts(options, batch_size, tokens) is not None:
        raise InputError(
            "separate_sentences=True makes the two sentences the documents of a row, and counts positions in each. "
            "Leave position_ids, seq_idx and cu_seq_lens_q out."
        )
    if not is_tracing(token_type_ids) and bool((on_host(token_type_ids) >> 1).any()):
        raise InputError("token_type_ids has other types than 0 and 1, and separate_sentences=True has two sentences.")


def sentence_positions(token_type_ids: Tensor, attention_mask: Any) -> Tensor:
    """Return positions [B, T], counted over the real tokens of each sentence."""
    first = token_type_ids == 0
    real = torch.ones_like(first)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        real = attention_mask.to(first.device) != 0
    counts = [(real & each).long().cumsum(1) - 1 for each in (first, ~first)]
    return torch.where(first, *counts).clamp(min=0)
