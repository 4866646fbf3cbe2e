"""The lightning indexer: the module, the keys that it selects for a layer, and the loss by which it learns."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hf_efficient_attn.attention.build_call import LayerPattern, QueryOffset, unknown_start
from hf_efficient_attn.attention.sharded.collectives import exchanged, summed
from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.shards import Bounds, SequenceShards, shard_bounds, shards_of
from hf_efficient_attn.attention.sharded.ulysses import INDEXED, refuse_heads
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.integration.model_info import head_group
from hf_efficient_attn.integration.names import INDEXER
from hf_efficient_attn.layout.listed_keys import ChosenTokens
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import choose_tokens, head_products, index_scores, open_pairs
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.patterns.bands import Causal

# The loss of an indexer: the KL divergence of its softmax from the attention, computed by tiles in linear memory.
#
# DeepSeek-V3.2 (arXiv:2512.02556), equations 3 and 4: the target is the mean over heads of the attention
# probabilities, over all keys or over the selected ones. The gradient with respect to the scores is softmax(scores) -
# target.
#
# The paper sums over queries; here the loss is the mean, so that it does not depend on the number of tokens in a batch.
# An indexer has no other gradients, so the two differ only by the number of queries. Adam takes the same steps (except
# for the effect of ε) if this number is constant; clipping by a norm over the whole model, and optimizers whose steps
# scale with the gradient, differ.


# elements per tensor that are in memory at a time; on CPUs fewer, so that they stay in the processor's cache
MAX_NUMBERS, CACHED_NUMBERS = 1 << 22, 1 << 19


@dataclass(frozen=True, eq=False)
class Target:
    """The attention that an indexer learns to predict; no gradient reaches it.

    Attributes:
        query, key: [B, H, Nq, D] and [B, Hkv, Nk, D].
        scale: of the products.
        documents: of the keys, [B or 1, Nk]; see `token_locations`.
        query_offset: position of the first query.
        tokens: the keys that each query attends to, int [B, Nq, k], -1 for none; None: all keys up to the query.
        group: the processes over whose heads the target is averaged, each with the same number of heads; None: only
            this process.
        sharing: the processes that share texts and over whose queries the loss is averaged; None: only this process.
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
        """Yield the ranges of queries that are computed together."""
        batch_size, num_heads, num_queries, head_dim = self.query.shape
        num_together = num_heads // self.key.shape[1]
        width = self.key.shape[2] if self.tokens is None else self.tokens.shape[2]
        # selected keys are gathered for each query
        gathered = 0 if self.tokens is None else head_dim
        most = CACHED_NUMBERS if self.query.device.type == "cpu" else MAX_NUMBERS
        step = max(1, most // (batch_size * width * max(num_together, num_index_heads, gathered)))
        for first in range(0, num_queries, step):
            yield slice(first, min(first + step, num_queries))

    def num_read(self, rows: slice) -> int:
        """Return how many of the first keys the queries in `rows` need: up to the last query, or all if selected."""
        return min(self.key.shape[2], self.query_offset + rows.stop) if self.tokens is None else self.key.shape[2]

    def of_rows(self, states: Tensor, rows: slice) -> Tensor:
        """Return the states [B, Nk, ...] of the keys that queries need as [B, 1, keys, ...] or [B, queries, k, ...]."""
        if self.tokens is None:
            return states[:, None, : self.num_read(rows)]
        examples = torch.arange(states.shape[0], device=states.device)[:, None, None]
        return states[examples, self.tokens[:, rows].long().clamp(min=0)]

    def open_keys(self, rows: slice) -> Tensor:
        """Return which of these keys each query may attend to, bool [B or 1, queries, keys]."""
        if self.tokens is not None:
            return self.tokens[:, rows] >= 0
        return open_pairs(self.documents[:, : self.num_read(rows)], rows, self.query_offset)

    def probabilities(self, rows: slice, is_open: Tensor) -> Tensor:
        """Return the mean over heads of the attention probabilities, [B, queries, keys], in float32 or wider."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        is_closed, total = ~is_open[:, :, None], torch.zeros_like(is_open, dtype=wide)
        # one key head at a time, with all query heads that share it
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
    """The loss, whose forward also computes the gradients with respect to the states of the indexer."""

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
    """Return the sum of the divergences of some queries, how many of them have a key, and the gradients of the sum."""
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
    """Return the values of open pairs, with 0 for all other pairs, which may hold NaN."""
    return torch.where(is_open, numbers, 0)


# the gradients are computed within a forward pass, which a compiler cannot trace
@torch.compiler.disable
def index_loss(queries: Tensor, keys: Tensor, weights: Tensor, target: Target) -> Tensor:
    """Return the mean over queries of KL(target ‖ softmax(index scores)), a scalar in float32 or wider.

    The paper takes the sum. Queries without keys, such as padding, do not count. Memory is linear in the number of
    keys. Only the indexer gets gradients.

    Args:
        queries, keys, weights: states of the indexer, [B, Nq, heads, D], [B, Nk, D], [B, Nq, heads].
    """
    with autocast_off(queries.device.type):
        loss: Tensor = _IndexLoss.apply(queries, keys, weights, target)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def index_recall(target: Target, chosen: Tensor) -> Tensor:
    """Return the fraction of each query's attention that its selected keys receive, [B, Nq]; 0 for padding.

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


# Additional outputs of layers in a forward pass: the losses and recalls of their indexers.


class LayerNumbers:
    """A collector of tensors of one shape, one from each layer in order, on any devices.

    It is passed through a model as a keyword argument. It is not a list, dict or dataclass because FSDP and accelerate
    copy those to cast and move their tensors, but pass on objects of other classes unchanged.
    """

    def __init__(self) -> None:
        self.added: list[Tensor] = []
        self.is_open = True

    def add(self, number: Tensor) -> None:
        """Add a tensor, unless `take` was called: then gradient checkpointing is recomputing a layer."""
        if self.is_open:
            self.added.append(number)

    def take(self) -> Tensor | None:
        """Return all tensors as one, [layers, ...], on the device of the first; None: no layer has added any."""
        added, self.added, self.is_open = self.added, [], False
        return torch.stack([each.to(added[0].device) for each in added]) if added else None


# The lightning indexer: a small attention without values, whose scores select the keys that a layer attends to.
#
# DeepSeek-V3.2 (arXiv:2512.02556), equation 1.


# the indexer does nothing; learns from dense attention; selects keys and learns from the attention to them
DENSE, WARMUP, SPARSE = "dense", "warmup", "sparse"
STAGES = (DENSE, WARMUP, SPARSE)


@dataclass(frozen=True, eq=False)
class IndexStates:
    """The states of an indexer for the tokens of a call, and its settings.

    Attributes:
        queries: [B, Nq, heads, D].
        keys: [B, Nk, D], the cached ones first, shared by all heads.
        weights: [B, Nq, heads], scaled.
        top_k: how many keys a query attends to.
        stage: one of STAGES.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    top_k: int
    stage: str


class LightningIndexer(nn.Module):
    """The queries, keys and weights of an indexer: score = Σ over heads of weight · ReLU(query · key).

    The queries of all heads share one key. Their first dimensions, as many as the model rotates, get rotary position
    embeddings. No gradient passes into the hidden states.
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
            cos, sin: [B or 1, N, rotated dimensions], in the half-split layout (see `rotated`).
        """
        hidden_states = hidden_states.detach()
        queries = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        keys = self.k_norm(self.k_proj(hidden_states))
        # the scale of the scores is applied to the weights, because ReLU commutes with a positive factor
        weights = self.weights_proj(hidden_states) * (self.num_heads * self.head_dim) ** -0.5
        return rotated(queries, cos[:, :, None], sin[:, :, None]), rotated(keys, cos, sin), weights


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states with the first dimensions, as many as cos and sin have, rotated: dimension i with i + half."""
    turned, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1)


