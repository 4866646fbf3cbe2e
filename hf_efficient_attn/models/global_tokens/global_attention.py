"""Longformer's second set of projections, used by the queries of global tokens, in one process and in several.

Source: Beltagy et al. (arXiv:2004.05150), section 3.1 (Q_g, K_g, V_g, which start as copies of Q_s, K_s, V_s) and the
authors' code. Only global tokens attend with these projections. Other tokens attend to a global token with the local
projections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.attention.sharded.collectives import SumOfProcesses
from hf_efficient_attn.attention.sharded.shards import SequenceShards, shard_bounds
from hf_efficient_attn.attention.sharded.ulysses import ulysses_heads
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.onnx import is_written
from hf_efficient_attn.layout.token_locations import (
    NO_DOCUMENT,
    TokenLocations,
    last_positions,
    locations_on_host,
    token_locations,
)
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import UNCOPIED, device_numbers
from hf_efficient_attn.models.global_tokens.rules import GlobalTokenSelection
from hf_efficient_attn.models.inputs import LayerInputs, Movable
from hf_efficient_attn.models.parts.blocks import gathered, is_in_shards
from hf_efficient_attn.models.parts.embeddings import rotate

# The global tokens among the queries of a call.


@dataclass(frozen=True)
class GlobalRows(Movable):
    """The queries that are global tokens. X is the largest number in any example, and at least 1.

    Attributes:
        is_row: bool [batch, queries], which queries are global.
        index: int [batch, X], their indices among the queries.
        is_global: bool [batch, X]; False: the example has fewer global tokens, and this index is an arbitrary query.
        allowed: which keys they attend to: bool [batch, X, keys], or a floating-point matrix to add; None: all.
    """

    is_row: Tensor
    index: Tensor
    is_global: Tensor
    allowed: Tensor | None

    def among(self, queries: Sequence[int]) -> "GlobalRows":
        """Return the global tokens among these queries, given by their indices."""
        some = device_numbers(tuple(queries), self.index.device, torch.long)
        is_same = (self.index[:, :, None] == some) & self.is_global[:, :, None]
        return replace(self, is_row=self.is_row[:, some], index=is_same.int().argmax(-1), is_global=is_same.any(-1))


def find_global_rows(
    selection: GlobalTokenSelection,
    masks: LayerInputs,
    batch_size: int,
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    max_global_tokens: int,
    device: torch.device,
) -> GlobalRows:
    """Return the global tokens among the queries.

    Args:
        masks: the mask inputs of the layers.
        max_global_tokens: the largest number of global tokens while tracing, when they cannot be counted.
    """
    tokens, matrix = masks.token_mask, masks.matrix
    locations = token_locations(tokens, num_keys, device)
    offset = num_keys - num_queries if masks.query_offset is None else masks.query_offset

    def rows_of(selection: GlobalTokenSelection, locations: TokenLocations) -> Tensor:
        queries = torch.arange(num_queries, device=locations.positions.device) + offset
        return _global_keys(selection, locations).expand(batch_size, -1).index_select(1, queries)

    is_row = known = rows_of(selection, locations)
    if device.type not in UNCOPIED and not torch.compiler.is_compiling():
        known = rows_of(selection.on_host(), locations_on_host(tokens, num_keys))
    index, found = _first_true(is_row, _most(selection, known, tokens, max_global_tokens))
    allowed = None
    if matrix is not None:
        matrix = matrix.expand(batch_size, -1, num_queries, -1)[:, 0]
        allowed = matrix.gather(1, index[:, :, None].expand(-1, -1, num_keys))
    elif is_causal or not tokens.is_empty:
        allowed = _readable(locations, index + offset, is_causal)
    return GlobalRows(is_row, index, found, allowed)


def global_keys(
    selection: GlobalTokenSelection, tokens: TokenMask, batch_size: int, num_keys: int, device: torch.device
) -> Tensor:
    """Return which keys are global tokens, bool [batch, keys]."""
    return _global_keys(selection, token_locations(tokens, num_keys, device)).expand(batch_size, -1)


def check_positions(selection: GlobalTokenSelection, tokens: TokenMask, num_keys: int, device: torch.device) -> None:
    """Raise InputError for positions from the config beyond the end of some text; do nothing while compiling.

    Raises:
        InputError: the message has the position, the example, and where its text ends.
    """
    if not selection.is_named or torch.compiler.is_compiling():
        return
    wanted = max(selection.positions)
    where, end = "a text", num_keys - 1
    if not tokens.is_empty:
        is_known = device.type in UNCOPIED
        locations = token_locations(tokens, num_keys, device) if is_known else locations_on_host(tokens, num_keys)
        ends = last_positions(locations)
        is_short = (ends < wanted) & (locations.documents != NO_DOCUMENT)
        if not is_short.any():
            return
        row, token = is_short.nonzero()[0].tolist()
        where, end = f"a text of example {row}", int(ends[row, token])
    if end < wanted:
        raise InputError(
            f"global_tokens has position {wanted}, but {where} ends at position {end}. Give positions that every text "
            "has, or select the tokens with global_attention_mask."
        )


def _global_keys(selection: GlobalTokenSelection, locations: TokenLocations) -> Tensor:
    if selection.mask is not None:
        return selection.mask & (locations.documents != NO_DOCUMENT)
    if selection.every is not None:
        return (locations.positions % selection.every == 0) & (locations.documents != NO_DOCUMENT)
    return _among(locations.positions, tuple(selection.positions)) & (locations.documents != NO_DOCUMENT)


def _among(positions: Tensor, wanted: tuple[int, ...]) -> Tensor:
    if not is_written():
        return torch.isin(positions, device_numbers(wanted, positions.device, torch.long))
    # ONNX has no operator for this, and onnxruntime cannot reduce an empty dimension
    found = torch.zeros_like(positions, dtype=torch.bool)
    for each in wanted:
        found = found | (positions == each)
    return found


def _most(selection: GlobalTokenSelection, is_row: Tensor, tokens: TokenMask, limit: int) -> int:
    """Return the largest number of global queries in an example, at least 1."""
    if not torch.compiler.is_compiling():
        return max(1, int(is_row.sum(1).max()))
    if selection.mask is None and tokens.segment_ids is None:
        return max(1, len(selection.positions))
    torch._assert_async(
        (is_row.sum(1) <= limit).all(),
        "A text has more global tokens than config.max_global_tokens, the limit of compiled and exported models. Set "
        "it higher.",
    )
    return limit


def _first_true(is_row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the first `count` true entries of each row, and which of them are true entries."""
    # padded, so that a symbolic length need not be compared with the count
    padded = torch.nn.functional.pad(is_row, (0, count))
    length = padded.shape[1]
    # all scores differ, so true entries come first, in the order of their indices
    scores = padded.long() * length - torch.arange(length, device=padded.device)
    index = scores.topk(count, dim=1).indices
    return index.clamp(max=is_row.shape[1] - 1), padded.gather(1, index)


