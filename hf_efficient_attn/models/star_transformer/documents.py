"""What a call says about its stars: padding, packed documents, and pairs of sentences."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.layer_attention import readable_keys
from hf_efficient_attn.attention.packing import said_starts
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.host_copies import on_host
from hf_efficient_attn.models.inputs.masks import check_open_pairs
from hf_efficient_attn.models.prologue import PreparedCall

from .ring import Ring, find_ring

CLOSED = (
    "This attention_mask closes pairs of real tokens, but the relay of a star passes on what every token says "
    "to all of them. Pass a padding mask [batch, tokens], and position_ids that restart for packed documents."
)


def find_stars(config: Any, call: PreparedCall, sentences: Tensor | None) -> Ring:
    """Return the rings of a call.

    sentences: the number of each token's sentence, 0 or 1, [B, T]; None: the call's own documents are the stars.

    Raises:
        InputError: a mask that is a matrix of other pairs than those of real tokens.
    """
    masks = call.masks(config)
    real, matrix = masks["token_mask"].key_mask, masks["attention_mask"]
    if matrix is not None:
        real = readable_keys(matrix, call.batch_size)
        check_open_pairs(matrix, real, CLOSED)
    documents, num_relays = call.documents, 1
    if sentences is not None:
        documents, num_relays = sentences.long(), 2
    elif documents is not None:
        # a tracer does not know how many there are, and gives every token a relay
        num_relays = call.tokens if is_tracing(documents) else 1 + int(on_host(documents).max())
    return find_ring(call.embedded, real, documents, num_relays, config.ring == "closed")


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
