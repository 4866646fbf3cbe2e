"""Shaped attention within spans: A and C over the keys that a head's soft mask leaves.

C is A at equal logits under the same mask, so C·V is the average of the values weighted by the soft mask. No paper
combines the two; this keeps the property that shaped attention starts as the identity (He & Hofmann, arXiv:2311.01906,
section 4.1), for every span.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.build_call import QueryOffset
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.spans.attention import attend_spans, span_request
from hf_efficient_attn.models.spans.config import checked_window
from hf_efficient_attn.models.spans.module import SpanBounds, Spans, layer_bounds
from hf_efficient_attn.models.spans.training import mean_span


class SpannedAttention(nn.Module):
    """Attention of a layer with spans; its only parameters are the spans."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.spans = Spans(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        token_mask: TokenMask = NO_MASK,
        query_offset: QueryOffset = None,
        real_tokens: Tensor | None = None,
        dropout: float = 0.0,
        bounds: Sequence[SpanBounds | None] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return A·V [B, T, H, D], the weights A or None, C·V or None, and the mean span of the heads.

        Args:
            hidden_states: the states by which dynamic spans are chosen, [B, T, hidden_size].
            query, key, value: [B, H, T or K, D].
            attention_mask, token_mask, query_offset: see `key_masks`.
            dropout: probability with which a weight of A is dropped.
            bounds: the bounds of every layer's spans, if known.
        """
        spans = self.spans(hidden_states)
        common: dict[str, Any] = {
            "matrix": attention_mask,
            "query_offset": query_offset,
            "scale": query.shape[3] ** -0.5,
            "bounds": layer_bounds(self.spans, spans, bounds),
            "layer_idx": self.layer_idx,
            "backend": backend_of(self.config),
            "shards": shards_of(self),
        }
        where = (spans, checked_window(self.config, self.spans), token_mask)
        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        out, weights = attend_spans(query, key, value, *where, dropout=dropout, need_weights=need_weights, **common)
        centre = None
        if self.config.is_centered:
            centre, _ = attend_spans(torch.zeros_like(query), key, value, *where, **common)
        self.spans.note(spans, real_tokens)
        return out, weights, centre, mean_span(spans, real_tokens, self.spans.shards)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what this layer asks the engine for at a length in tokens."""
        return span_request(self.config, self.spans, num_keys)
