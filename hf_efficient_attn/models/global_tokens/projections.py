"""Longformer's second set of projections, with which global tokens read.

Source: Beltagy et al. (arXiv:2004.05150), section 3.1 (Q_g, K_g, V_g, which start as copies of Q_s, K_s, V_s) and the
authors' code: only global tokens read with them; other tokens read a global one with the local projections.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.models.global_tokens.rows import GlobalRows
from hf_efficient_attn.models.parts.deepspeed_parameters import gathered, is_in_shards
from hf_efficient_attn.models.parts.positions import rotate


class CopiedLinear(nn.Linear):
    """A linear map that starts as a copy of another one."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None)
        # in a tuple, so that it does not become a submodule
        self.source = (source,)

    def initialize(self) -> None:
        """Copy the other map, unless the weight comes from a checkpoint; `copy_source` copies what is in shards."""
        (source,) = self.source
        if is_in_shards(source.weight):
            return
        init.copy_(self.weight, source.weight)
        if self.bias is not None:
            init.copy_(self.bias, source.bias)

    @torch.no_grad()
    def copy_source(self) -> None:
        """Copy the other map; in all processes, if parameters are in shards."""
        (source,) = self.source
        with gathered([*self.parameters(), *source.parameters()]):
            self.load_state_dict(source.state_dict())


class GlobalAttention(nn.Module):
    """Attention of the global tokens over everything. Shapes: hidden states [B, T, hidden_size] → [B, X, H, D].

    With few global tokens the keys and values of all tokens are never computed: X queries times W_k, and X weighted
    sums of hidden states times W_v, give the same numbers at X·H / hidden_size of the cost.
    """

    def __init__(self, q_proj: nn.Linear, k_proj: nn.Linear, v_proj: nn.Linear, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (CopiedLinear(source) for source in (q_proj, k_proj, v_proj))
        self.num_heads = num_heads
        self.head_dim = q_proj.out_features // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = nn.Dropout(dropout)

    def copy_local(self) -> None:
        """Copy the local projections again, as the authors do between masked language modelling and fine-tuning."""
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            # an adapter wraps the map; the adapter's own weights stay
            getattr(projection, "base_layer", projection).copy_source()

    def keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a cache keeps, both [B, H, T, D]."""
        return self._split(self.k_proj(hidden_states)), self._split(self.v_proj(hidden_states))

    def forward(
        self,
        hidden_states: Tensor,
        rows: GlobalRows,
        rotation: tuple[Tensor, Tensor] | None = None,
        cached: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [B, X, H, D] and the weights [B, H, X, keys].

        Args:
            rotation: cosines and sines of the new tokens' positions, [B or 1, T, D].
            cached: keys (rotated) and values of cached and new tokens, [B, H, K, D].
        """
        chosen = rows.index[:, :, None]
        query = self.queries(hidden_states.gather(1, chosen.expand(-1, -1, hidden_states.shape[2])))
        if rotation is not None:
            at_rows = (
                each.expand(query.shape[0], -1, -1).gather(1, chosen.expand(-1, -1, self.head_dim)) for each in rotation
            )
            query = rotate(query, *at_rows)
        is_few = rows.index.shape[1] * self.num_heads < hidden_states.shape[2]
        if cached is None and rotation is None and is_few and is_plain(self.k_proj) and is_plain(self.v_proj):
            scores = self._scores_of_hidden(query * self.scaling, hidden_states)
            weights = self._weights(scores, rows.allowed)
            return self._sums_of_hidden(self.dropout(weights), hidden_states), weights
        if cached is None:
            key, value = self.keys_and_values(hidden_states)
            cached = (key if rotation is None else rotate(key, *rotation), value)
        return self.read(query, *cached, rows.allowed)

    def queries(self, hidden_states: Tensor) -> Tensor:
        """Return the queries of the global tokens, given their states: [B, X, hidden_size] → [B, H, X, D]."""
        return self._split(self.q_proj(hidden_states))

    def read(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [B, X, H, D] and the weights [B, H, X, keys], of any heads; see `GlobalRows`."""
        weights = self._weights(query * self.scaling @ key.transpose(2, 3), allowed)
        return (self.dropout(weights) @ value).transpose(1, 2), weights

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _scores_of_hidden(self, query: Tensor, hidden_states: Tensor) -> Tensor:
        weight = self.k_proj.weight.unflatten(0, (self.num_heads, self.head_dim))
        through = torch.einsum("bhxe,hed->bhxd", query, weight)
        scores = (through.flatten(1, 2) @ hidden_states.transpose(1, 2)).unflatten(1, query.shape[1:3])
        if self.k_proj.bias is None:
            return scores
        # the softmax is invariant to it, but the parameter needs its (zero) gradient
        bias = self.k_proj.bias.view(1, self.num_heads, self.head_dim, 1)
        return scores + query @ bias

    def _sums_of_hidden(self, weights: Tensor, hidden_states: Tensor) -> Tensor:
        sums = (weights.flatten(1, 2) @ hidden_states).unflatten(1, weights.shape[1:3])
        weight = self.v_proj.weight.unflatten(0, (self.num_heads, self.head_dim))
        out = torch.einsum("bhxd,hed->bxhe", sums, weight)
        if self.v_proj.bias is None:
            return out
        # dropped weights no longer sum to 1
        return out + weights.sum(-1).transpose(1, 2)[..., None] * self.v_proj.bias.view(self.num_heads, self.head_dim)

    def _weights(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        if allowed is not None and allowed.dtype == torch.bool:
            # an entry that is no global token may read nothing; its result is never used
            scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
        elif allowed is not None:
            scores = scores + allowed[:, None]
        wide = torch.promote_types(scores.dtype, torch.float32)
        return torch.softmax(scores, -1, dtype=wide).to(scores.dtype)


def is_plain(module: nn.Module) -> bool:
    """Return whether a map is nothing but its weight and bias: no adapter, no quantisation, no hook that loads it.

    Quantised, sharded or otherwise special weights may sit in the same module, but are no plain parameters.
    """
    return (
        type(module) is CopiedLinear
        and type(module.weight) is nn.Parameter
        and not module._forward_pre_hooks
        and not module._forward_hooks
        and not (hasattr(module, "_hf_hook"))
    )
