"""Linear attention as the A of shaped attention: masks, and a cache that keeps sums alone.

A = φ(Q) φ(K)ᵀ, divided by its row sums, is uniform where all keys are equal, whatever the queries. So W^K starts at 0,
where with softmax W^Q does, and C is the mean that it is there: shaped attention starts as the identity (He & Hofmann,
arXiv:2311.01906, section 4.1), but for the epsilon of the features. No paper combines the two.
"""

from typing import Any

from torch import Tensor

from hf_efficient_attn.attention.layer_attention import readable_keys
from hf_efficient_attn.models.mechanisms.linear_reading import LinearReading
from hf_efficient_attn.models.mechanisms.state_cache import StateLayer, attach_states
from hf_efficient_attn.models.mechanisms.texts import find_texts, of_queries
from hf_efficient_attn.models.prologue import PreparedCall

from .centering import Centering, build_centering


class BlockReading(LinearReading):
    """Linear attention of the queries, keys and values that a block has made, given side by side."""

    def project(self, states: Tensor) -> tuple[Tensor, ...]:
        return states.chunk(3, -1)


class CentredStateLayer(StateLayer):
    """The sums of linear attention, and that of values, `value_sum`: [B, 1, hidden_size] in float32."""

    kept = ("keys", "values", "value_sum")
    value_sum: Tensor | None = None

    def advance(self, centering: Centering, values: Tensor) -> Tensor | float:
        """Return the sum over the tokens so far, and add the new values to it, [B, T, hidden_size]."""
        past_sum = 0.0 if self.value_sum is None else self.value_sum
        self.value_sum = past_sum + centering.sum(values)
        return past_sum


def sum_masks(config: Any, call: PreparedCall, is_shared: bool) -> dict[str, Any]:
    """Return the texts and `centering` for layers of linear attention; it gives the cache layers for their sums.

    is_shared: whether processes share the texts, of which C is then made whole.
    """
    if call.cache is not None:
        make = CentredStateLayer if config.is_centered else StateLayer
        attach_states(call.cache, config.num_hidden_layers, dict.fromkeys(range(config.num_hidden_layers), make))
    masks = call.masks(config)
    texts = find_texts(call, masks, config.is_causal, is_shared)
    tokens, centering = masks["token_mask"], None
    if config.is_centered:
        real, documents = tokens.key_mask, tokens.segment_ids
        if masks["attention_mask"] is not None:
            real = readable_keys(masks["attention_mask"], call.batch_size)
        where = (tokens.shape[1], 0) if is_shared else (call.tokens, call.past_tokens)
        if documents is not None and not is_shared:
            real, documents = (None if each is None else of_queries(each, call) for each in (real, documents))
        centering = build_centering(*where, real, documents, config.is_causal, call.embedded.device)
        centering = centering._replace(shared_tokens=tokens.shape[1] if is_shared else None)
    return {"token_mask": tokens, "texts": texts, "centering": centering}
