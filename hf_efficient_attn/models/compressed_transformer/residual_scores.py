"""Residual scores: each layer adds the scores of the layer below to its own, before the softmax (RealFormer).

    S_l = Q Kᵀ / √D + S_(l−1),  head = softmax(S_l) V

for each head, without parameters; the lowest such layer has no prior. Scores are passed on as they are before masks, in
float32, since what closes a pair once would add up. The layer follows `attention_pattern`, but computes and keeps all
n² pairs of all heads, those of every layer. In decoding each layer scores the new tokens against its cached keys, so
that nothing is cached besides.

Source: He et al., "RealFormer" (arXiv:2012.11747), section 3, as Lin et al., "A Survey of Transformers"
(arXiv:2106.04554), section 4.5.2, has it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.notices import warn_of_weights
from hf_efficient_attn.attention.sharded.mechanisms import whole_keys
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.attention.weight_rows import chosen_rows
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.autocast import autocast_off, autocast_states
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.parts.blocks import drop_rate
from hf_efficient_attn.models.parts.cached_states import append_to_cache
from hf_efficient_attn.models.sparse.attention import SparseAttention

from .talking_heads import masked


class PassedScores:
    """What the layers of one forward pass pass on: by index of a layer its scores, [B, H, T, K].

    No dict, of which libraries that move or cast arguments would give each layer a copy.
    """

    def __init__(self) -> None:
        self.of_layer: dict[int, Tensor] = {}


class ResidualScoresAttention(SparseAttention):
    """Attention that follows a pattern and adds the scores of the layer below."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        below = [layer for layer in config.layers_with("residual_scores") if layer < layer_idx]
        self.layer_below = below[-1] if below else None

    def forward(
        self,
        hidden_states: Tensor,
        passed_scores: PassedScores,
        attention_mask: Tensor | None = None,
        token_mask: TokenMask = NO_MASK,
        query_offset: QueryOffset = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, K], else None.

        Args:
            passed_scores: those of the layers below, to which this one adds its own.
            attention_mask, token_mask, query_offset: see `key_masks`.
        """
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            key, value = append_to_cache(cache, key, value, self.layer_idx)
        need_weights = kwargs.get("output_attentions", self.config.output_attentions)
        if shards_of(self) is not None:
            key, value, query_offset = whole_keys(self, key, value, token_mask.shape[1], need_weights)
        followed = self._followed((), key.shape[2])
        added, has_keys = masked(query, key, followed, token_mask, query_offset, attention_mask)
        query, key, value = autocast_states(query, key, value)
        key, value = (each.repeat_interleave(self.num_heads // each.shape[1], 1) for each in (key, value))
        with autocast_off(query.device.type):
            dtype = torch.promote_types(query.dtype, torch.float32)
            scores = (query @ key.mT).to(dtype) * self.scaling
            if self.layer_below is not None:
                scores = scores + passed_scores.of_layer[self.layer_below].to(scores.device)
            passed_scores.of_layer[self.layer_idx] = scores
            weights = (scores if added is None else scores + added).softmax(-1)
            weights = weights if has_keys is None else weights.masked_fill(~has_keys, 0)
            weights = drop(weights, drop_rate(self.dropout)).to(query.dtype)
            out = weights @ value
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        if not need_weights:
            return out, None
        warn_of_weights()
        rows = chosen_rows()
        return out, weights if rows is None else weights[:, :, list(rows)]

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Refuse: nothing is asked of the engine.

        Raises:
            UnsupportedBackendError: always; it says what is computed instead.
        """
        raise UnsupportedBackendError(
            f"A layer of residual scores computes all {num_keys**2:,} scores of a head for {num_keys:,} tokens, "
            "whatever its pattern, since the layer above adds them to its own. It computes them itself, and no backend "
            "is chosen."
        )