def _readable(locations: TokenLocations, rows: Tensor, is_causal: bool) -> Tensor:
    documents, positions = locations.documents.expand(rows.shape[0], -1), locations.positions.expand(rows.shape[0], -1)
    own = documents.gather(1, rows)
    allowed = (documents[:, None] == own[:, :, None]) & (own != NO_DOCUMENT)[:, :, None]
    if is_causal:
        allowed = allowed & (positions[:, None] <= positions.gather(1, rows)[:, :, None])
    return allowed


class CopiedLinear(nn.Linear):
    """A linear map that starts as a copy of another one."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None)
        # in a tuple, so that it does not become a submodule
        self.source = (source,)

    def initialize(self) -> None:
        """Copy the other map, unless the weight comes from a checkpoint; `copy_source` copies sharded parameters."""
        (source,) = self.source
        if is_in_shards(source.weight):
            return
        init.copy_(self.weight, source.weight)
        if self.bias is not None:
            init.copy_(self.bias, source.bias)

    @torch.no_grad()
    def copy_source(self) -> None:
        """Copy the other map; if parameters are sharded, all processes must call this."""
        (source,) = self.source
        with gathered([*self.parameters(), *source.parameters()]):
            self.load_state_dict(source.state_dict())


class GlobalAttention(nn.Module):
    """Attention of the global tokens to all tokens. Shapes: hidden states [B, T, hidden_size] → [B, X, H, D].

    With few global tokens, the keys and values of all tokens are not computed: X queries times W_k, and X weighted sums
    of hidden states times W_v, give the same results at X·H / hidden_size of the cost.
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
            # if an adapter wraps the projection, the adapter's weights stay as they are
            getattr(projection, "base_layer", projection).copy_source()

    def keys_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values, both [B, H, T, D]."""
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
        """Return the output [B, X, H, D] and the weights [B, H, X, keys], for any number of heads; see `GlobalRows`."""
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
        # the softmax is invariant to this bias, but the parameter needs its (zero) gradient
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
            # an entry that is not a global token may have no key, so it gets finite scores; its result is not used
            scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
        elif allowed is not None:
            scores = scores + allowed[:, None]
        wide = torch.promote_types(scores.dtype, torch.float32)
        return torch.softmax(scores, -1, dtype=wide).to(scores.dtype)


def is_plain(module: nn.Module) -> bool:
    """Return whether a projection consists of its weight and bias only: no adapter, no quantisation, no hooks.

    Quantised, sharded or otherwise special weights may be in a module of the same class, but are not plain parameters.
    """
    return (
        type(module) is CopiedLinear
        and type(module.weight) is nn.Parameter
        and not module._forward_pre_hooks
        and not module._forward_hooks
        and not (hasattr(module, "_hf_hook"))
    )


# Attention of the global tokens when several processes share each text.


def read_together(
    attention: GlobalAttention,
    hidden_states: Tensor,
    rows: GlobalRows,
    rotation: tuple[Tensor, Tensor] | None,
    shards: SequenceShards,
) -> tuple[Tensor, GlobalRows]:
    """Return the attention output of all global tokens, [B, X, H, D], and the rows of this process's global tokens.

    Every process gets the hidden states of all global tokens, which are few, and the keys of all tokens for some of the
    heads.

    Args:
        hidden_states: hidden states of this process's tokens, [B, n, hidden_size].
        rows: the global tokens of the whole texts.
        rotation: cosines and sines of this process's tokens, [B or 1, n, D].
    """
    num_tokens = rows.is_row.shape[1]
    first, stop = shard_bounds(num_tokens, shards.size)[shards.rank]
    is_own = rows.is_global & (rows.index >= first) & (rows.index < stop)
    index = (rows.index - first).clamp(0, stop - first - 1)

    def of_all(states: Tensor) -> Tensor:
        """Return the states of all global tokens, given those of this process's tokens, [B or 1, n, E] → [B, X, E]."""
        states = states.expand(len(index), -1, -1)
        found = states.gather(1, index[:, :, None].expand(-1, -1, states.shape[2]))
        return SumOfProcesses.apply(torch.where(is_own[:, :, None], found, 0), shards.group)  # type: ignore[no-any-return]

    ulysses = ulysses_heads(shards, attention.num_heads, num_tokens)
    key, value = attention.keys_and_values(hidden_states)
    query = attention.queries(of_all(hidden_states))
    if rotation is not None:
        key = rotate(key, *rotation)
        query = rotate(query, *(of_all(each) for each in rotation))
    key, value = ulysses.gather_sequences(key), ulysses.gather_sequences(value)
    out, _ = attention.read(query[:, ulysses.own], key, value, rows.allowed)
    width = attention.head_dim
    out = ulysses.all_heads(out.flatten(2), width).unflatten(2, (-1, width))
    return out, replace(rows, is_row=rows.is_row[:, first:stop], index=index, is_global=is_own)


def whole_lengths(shards: SequenceShards | None, num_queries: int, num_keys: int, tokens: Any) -> tuple[int, int]:
    """Return the number of queries and keys; if several processes share each text, those of the whole text.

    tokens: token mask of the call; with shards, that of the whole texts.
    """
    return (num_queries, num_keys) if shards is None else (tokens.shape[1], tokens.shape[1])


def keys_of_text(shards: SequenceShards | None, key: Tensor, tokens: TokenMask) -> int:
    """Return the number of keys, including those of other processes: [B, H, K, D] and the mask → K."""
    return key.shape[2] if shards is None or tokens.shape is None else tokens.shape[1]
