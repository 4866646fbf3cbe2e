"""Shaped attention within spans: A and C over the keys that a head's soft mask leaves.

C is A at equal logits under the same mask, so C·V is the average of the values weighted by the soft mask. No paper
combines spans with shaped attention. With this C, shaped attention starts as the identity (He & Hofmann,
arXiv:2311.01906, section 4.1) for every span.
"""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.spans.attention import ALL_TOKENS, SpanInputs, attend_spans, span_request
from hf_efficient_attn.models.spans.config import checked_window
from hf_efficient_attn.models.spans.module import Spans, layer_bounds
from hf_efficient_attn.models.spans.training import mean_span


class SpannedAttention(MultiHeadAttention):
    """Attention of a layer with spans; its only parameters are the spans."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.spans = Spans(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        inputs: SpanInputs = ALL_TOKENS,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return A·V [B, T, H, D], the weights A or None, C·V or None, and the mean span of the heads.

        Args:
            hidden_states: the states from which dynamic spans are computed, [B, T, hidden_size].
            query, key, value: [B, H, T or K, D].
        """
        spans = self.spans(hidden_states)
        options = {**self.engine_options(inputs, kwargs), "bounds": layer_bounds(self.spans, spans, inputs.bounds)}
        options |= {"layer_idx": self.layer_idx, "shards": shards_of(self)}
        where = (spans, checked_window(self.config, self.spans), options.pop("tokens"), self.scaling)
        out, weights = attend_spans(query, key, value, *where, **options)
        centre = None
        if self.config.is_centered:
            options |= {"dropout": 0.0, "need_weights": False}
            centre, _ = attend_spans(torch.zeros_like(query), key, value, *where, **options)
        self.spans.note(spans, inputs.real_tokens)
        return out, weights, centre, mean_span(spans, inputs.real_tokens, self.spans.shards)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what this layer asks the engine for, for texts of `num_keys` tokens."""
        return span_request(self, self.spans, num_keys)
