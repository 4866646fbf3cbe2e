"""The lightning indexer: a small attention without values, whose scores say which keys a layer reads.

DeepSeek-V3.2 (arXiv:2512.02556), equation 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# what an indexer does: nothing, learn from dense attention, choose what is read and learn from that
DENSE, WARMUP, SPARSE = "dense", "warmup", "sparse"
STAGES = (DENSE, WARMUP, SPARSE)


@dataclass(frozen=True, eq=False)
class IndexStates:
    """What an indexer says about the tokens of a call, and what is to be done with it.

    Attributes:
        queries: [B, Nq, heads, D].
        keys: [B, Nk, D], the cached ones first, shared by all heads.
        weights: [B, Nq, heads], scaled.
        top_k: how many keys a query reads.
        stage: one of STAGES.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    top_k: int
    stage: str


class LightningIndexer(nn.Module):
    """The queries, keys and weights of an indexer: score = Σ over heads of weight · ReLU(query · key).

    The queries of all heads share one key. The first dimensions of both are rotated by their positions, as many as the
    model rotates. No gradient passes into the hidden states.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, N, heads, D], keys [B, N, D] and weights [B, N, heads] of tokens.

        Args:
            hidden_states: [B, N, hidden_size].
            cos, sin: [B or 1, N, rotated dimensions], of pairs of dimensions that are half of these apart.
        """
        hidden_states = hidden_states.detach()
        queries = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        keys = self.k_norm(self.k_proj(hidden_states))
        # the scale of the scores is here, since ReLU lets it through
        weights = self.weights_proj(hidden_states) * (self.num_heads * self.head_dim) ** -0.5
        return rotated(queries, cos[:, :, None], sin[:, :, None]), rotated(keys, cos, sin), weights


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states whose first dimensions, as many as cos and sin have, are rotated in the half-split layout."""
    turned, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1)


def indexers_of(model: nn.Module) -> list[LightningIndexer]:
    """Return the indexers of a model."""
    return [module for module in model.modules() if isinstance(module, LightningIndexer)]
