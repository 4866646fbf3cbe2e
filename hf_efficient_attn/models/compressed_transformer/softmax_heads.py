"""Variants of softmax attention: talking heads, collaborative heads, residual scores, reused weights.

Talking heads mix their scores before the softmax, and their weights after it.

    L = P_l J,  W = softmax(L),  U = P_w W,  head h = U_h V_h,  where J are the scores Q Kᵀ / √D of all heads

for each pair, with matrices P_l and P_w of shape heads × heads. Masks are applied to L: if masked scores were mixed,
their pairs would be masked in all heads. If heads have different patterns, mixed weights let each head attend to what
any of them attends to. `attention_dropout` is applied to W.

Both sums over heads can be computed outside the pairs:

    L_g = [P_g1 Q_1 … P_gH Q_H] [K_1 … K_H]ᵀ / √D,  head h = Σ_g P_hg (W_g [V_1 … V_H])_h

so the engine computes attention of H heads of width H · D that share keys and values. It follows `attention_pattern`,
and takes memory in proportion to the text if the pattern does. This needs about H times as many multiplications per
pair, so all scores of all heads are computed and mixed (`talk`) if all pairs are allowed anyway or are few.

Source: Shazeer et al., "Talking-Heads Attention" (arXiv:2003.02436), section 3, with equal numbers of key heads,
softmax heads and value heads. Both matrices start as the identity, which mixes nothing, so that weights of models
without talking heads can be loaded. The form that does not compute the scores of all pairs is ours.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers import initialization as init
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.build_call import LayerPattern, QueryOffset
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.layer import (
    added_and_keys,
    added_scores,
    check_matrix,
    pairs_of,
    readable_keys,
    rows_or_all,
    tokens_of_layer,
)
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import layer_pattern
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.parts.blocks import append_to_cache, check_cached
from hf_efficient_attn.models.sparse.attention import SparseAttention

from .mechanism import PassedStates, PassingAttention

# up to this many keys, a layer with a pattern computes all scores
FEW_KEYS = 512


class TalkingHeadsAttention(SparseAttention):
    """Attention that follows a pattern, whose heads talk."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.score_map, self.weight_map = (nn.Parameter(torch.empty(self.num_heads, self.num_heads)) for _ in range(2))

    def initialize(self) -> None:
        """Start with the identity, which mixes nothing."""
        for mix in (self.score_map, self.weight_map):
            init.copy_(mix, torch.eye(self.num_heads, dtype=mix.dtype, device=mix.device))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer_spec: LayerPattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        # lengths of an exported graph are not known
        is_known = not torch.compiler.is_exporting()
        if self._is_dense(layer_spec, key.shape[2] if is_known else FEW_KEYS + 1):
            kept = {name: each for name, each in options.items() if name != "backend"}
            return talk(query, key, value, self.score_map, self.weight_map, layer_spec, **kept)
        query, shared = with_shared_keys(query, self.score_map, key.shape[1]), (one_head(key), one_head(value))
        out, weights = super()._attend(query, *shared, layer_spec, options)
        out = read_by_heads(out, self.weight_map, value.shape[1])
        return out, None if weights is None else mixed(self.weight_map, weights)

    def _is_dense(self, layer_spec: LayerPattern, num_keys: int) -> bool:
        """Return whether all scores of all heads are computed here, without the engine."""
        return backend_of(self.config) == AUTO and (layer_spec.is_own or num_keys <= FEW_KEYS)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what this layer asks the engine for.

        Raises:
            UnsupportedBackendError: the engine is not used; the message says what is computed instead.
        """
        request = super().layer_request(num_keys, task)
        if not self._is_dense(request.layer_spec, num_keys):
            width = self.config.key_value_heads * self.head_dim
            return replace(request, num_key_heads=1, head_dim=width, value_dim=width)
        raise UnsupportedBackendError(
            f"A layer of talking heads without a pattern, or for at most {FEW_KEYS} keys, computes all {num_keys**2:,} "
            f"scores per head for {num_keys:,} tokens, and mixes the scores of {self.num_heads} heads twice. It "
            "computes them itself, and no backend is chosen. Longer texts with an attention_pattern use the engine."
        )


def with_shared_keys(query: Tensor, score_map: Tensor, groups: int) -> Tensor:
    """Return queries whose products with the concatenated keys of all heads are the mixed scores.

    [B, H, T, D] → [B, H, T, groups · D], for `groups` key heads.
    """
    maps = score_map.to(query.dtype).unflatten(1, (groups, -1))
    return torch.einsum("gkr,bkrtd->bgtkd", maps, query.unflatten(1, (groups, -1))).flatten(3)


def one_head(states: Tensor) -> Tensor:
    """Return the concatenated states of all heads, [B, H, K, D] → [B, 1, K, H · D]."""
    return states.transpose(1, 2).flatten(2).unsqueeze(1)


def read_by_heads(out: Tensor, weight_map: Tensor, groups: int) -> Tensor:
    """Return the output of each head, [B, T, H, D], from each softmax over all values, [B, T, H, groups · D]."""
    maps = weight_map.to(out.dtype).unflatten(0, (groups, -1))
    return torch.einsum("krg,btgkd->btkrd", maps, out.unflatten(3, (groups, -1))).flatten(2, 3)


@rows_or_all
def talk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_map: Tensor,
    weight_map: Tensor,
    layer_spec: LayerPattern,
    tokens: TokenMask,
    scale: float,
    dropout: float = 0.0,
    query_offset: QueryOffset = None,
    matrix: Tensor | None = None,
    need_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, T, H, D] and, if they are needed, the weights U [B, H, T, K]; see `attend_layer`."""
    added, has_keys = masked(query, key, layer_spec, tokens, query_offset, matrix)
    query, key, value = autocast_states(query, key, value)
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    with autocast_off(query.device.type):
        scores = mixed(score_map, query @ key.mT * scale)
        scores = scores if added is None else scores + added
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(query.dtype)
        weights = weights if has_keys is None else weights.masked_fill(~has_keys, 0)
        weights = mixed(weight_map, drop(weights, dropout))
        out = weights @ value
    return out.transpose(1, 2).contiguous(), weights if need_weights else None


