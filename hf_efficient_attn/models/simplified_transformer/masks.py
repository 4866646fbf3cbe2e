"""Which tokens a query may attend to: padding, packed documents, and the form attention wants it in."""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, packed_sequence_mask_function
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError

from .configuration_simplified_transformer import SimplifiedTransformerConfig


def attention_allowed(
    config: SimplifiedTransformerConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    documents: torch.Tensor | None,
) -> Any:
    """Return the mask in the form the chosen attention implementation wants, or None if it needs none."""
    overlay = None if documents is None else packed_sequence_mask_function(documents)
    if config.is_causal:
        return create_causal_mask(config, inputs_embeds, attention_mask, cache, and_mask_function=overlay)
    return create_bidirectional_mask(config, inputs_embeds, attention_mask, and_mask_function=overlay)


def find_documents(
    position_ids: torch.Tensor | None, attention_mask: Any, batch_size: int, past_tokens: int | torch.Tensor
) -> torch.Tensor | None:
    """Return the number of the packed document each token belongs to, or None if nothing is packed.

    A document begins where the position of a real token does not follow that of the real token before it. Nothing is
    looked for behind cached tokens or under a mask that is a matrix. While tracing, the answer is always a tensor.
    Shapes: position_ids [B or 1, T], attention_mask [B, T] → [B, T], ascending.
    """
    is_first = isinstance(past_tokens, int) and past_tokens == 0
    is_matrix = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim != 2)
    if position_ids is None or is_matrix or not is_first:
        return None
    positions = position_ids.expand(batch_size, -1)
    tokens = positions.shape[1]
    index = torch.arange(tokens, device=positions.device).expand_as(positions)
    real = torch.ones_like(positions, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask[:, :tokens].to(positions.device).bool()
    last_real = torch.where(real, index, -1).cummax(1).values
    before = torch.nn.functional.pad(last_real, (1, -1), value=-1)
    follows = positions == positions.gather(1, before.clamp(min=0)) + 1
    starts = real & (before >= 0) & ~follows
    if not is_tracing(starts) and not starts.any():
        return None
    return starts.cumsum(1)


def check_mask_length(attention_mask: Any, tokens: int, past_tokens: int | torch.Tensor) -> None:
    """Raise InputError if a padding mask does not reach from the first cached to the last new token."""
    if isinstance(attention_mask, dict) or attention_mask is None or attention_mask.ndim != 2:
        return
    if isinstance(past_tokens, int) and attention_mask.shape[1] < past_tokens + tokens:
        raise InputError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but {past_tokens} are cached and {tokens} are "
            f"new. Pass a mask of {past_tokens + tokens} columns, cached tokens first."
        )
