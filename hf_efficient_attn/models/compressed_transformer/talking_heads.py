"""Talking heads: heads mix their scores before the softmax, and their weights behind it.

    L = P_l J,  W = softmax(L),  U = P_w W,  head h = U_h V_h,  where J are the scores Q Kᵀ / √D of all heads

with matrices P_l and P_w of heads by heads, for each pair. Masks are applied to L, since a forbidden score that was
mixed would close its pair in all heads. The layer follows `attention_pattern`, but computes all n² pairs of all heads:
no kernel mixes heads. Where heads have patterns of their own, mixed weights let each read what any of them reads.

Source: Shazeer et al., "Talking-Heads Attention" (arXiv:2003.02436), section 3, with as many heads of keys, of softmax
and of values. Both matrices start as 1, which is attention without talk, so that weights of models without it fit.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers import initialization as init

from hf_efficient_attn.attention.dense_matrix import added_and_keys, check_matrix
from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_attention import added_scores, pairs_of, readable_keys, tokens_of_layer
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.sharded.mechanisms import whole_keys
from hf_efficient_attn.attention.weight_rows import rows_or_all
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.autocast import autocast_off, autocast_states
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.sparse.attention import SparseAttention


class TalkingHeadsAttention(SparseAttention):
    """Attention that follows a pattern, whose heads talk."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.score_map, self.weight_map = (nn.Parameter(torch.empty(self.num_heads, self.num_heads)) for _ in range(2))

    def initialize(self) -> None:
        """Start without talk."""
        for mix in (self.score_map, self.weight_map):
            init.copy_(mix, torch.eye(self.num_heads, dtype=mix.dtype, device=mix.device))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, followed: LayerPattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        kept = {name: each for name, each in options.items() if name != "backend"}
        if followed.shards is not None:
            num_tokens = options["tokens"].shape[1]
            key, value, first = whole_keys(self, key, value, num_tokens, options["need_weights"])
            followed, kept["query_offset"] = replace(followed, shards=None), first
        return talk(query, key, value, self.score_map, self.weight_map, followed, **kept)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Refuse: nothing is asked of the engine.

        Raises:
            UnsupportedBackendError: always; it says what is computed instead.
        """
        raise UnsupportedBackendError(
            f"A layer of talking heads computes all {num_keys**2:,} scores of a head for {num_keys:,} tokens, whatever "
            f"its pattern, and mixes those of {self.num_heads} heads twice. It computes them itself, and no backend is "
            "chosen."
        )


@rows_or_all
def talk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_map: Tensor,
    weight_map: Tensor,
    followed: LayerPattern,
    tokens: TokenMask,
    scale: float,
    dropout: float = 0.0,
    query_offset: QueryOffset = None,
    matrix: Tensor | None = None,
    need_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, T, H, D] and, if they are needed, the weights U [B, H, T, K]; see `attend_layer`."""
    added, has_keys = masked(query, key, followed, tokens, query_offset, matrix)
    query, key, value = autocast_states(query, key, value)
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    with autocast_off(query.device.type):
        scores = mixed(score_map, query @ key.mT * scale)
        scores = scores if added is None else scores + added
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(query.dtype)
        weights = weights if has_keys is None else weights.masked_fill(~has_keys, 0)
        weights = drop(mixed(weight_map, weights), dropout)
        out = weights @ value
    return out.transpose(1, 2).contiguous(), weights if need_weights else None


def masked(
    query: Tensor,
    key: Tensor,
    followed: LayerPattern,
    tokens: TokenMask,
    query_offset: QueryOffset,
    matrix: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores of all pairs, and which queries have keys; None: nothing, all.

    The arguments are those of `attend_layer`.
    """
    tokens = tokens_of_layer(tokens, followed, key)
    if matrix is not None and not followed.is_own:
        check_matrix("attention_mask", matrix, (len(query), query.shape[1], query.shape[2], key.shape[2]))
        tokens = replace(tokens, key_mask=readable_keys(matrix, len(query)))
    allowed = pairs_of(followed, query_offset, tokens, matrix, query, key)
    return added_and_keys(allowed, added_scores(matrix, None, query, key), query)


def mixed(heads: Tensor, states: Tensor) -> Tensor:
    """Return states of all heads, mixed pair by pair: [H (out), H (in)] and [B, H, T, K] → the same."""
    return torch.einsum("gh,bhtk->bgtk", heads.to(states.dtype), states)