def indexers_of(model: nn.Module) -> list[LightningIndexer]:
    """Return the indexers of a model."""
    return [module for module in model.modules() if isinstance(module, LightningIndexer)]


# In "warmup" only the indexer of a layer learns, and its saved tensors are exempt from activation checkpointing.
#
# Checkpointing would save no memory, because the rest of the layer keeps nothing, and would recompute the whole layer.
# FSDP would not have gathered the parameters for that, because it gathers only those of layers that have a gradient.


def keeping(stage: str) -> AbstractContextManager[None]:
    """Return a context within which autograd keeps tensors for the backward pass in "warmup"; else a null context."""
    if stage != WARMUP or torch.compiler.is_compiling():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


# keyword arguments that a model passes to its attention function: the states of a layer's indexer, and the
# `LayerNumbers` to which layers add their losses and recalls
STATES, LOSSES, RECALLS = "index_states", "index_losses", "index_recalls"
# arguments that change scores in ways that the target does not compute
OTHER_SCORES = ("s_aux", "softcap", "position_bias")


def indexed_selected_keys(
    module: nn.Module,
    options: Mapping[str, Any],
    layer_spec: LayerPattern,
    tokens: TokenMask,
    query_offset: QueryOffset,
    matrix: Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float,
    chosen: ChosenKeys | None,
) -> ChosenKeys | None:
    """Return the keys that a layer's indexer selects, None for all; without an active indexer, return `chosen`.

    Args:
        options: keyword arguments of the attention call.
        matrix: a mask over all pairs that the user gave.
        chosen: the keys that were selected before.

    Raises:
        InputError: the first tokens of the cache were computed without the indexer.
        UnsupportedBackendError: scores or masks that an indexer does not support.
    """
    field = getattr(module.config, INDEXER, None)
    if field is None or field["stage"] == DENSE:
        return chosen
    check_layer(module, options, layer_spec, tokens, matrix)
    states: IndexStates = options[STATES]
    if states.keys.shape[1] != key.shape[2]:
        raise InputError(
            f"The indexer knows only {states.keys.shape[1]} of {key.shape[2]} keys: the others were cached before "
            "index_stage turned the indexer on. Pass an empty cache."
        )
    needs_tokens = states.stage == SPARSE or options.get(RECALLS) is not None
    listed = selected_tokens(states, tokens, query_offset) if needs_tokens else None
    learn(module, states, options, tokens, query_offset, query.detach(), key.detach(), scale, listed)
    return None if listed is None or states.stage != SPARSE else ChosenTokens(listed)


