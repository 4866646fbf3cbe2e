"""The two attentions of a star: a token attends to five keys, and a relay to all tokens of its document.

Neither uses `hea.attention`. The five keys of a token are its two neighbours, itself, its embedding and its relay,
under one softmax. The last two are not in the sequence of keys that a pattern describes, and kernels work on blocks of
at least 16 keys; so shifted keys are multiplied element by element instead. A relay is one query for n + 1 keys, which
takes two vector-matrix products. The relays of packed documents use sums over their own tokens; a kernel would compute
every pair of relay and token. No intermediate result is larger than a few numbers per token.

Shapes: B rows, T tokens, R relays of a row, H heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.layer import selected_rows
from hf_efficient_attn.models.parts.attention import AsksNothing, MultiHeadAttention

from .ring import Ring, add_up, take


class StarAttention(MultiHeadAttention):
    """Base of both attentions: projections, and dropout of the weights."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_maps()

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores of query n and key n, [B, H, N, D] each → float32 or wider [B, H, N]."""
        return (query * key).sum(-1, dtype=torch.promote_types(query.dtype, torch.float32)) * self.scaling

    def joined(self, out: Tensor) -> Tensor:
        """Return the projected output of the heads, [B, H, N, D] → [B, N, hidden_size]."""
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SatelliteAttention(AsksNothing, StarAttention):
    """Attention of tokens to left neighbour, themselves, right neighbour, own embedding and relay, in this order."""

    def forward(
        self, nodes: Tensor, embedded: Tensor, relays: Tensor, ring: Ring, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the output [B, T, hidden_size] and the weights [B, H, T, 5].

        Args:
            nodes, embedded: the states and the embeddings of the tokens, [B, T, hidden_size] each.
            relays: [B, R, hidden_size].
        """
        query = self.heads(self.q_proj(nodes))
        keys, values = (self._read(project, nodes, embedded, relays, ring) for project in (self.k_proj, self.v_proj))
        scores = [self.scores(query, key) for key in keys]
        if self.config.ring != "zero_ends":
            for place, has_one in ((0, ring.has_left), (2, ring.has_right)):
                if has_one is not None:
                    scores[place] = scores[place].masked_fill(~has_one.unsqueeze(1), -torch.inf)
        weights = self.dropout(torch.stack(scores, -1).softmax(-1).to(query.dtype))
        out = torch.zeros_like(query)
        for weight, value in zip(weights.unbind(-1), values, strict=True):
            out = torch.addcmul(out, weight.unsqueeze(-1), value)
        rows = selected_rows() if self.needs_weights(kwargs) else None
        return self.joined(out), weights if rows is None else weights[:, :, list(rows)]

    def _read(self, project: nn.Module, nodes: Tensor, embedded: Tensor, relays: Tensor, ring: Ring) -> list[Tensor]:
        """Return the five keys or values of each token, each [B, H, T or 1, D]."""
        own = project(nodes)
        left, right = ring.beside(own)
        if self.config.ring == "zero_ends":
            left, right = (
                torch.where(has_one.unsqueeze(-1), states, 0)
                for has_one, states in ((ring.has_left, left), (ring.has_right, right))
            )
        return [self.heads(each) for each in (left, own, right, project(embedded), ring.of_tokens(project(relays)))]

    def costs(self, num_keys: int) -> str:
        return (
            f"A layer of a Star-Transformer computes {6 * num_keys + 1:,} scores per head for {num_keys:,} tokens: "
            f"five for each token and {num_keys + 1:,} for the relay (full attention computes {num_keys**2:,})."
        )


class RelayAttention(StarAttention):
    """Attention of a relay to itself and to the tokens of its document."""

    def forward(self, relays: Tensor, nodes: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
        """Return the output [B, R, hidden_size] and the weights [B, H, T + R].

        The weights are those of each relay for the tokens of its document, followed by those of each relay for itself.
        """
        query, own_key, own_value = (project(relays) for project in (self.q_proj, self.k_proj, self.v_proj))
        key, value = self.k_proj(nodes), self.v_proj(nodes)
        own_scores = self.scores(self.heads(query), self.heads(own_key))
        scores = self.scores(self.heads(ring.of_tokens(query)), self.heads(key))
        if ring.real is not None:
            scores = scores.masked_fill(~ring.real.unsqueeze(1), -torch.inf)
        if ring.documents is None:
            weights = torch.cat((scores, own_scores), -1).softmax(-1)
        else:
            weights = softmax_of_documents(scores, own_scores, ring)
        of_tokens, own = weights.to(value.dtype).split([nodes.shape[1], relays.shape[1]], -1)
        own = self.dropout(own)
        of_tokens = self.dropout(of_tokens)
        weights = torch.cat((of_tokens, own), -1)
        out = own.unsqueeze(-1) * self.heads(own_value)
        if ring.documents is None:
            return self.joined(out + of_tokens.unsqueeze(2) @ self.heads(value)), weights
        weighted = (of_tokens.unsqueeze(-1) * self.heads(value)).transpose(1, 2).flatten(2)
        return self.joined(out + self.heads(add_up(weighted, ring))), weights


def softmax_of_documents(scores: Tensor, own_scores: Tensor, ring: Ring) -> Tensor:
    """Return the softmax of each relay over its tokens and itself, [B, H, T] and [B, H, R] → [B, H, T + R]."""
    scores, own_scores = scores.transpose(1, 2), own_scores.transpose(1, 2)
    index = ring.documents.unsqueeze(-1).expand_as(scores)
    # the maximum is subtracted, as in any softmax, and needs no gradient
    highest = own_scores.detach().scatter_reduce(1, index, scores.detach(), "amax")
    powers, own_powers = (scores - take(highest, ring.documents)).exp(), (own_scores - highest).exp()
    total = own_powers + add_up(powers, ring)
    weights = torch.cat((powers / take(total, ring.documents), own_powers / total), 1)
    return weights.transpose(1, 2)