def masked(
    query: Tensor,
    key: Tensor,
    layer_spec: LayerPattern,
    tokens: TokenMask,
    query_offset: QueryOffset,
    matrix: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores of all pairs, and which queries have keys; None: nothing, all.

    The arguments are those of `attend_layer`.
    """
    tokens = tokens_of_layer(tokens, layer_spec, key)
    if matrix is not None and not layer_spec.is_own:
        check_matrix("attention_mask", matrix, (len(query), query.shape[1], query.shape[2], key.shape[2]))
        tokens = replace(tokens, key_mask=readable_keys(matrix, len(query)))
    allowed = pairs_of(layer_spec, query_offset, tokens, matrix, query, key)
    return added_and_keys(allowed, added_scores(matrix, None, query, key), query)


def mixed(heads: Tensor, states: Tensor) -> Tensor:
    """Return scores or weights of all heads, mixed pair by pair: [H (out), H (in)] and [B, H, T, K] → [B, H, T, K]."""
    return torch.einsum("gh,bhtk->bgtk", heads.to(states.dtype), states)


# Collaborative heads: all heads share one query and one key projection, and each head weights their features itself.
#
#     head = softmax((X W_Q diag(m_h)) (X W_K)ᵀ / √D) X W_V,h
#
# with one vector m_h per head, as wide as the shared queries and keys (`shared_key_width`). Features that several heads
# compare are computed once, so this width may be smaller than H · D. A cache keeps the shared keys, and the values of
# all heads. The engine computes the layer, which follows `attention_pattern`.
#
# At the start, m_h is 1 for head h's share of the features, and 0 for the others: with H · D features, the heads are
# ordinary heads, and their weights can be loaded.
#
# Source: Cordonnier, Loukas & Jaggi, "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv:2006.16362),
# also in Lin et al., "A Survey of Transformers" (arXiv:2106.04554), section 4.6.


class CollaborativeHeadsAttention(PassingAttention):
    """Attention that follows a pattern, whose heads share queries and keys."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_width = config.width_of_shared_keys
        self.q_proj, self.k_proj = (
            nn.Linear(config.hidden_size, self.key_width, bias=config.attention_bias) for _ in range(2)
        )
        self.mixing = nn.Parameter(torch.empty(self.num_heads, self.key_width))

    def initialize(self) -> None:
        """Start each head with its share of the features."""
        owner = torch.arange(self.key_width, device=self.mixing.device) * self.num_heads // self.key_width
        own = owner == torch.arange(self.num_heads, device=self.mixing.device).unsqueeze(1)
        init.copy_(self.mixing, own.to(self.mixing.dtype))

    def _states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared, key = (project(hidden_states).unsqueeze(1) for project in (self.q_proj, self.k_proj))
        value = self.heads(self.v_proj(hidden_states))
        return shared * self.mixing.to(shared.dtype).unsqueeze(1), key, value

    def _update(
        self, cache: Cache, hidden_states: Tensor, key: Tensor, value: Tensor, rotation: Any
    ) -> tuple[Tensor, Tensor, None]:
        sizes = (1, self.key_width), (1, self.num_heads * self.head_dim)
        check_cached(cache, self.layer_idx, "one key and one value for all heads", *sizes)
        # layers of static caches have as many heads of values as of keys
        key, value = append_to_cache(cache, key, one_head(value), self.layer_idx)
        return key, self.heads(value.squeeze(1)), None

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return super()._compared(query, key.expand(-1, self.num_heads, -1, -1), kwargs)


# Residual scores: each layer adds the scores of the layer below to its own, before the softmax (RealFormer).
#
#     S_l = Q_l K_lᵀ / √D + S_(l−1),  head = softmax(S_l) V
#
# for each head, without parameters; the lowest such layer adds nothing. A sum of products of vectors is the product of
# longer vectors,
#
#     S_l = [Q_1 … Q_l] [K_1 … K_l]ᵀ / √D
#
# so the engine computes attention with queries and keys that are l times as wide, and ordinary values. It follows
# `attention_pattern`, and takes memory in proportion to the text if the pattern does, because queries and keys are
# passed on instead of scores. A layer's mask applies only to its own scores. In decoding, keys come from the cache.
#
# Source: He et al., "RealFormer" (arXiv:2012.11747), section 3, as described by Lin et al., "A Survey of Transformers"
# (arXiv:2106.04554), section 4.5.2. Passing on queries and keys instead of scores is ours.


class ResidualScoresAttention(PassingAttention):
    """Attention that follows a pattern and adds the scores of the layer below."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.compared_layers = config.compared_layers(layer_idx)
        self.passes_on |= len(self.compared_layers) > 1

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, key = super()._compared(query, key, kwargs)
        if len(self.compared_layers) == 1:
            return query, key
        passed: PassedStates = kwargs["passed_states"]
        return passed.joined(self.compared_layers, key)


# Reused weights: a layer without its own queries and keys uses the attention weights of the layer below.
#
#     head = W V,  where W are the weights of the nearest layer below that has its own
#
# so a block of layers has one query and one key projection, and one set of keys in the cache. W itself is not passed
# on, because this would store all pairs: the engine recomputes it from the queries and keys, with the pattern of that
# layer. This saves parameters and cache, but no scores. Each layer has its own dropout of the weights.
#
# Source: Ying, Ke, He & Liu, "LazyFormer: Self Attention with Lazy Update" (arXiv:2102.12702), as described by Lin et
# al., "A Survey of Transformers" (arXiv:2106.04554), section 4.5.2.


class LayerBelow(nn.Module):
    """The config and index of the layer below, from which its pattern is found."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx


class ReusedWeightsAttention(SparseAttention):
    """Attention by the weights of the layer below."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_proj = self.k_proj = None
        self.compared_layers = config.compared_layers(layer_idx)
        self.below = LayerBelow(config, self.compared_layers[-1])

    def _states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = self.heads(self.v_proj(hidden_states))
        # `_compared` replaces the query and the key
        return value, value, value

    def _update(
        self, cache: Cache, hidden_states: Tensor, key: Tensor, value: Tensor, rotation: Any
    ) -> tuple[Tensor, Tensor, None]:
        sizes = (value.shape[1], self.head_dim), (value.shape[1], 0)
        check_cached(cache, self.layer_idx, "only values, in place of keys", *sizes)
        # as keys, because a layer of a cache counts its tokens by its keys
        value, _ = append_to_cache(cache, value, value[..., :0], self.layer_idx)
        return value, value, None

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        passed: PassedStates = kwargs["passed_states"]
        return passed.joined(self.compared_layers, key)

    def _layer_spec(self, global_positions: tuple[int, ...], num_keys: int) -> LayerPattern:
        return layer_pattern(self.below, {"is_causal": self.is_causal})