def check_layer(
    module: nn.Module, options: Mapping[str, Any], layer_spec: LayerPattern, tokens: TokenMask, matrix: Tensor | None
) -> None:
    """Raise UnsupportedBackendError if a layer's scores or masks are not what its indexer learns from."""
    if options.get(STATES) is None:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer (hea.index), but its attention did not receive the keys that the "
            "indexer selects."
        )
    found = [name for name in OTHER_SCORES if options.get(name) is not None]
    if matrix is not None:
        found.append("a mask matrix")
    if not layer_spec.is_own and layer_spec.pattern != Causal():
        found.append("an attention_pattern")
    if tokens.global_mask is not None:
        found.append("global tokens")
    if found:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer (hea.index), which does not work with {', '.join(found)}."
        )


def selected_tokens(states: IndexStates, tokens: TokenMask, query_offset: QueryOffset) -> Tensor | None:
    """Return the keys that an indexer selects, int [B, 1, Nq, top_k]; None: all."""
    # not while compiling, because lengths may be symbols
    if not torch.compiler.is_compiling() and states.keys.shape[1] <= states.top_k:
        return None
    start = unknown_start(query_offset)
    offset = first_position(states, None if start is not None else query_offset)
    given = (states.queries.detach(), states.keys.detach(), states.weights.detach())
    listed: Tensor = choose_tokens(*given, list(tokens.tensors), states.top_k, offset, start)
    return listed


def first_position(states: IndexStates, query_offset: QueryOffset) -> int:
    """Return the position of the first query."""
    return states.keys.shape[1] - states.queries.shape[1] if query_offset is None else int(query_offset)


