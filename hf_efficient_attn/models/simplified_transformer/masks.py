"""Which tokens a query may attend to, in the form that the attention implementation needs."""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, packed_sequence_mask_function

from .configuration_simplified_transformer import SimplifiedTransformerConfig


def attention_allowed(
    config: SimplifiedTransformerConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    documents: torch.Tensor | None,
) -> Any:
    """Return the mask in the form that the chosen attention implementation needs, or None if it needs none."""
    overlay = None if documents is None else packed_sequence_mask_function(documents)
    if config.is_causal:
        return create_causal_mask(config, inputs_embeds, attention_mask, cache, and_mask_function=overlay)
    return create_bidirectional_mask(config, inputs_embeds, attention_mask, and_mask_function=overlay)
