"""How an indexer learns: the divergence of its softmax from what attention reads, tile by tile in linear memory.

DeepSeek-V3.2 (arXiv:2512.02556), equations 3 and 4: the target is the mean over heads of the attention probabilities,
over all keys or over those chosen. The gradient with respect to the scores is softmax(scores) - target.

The paper sums over queries; here the loss is their mean, so that it does not depend on how many tokens a batch has. The
gradients differ by that number alone, and are an indexer's only ones: Adam takes the same steps, but for its ε, while
clipping by a norm that the model shares, and optimizers whose steps are as long as gradients, do tell the two apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from hf_efficient_attn.attention.sharded.sums import summed
from hf_efficient_attn.layout.top_k import head_products, index_scores, open_pairs
from hf_efficient_attn.layout.tracing import autocast_off

# numbers that are in memory at a time, for each of a few tensors, and on CPUs, so few that they stay in a cache
MAX_NUMBERS, CACHED_NUMBERS = 1 << 22, 1 << 19


@dataclass(frozen=True, eq=False)
class Target:
    """The attention that an indexer learns to predict; no gradient reaches it.

    Attributes:
        query, key: [B, H, Nq, D] and [B, Hkv, Nk, D].
        scale: of the products.
        documents: of the keys, [B or 1, Nk]; see `token_locations`.
        query_offset: position of the first query.
        tokens: the keys that each query reads, int [B, Nq, k], -1 for none; None: all up to itself.
        group: the processes, each with as many heads, whose heads are meant; None: those of this process.
        sharing: the processes that share texts, whose queries are meant; None: those of this process.
    """

    query: Tensor
    key: Tensor
    scale: float
    documents: Tensor
    query_offset: int
    tokens: Tensor | None = None
    group: Any = None
    sharing: Any = None

    def row_tiles(self, num_index_heads: int) -> Iterator[slice]:
        """Yield ranges of queries that are looked at together."""
        batch_size, num_heads, num_queries, head_dim = self.query.shape
        num_together = num_heads // self.key.shape[1]
        width = self.key.shape[2] if self.tokens is None else self.tokens.shape[2]
        # chosen keys are gathered for each query
        gathered = 0 if self.tokens is None else head_dim
        most = CACHED_NUMBERS if self.query.device.type == "cpu" else MAX_NUMBERS
        step = max(1, most // (batch_size * width * max(num_together, num_index_heads, gathered)))
        for first in range(0, num_queries, step):
            yield slice(first, min(first + step, num_queries))

    def num_read(self, rows: slice) -> int:
        """Return how many keys the states must have that these queries look at: none is after the last of them."""
        return min(self.key.shape[2], self.query_offset + rows.stop) if self.tokens is None else self.key.shape[2]

    def of_rows(self, states: Tensor, rows: slice) -> Tensor:
        """Return the states [B, Nk, ...] of the keys that are looked at: [B, 1, keys, ...] or [B, queries, k, ...]."""
        if self.tokens is None:
            return states[:, None, : self.num_read(rows)]
        examples = torch.arange(states.shape[0], device=states.device)[:, None, None]
        return states[examples, self.tokens[:, rows].long().clamp(min=0)]

    def open_keys(self, rows: slice) -> Tensor:
        """Return which of these keys the queries read, bool [B or 1, queries, keys]."""
        if self.tokens is not None:
            return self.tokens[:, rows] >= 0
        return open_pairs(self.documents[:, : self.num_read(rows)], rows, self.query_offset)

    def probabilities(self, rows: slice, is_open: Tensor) -> Tensor:
        """Return the mean over heads of the attention probabilities, [B, queries, keys], in float32 or wider."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        is_closed, total = ~is_open[:, :, None], torch.zeros_like(is_open, dtype=wide)
        # heads that share keys at a time
        for queries, keys in zip(self.query.chunk(self.key.shape[1], 1), self.key.unbind(1), strict=True):
            scaled = queries[:, :, rows].to(wide).transpose(1, 2) * self.scale
            scores = head_products(scaled, self.of_rows(keys, rows).to(wide))
            # finite, so that a row without keys has no NaN
            scores.masked_fill_(is_closed, torch.finfo(wide).min)
            total += scores.softmax(-1).sum(2)
        num_heads = self.query.shape[1]
        if self.group is not None:
            distributed.all_reduce(total, group=self.group)
            num_heads *= self.group.size()
        return closed_to_zero(total / num_heads, is_open)