def learn(
    module: nn.Module,
    states: IndexStates,
    options: Mapping[str, Any],
    tokens: TokenMask,
    query_offset: QueryOffset,
    query: Tensor,
    key: Tensor,
    scale: float,
    listed: Tensor | None,
) -> None:
    """Add the loss and the recall of an indexer to the `LayerNumbers` in the options.

    Under tensor parallelism the target is summed over the heads of all processes, so that all processes learn the same.
    If processes share texts, the loss is the mean over the queries of all of them.
    """
    losses, recalls = options.get(LOSSES), options.get(RECALLS)
    if losses is None and recalls is None:
        return
    shards = shards_of(module)
    documents = token_locations(tokens, key.shape[2], key.device).documents
    target = Target(
        query,
        key,
        scale,
        documents,
        first_position(states, query_offset),
        group=head_group(module, query.shape[1]),
        sharing=None if shards is None else shards.group,
    )
    if losses is not None:
        is_dense = listed is None or states.stage != SPARSE
        read = None if is_dense else listed[:, 0]  # type: ignore[index]
        with keeping(states.stage):
            losses.add(index_loss(states.queries, states.keys, states.weights, replace(target, tokens=read)))
    if recalls is not None:
        all_of_it = query.new_ones(query.shape[0], query.shape[2])
        recalls.add(all_of_it if listed is None else index_recall(target, listed[:, 0]))


# Layers with an indexer if processes share texts: each process gets the keys of the earlier ones, as from a cache.
#
# An indexer selects the same keys for all heads among all earlier tokens, so its keys are exchanged together with the
# keys and values of attention.


def with_earlier_keys(
    module: nn.Module,
    layer_spec: LayerPattern,
    key: Tensor,
    value: Tensor,
    masks: tuple[TokenMask, QueryOffset],
    options: Mapping[str, Any],
) -> tuple[LayerPattern, Tensor, Tensor, tuple[TokenMask, QueryOffset], dict[str, Any]]:
    """Return what a layer follows, its keys and values [B, H, K, D], their masks, and the arguments of attention.

    If processes share texts and the layer has an active indexer, these cover all tokens up to the last token of this
    process. Otherwise the arguments are returned unchanged.

    Args:
        masks: the token mask of whole texts, and the position of the first query.

    Raises:
        ConfigurationError: the mode is "heads".
        UnsupportedBackendError: the code is being compiled.
    """
    field, index_states = getattr(module.config, INDEXER, None), options.get(STATES)
    if layer_spec.shards is None or field is None or field["stage"] == DENSE or index_states is None:
        return layer_spec, key, value, masks, dict(options)
    key, value, index_keys = earlier_keys(module, key, value, index_states.keys, masks[0])
    states = replace(index_states, keys=index_keys)
    # the queries are the last of these tokens
    masks = masks[0].first(key.shape[2]), None
    return replace(layer_spec, shards=None), key, value, masks, {**options, STATES: states}


def earlier_keys(
    module: Any, key: Tensor, value: Tensor, index_keys: Tensor, tokens: TokenMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys, values and indexer keys of all tokens up to the last token of this process.

    Args:
        key, value, index_keys: states of this process's n tokens, [B, H, n, D], [B, H, n, D] and [B, n, D]; the result
            has the same shapes with K tokens instead of n.
        tokens: the mask of whole texts, which says how long they are.

    Raises:
        ConfigurationError: the mode is "heads", but an indexer selects the same keys for all heads.
        UnsupportedBackendError: the code is being compiled.
    """
    shards: Any = shards_of(module)
    refuse_compiled()
    refuse_heads(shards.mode, f"{type(module).__name__}, {INDEXED}")
    assert tokens.shape is not None
    bounds = shard_bounds(tokens.shape[1], shards.size)
    states = earlier_rows(torch.cat((key, value), -1), bounds, shards)
    # a separate exchange, because the dtype may differ
    of_index = earlier_rows(index_keys[:, None], bounds, shards)
    keys, values = states.split((key.shape[3], value.shape[3]), 3)
    return keys, values, of_index[:, 0]


def earlier_rows(own: Tensor, bounds: Bounds, shards: SequenceShards) -> Tensor:
    """Return the states of all K tokens up to the last one of this process, [B, H, n, X] → [B, H, K, X]."""
    rows, rank = own.permute(2, 0, 1, 3), shards.rank
    to_send = [len(rows) * (other > rank) for other in range(shards.size)]
    to_receive = [(stop - first) * (other < rank) for other, (first, stop) in enumerate(bounds)]
    sent = torch.cat([rows[:0], *[rows] * (shards.size - 1 - rank)])
    received = exchanged(sent, to_send, to_receive, shards.group)
    return torch.cat((received, rows)).permute(1, 2, 0, 3)
