"""Which document each key of a call is in, and which positions its queries have: what decides on clusters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.layer_attention import readable_keys
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.prologue import PreparedCall


def token_places(call: PreparedCall, masks: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the document of each key and the positions of the queries, as keyword arguments of attention layers.

    They are `documents`, int [B or 1, K], -1 for padding, and `query_positions`, int [T].
    """
    tokens, matrix, device = masks["token_mask"], masks["attention_mask"], call.embedded.device
    num_keys = call.num_keys
    if matrix is not None:
        tokens, num_keys = TokenMask(readable_keys(matrix, call.batch_size)), matrix.shape[3]
    first = masks["query_offset"]
    first = num_keys - call.tokens if first is None else first
    documents = token_locations(tokens, num_keys, device).documents
    return {"documents": documents, "query_positions": first + torch.arange(call.tokens, device=device)}