class _IndexLoss(torch.autograd.Function):
    """The loss with the gradients of the indexer's states, which its forward computes beside it."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, weights: Tensor, target: Target) -> Tensor:
        states = (queries.detach(), keys.detach(), weights.detach())
        wide = torch.promote_types(queries.dtype, torch.float32)
        slopes = [torch.zeros_like(each, dtype=wide) for each in states]
        total, count = queries.new_zeros((), dtype=wide), queries.new_zeros((), dtype=wide)
        for rows in target.row_tiles(queries.shape[2]):
            loss, num_rows, (of_queries, of_keys, of_weights) = _of_tile(*states, target, rows)
            total, count = total + loss, count + num_rows
            slopes[0][:, rows], slopes[2][:, rows] = of_queries, of_weights
            slopes[1][:, : of_keys.shape[1]] += of_keys
        if target.sharing is not None:
            total, count = summed(torch.stack((total, count)), target.sharing)
        count, ctx.sharing = count.clamp(min=1), target.sharing
        ctx.save_for_backward(*(each.div_(count).to(state.dtype) for each, state in zip(slopes, states, strict=True)))
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0] if ctx.sharing is None else summed(grads[0], ctx.sharing)
        return *(slope * grad.to(slope.dtype) for slope in ctx.saved_tensors), None


def _of_tile(
    queries: Tensor, keys: Tensor, weights: Tensor, target: Target, rows: slice
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the sum of the divergences of some queries, how many of them read a key, and the gradients of the sum."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    read = keys[:, : target.num_read(rows)]
    leaves = [each.to(wide).detach().requires_grad_() for each in (queries[:, rows], read, weights[:, rows])]
    with torch.enable_grad():
        scores = index_scores(leaves[0], target.of_rows(leaves[1], rows), leaves[2])
    is_open = target.open_keys(rows).expand(scores.shape[0], -1, -1)
    wanted = target.probabilities(rows, is_open).to(wide)
    found = scores.detach().masked_fill(~is_open, -torch.inf).log_softmax(-1)
    loss = closed_to_zero(torch.xlogy(wanted, wanted) - wanted * found, is_open).sum()
    slope = closed_to_zero(found.exp() - wanted, is_open)
    return loss, is_open.any(-1).sum(), torch.autograd.grad(scores, leaves, slope)


def closed_to_zero(numbers: Tensor, is_open: Tensor) -> Tensor:
    """Return the numbers of open pairs, and 0 for others, which may be NaN."""
    return torch.where(is_open, numbers, 0)


# the gradients are computed within a forward pass, which a compiler cannot trace
@torch.compiler.disable
def index_loss(queries: Tensor, keys: Tensor, weights: Tensor, target: Target) -> Tensor:
    """Return the mean over queries of KL(target ‖ softmax(index scores)), a scalar in float32 or wider; the paper: sum.

    Queries without keys, such as padding, do not count. Memory is linear in the number of keys, and gradients reach the
    indexer only.

    Args:
        queries, keys, weights: of the indexer, [B, Nq, heads, D], [B, Nk, D], [B, Nq, heads].
    """
    with autocast_off(queries.device.type):
        loss: Tensor = _IndexLoss.apply(queries, keys, weights, target)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def index_recall(target: Target, chosen: Tensor) -> Tensor:
    """Return the share of the attention of each query that its chosen keys have, [B, Nq]; 0 for padding.

    Args:
        target: attention over all keys.
        chosen: int [B, Nq, k], -1 for none.
    """
    shares = []
    for rows in target.row_tiles(1):
        with autocast_off(chosen.device.type):
            wanted = target.probabilities(rows, target.open_keys(rows).expand(chosen.shape[0], -1, -1))
        tokens = chosen[:, rows].long()
        shares.append(torch.where(tokens >= 0, wanted.gather(2, tokens.clamp(min=0)), 0).sum(2))
    return torch.cat(shares, 1)
