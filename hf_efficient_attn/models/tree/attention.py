"""Attention over the nodes of a tree: through the engine for whole texts, and over gathered nodes with a cache.

Shapes: B rows, T tokens, K tokens so far, S spans, H heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.layer import attend_layer, selected_rows, weights_of_rows
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.score_terms import InterleavedRelation, Term
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.encoder_decoder.stacks import CrossAttention
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import Block, append_to_cache, build_norm, check_cached, drop_rate
from hf_efficient_attn.models.tree.nodes import NextNodes, WholeTree, tree_of

# new tokens are computed in steps, so that the keys gathered in a step have at most this many elements
MAX_GATHERED = 1 << 22
# up to this many new spans of a size are written one by one on an accelerator, because the host would have to wait for
# the device to learn which of them exist
FEW_COLUMNS = 2


class RelationVectors(nn.Module):
    """A learned vector for each relation between a token and a node, added to the keys of all heads.

    Source: Ye et al. (arXiv:1911.04070); the authors' code.
    """

    def __init__(self, config: Any, is_causal: bool) -> None:
        super().__init__()
        self.label = InterleavedRelation(config.num_nodes, config.clip_distance, is_causal)
        self.weight = nn.Parameter(torch.empty(self.label.num_values, config.head_dim))
        self.std = config.initializer_range

    def initialize(self) -> None:
        """Initialize the vectors like all other matrices."""
        init.normal_(self.weight, std=self.std)

    def forward(self, query: Tensor) -> Tensor:
        """Return the dot products of the queries with all vectors, [B, H, T, D] → [B, H, T, relations]."""
        return query @ self.weight.T.to(query.dtype)


class TreeAttention(MultiHeadAttention):
    """Multi-head attention of tokens and spans, with shared projections. [B, T, hidden_size], [B, S, …] → the same.

    is_causal: whether tokens attend only to their left; None: the config decides.
    """

    def __init__(self, config: Any, layer_idx: int, is_causal: bool | None = None) -> None:
        super().__init__(config, layer_idx, is_causal)
        self.make_maps()
        self.relations = (
            RelationVectors(config, self.is_causal) if config.position_embedding_type == "relation" else None
        )

    def forward(
        self,
        tokens: Tensor,
        spans: Tensor,
        nodes: WholeTree | NextNodes,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return the outputs of tokens and spans and, with `output_attentions`, the tokens' weights [B, H, T, 2K].

        Column 2i is token i, and column 2i + 1 is the span whose left half ends with token i.
        """
        num_tokens, states = tokens.shape[1], torch.cat((tokens, spans), 1)
        query, key, value = (self.heads(project(states)) for project in (self.q_proj, self.k_proj, self.v_proj))
        need_weights = self.needs_weights(kwargs)
        if isinstance(nodes, WholeTree):
            if cache is not None:
                of_tokens_and_spans = (
                    each.unflatten(2, (2, -1)).transpose(1, 2).flatten(1, 2) for each in (key, value)
                )
                append_to_cache(cache, *of_tokens_and_spans, self.layer_idx)
            out, weights = self.read_whole(query, key, value, nodes, need_weights)
        else:
            out, weights = self.read_next(query, key, value, nodes, cache, need_weights)
        out = self.o_proj(out.flatten(2))
        return (out[:, :num_tokens], out[:, num_tokens:]), weights

    def read_whole(
        self, query: Tensor, key: Tensor, value: Tensor, tree: WholeTree, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of the nodes of whole texts, and the weights; tokens come before spans."""
        # the engine takes each span directly after its token
        query, key, value = (each.unflatten(2, (2, -1)).transpose(2, 3).flatten(2, 3) for each in (query, key, value))
        terms = ()
        if self.relations is not None:
            terms = (Term(self.relations(query * self.scaling), self.relations.label),)
        options: dict[str, Any] = {
            "scale": self.scaling,
            "dropout": drop_rate(self.dropout),
            "terms": terms,
            "backend": backend_of(self.config),
        }
        layer_spec = LayerPattern(tree_of(self.config, self.is_causal), self.layer_idx, is_own=False)
        rows = selected_rows()
        if not need_weights or rows is None:
            out, weights = attend_layer(query, key, value, layer_spec, tree.mask, need_weights=need_weights, **options)
            weights = None if weights is None else weights[:, :, ::2]
        else:
            with weights_of_rows(2 * row for row in rows):
                out, weights = attend_layer(query, key, value, layer_spec, tree.mask, need_weights=True, **options)
        return torch.cat(out.unflatten(1, (-1, 2)).unbind(2), 1), weights

    def read_next(
        self, query: Tensor, key: Tensor, value: Tensor, nodes: NextNodes, cache: Cache, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of the new tokens and of the spans that end with one, and the tokens' weights."""
        num_tokens = nodes.read.shape[1]
        keys, values = self.remember(cache, key, value, nodes, num_tokens)
        queries, own_keys, own_values = (each[:, :, :num_tokens] for each in (query, key, value))
        added = None if self.relations is None else self.relations(queries * self.scaling)
        step = max(1, MAX_GATHERED // (key.shape[0] * key.shape[1] * nodes.read.shape[2] * self.head_dim))
        outs, weights = [], []
        for first in range(0, num_tokens, step):
            part = slice(first, first + step)
            read = nodes.read[:, part], nodes.is_read[:, part]
            bias = None
            if added is not None:
                relations = nodes.relations[:, None, part].expand(-1, key.shape[1], -1, -1)
                bias = torch.cat((added[:, :, part, :1], added[:, :, part].gather(3, relations)), 3)
            # the token itself comes first; its relation is number 0
            near = [
                torch.cat(
                    (
                        own[:, :, part].unsqueeze(3),
                        self.gathered(each[0], read[0][..., : nodes.num_tokens]),
                        self.gathered(each[1], read[0][..., nodes.num_tokens :]),
                    ),
                    3,
                )
                for own, each in ((own_keys, keys), (own_values, values))
            ]
            is_read = torch.cat((torch.ones_like(read[1][..., :1]), read[1]), -1)
            out, own_weights = self.softmax(queries[:, :, part], *near, is_read, bias)
            outs.append(out)
            if need_weights:
                weights.append(self.placed(own_weights, nodes, part, keys[0].shape[2]))
        spans = query[:, :, num_tokens:]
        outs.append(self.read_spans(spans, keys[0], values[0], nodes))
        return torch.cat(outs, 2).transpose(1, 2), torch.cat(weights, 2) if need_weights else None

    def read_spans(self, query: Tensor, keys: Tensor, values: Tensor, nodes: NextNodes) -> Tensor:
        """Return the attention output of spans over their tokens, [B, H, S, D] → the same."""
        outs, width = [query[:, :, :0]], keys.shape[2]
        counts = [first.shape[1] for first, _, _ in nodes.spans]
        for (first, _, is_new), size, own in zip(nodes.spans, nodes.sizes, query.split(counts, 2), strict=True):
            columns = first.unsqueeze(-1) + torch.arange(size, device=first.device)
            is_read = (columns < width) & is_new.unsqueeze(-1)
            columns = columns.clamp(max=width - 1)
            if nodes.real is not None:
                is_read = is_read & nodes.real.gather(1, columns.flatten(1)).view_as(columns)
            read = (self.gathered(each, columns) for each in (keys, values))
            outs.append(self.softmax(own, *read, is_read, None)[0])
        return torch.cat(outs, 2)

    def remember(
        self, cache: Cache, key: Tensor, value: Tensor, nodes: NextNodes, num_tokens: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cache the new tokens and spans; return the keys and the values of all tokens and of all spans so far."""
        check_layer(cache, self.layer_idx)
        why = f"{2 * key.shape[1]} heads, half of them for spans"
        check_cached(cache, self.layer_idx, why, (2 * key.shape[1], None))
        states = (each[:, :, :num_tokens] for each in (key, value))
        # the spans of the new tokens start as zeros in the cache, and are written once their last token is there
        append_to_cache(cache, *(torch.cat((each, torch.zeros_like(each)), 1) for each in states), self.layer_idx)
        layer, heads = cache.layers[self.layer_idx], key.shape[1]
        for held, new in ((layer.keys, key), (layer.values, value)):
            first = num_tokens
            for _, columns, is_new in nodes.spans:
                stop = first + columns.shape[1]
                write_spans(held[:, heads:], new[:, :, first:stop].to(held.dtype), columns, is_new)
                first = stop
        keys, values = ((each[:, :heads], each[:, heads:]) for each in (layer.keys, layer.values))
        return keys, values

    def gathered(self, states: Tensor, columns: Tensor) -> Tensor:
        """Return the states at these columns, [B, H, K, D] and [B, N, X] → [B, H, N, X, D]."""
        index = columns.flatten(1)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
        return states.gather(2, index).unflatten(2, columns.shape[1:])

    def softmax(
        self, query: Tensor, key: Tensor, value: Tensor, is_read: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, H, N, D] and weights [B, H, N, X] of queries with X keys each.

        Shapes: query [B, H, N, D], key and value [B, H, N, X, D], is_read [B, N, X], bias [B, H, N, X].
        """
        scores = (key.to(query.dtype) @ query.unsqueeze(-1)).squeeze(-1) * self.scaling
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = (scores if bias is None else scores + bias).masked_fill(~is_read.unsqueeze(1), -torch.inf)
        # a span that does not exist attends to nothing
        weights = scores.softmax(-1).nan_to_num().to(query.dtype)
        weights = self.dropout(weights)
        return (weights.unsqueeze(-2) @ value.to(query.dtype)).squeeze(-2), weights

    def placed(self, weights: Tensor, nodes: NextNodes, part: slice, width: int) -> Tensor:
        """Return the weights of some tokens in the columns of their nodes, [B, H, N, 1 + X] → [B, H, N, 2K]."""
        read, is_span = nodes.read[:, part], torch.arange(nodes.read.shape[2], device=weights.device)
        columns = 2 * read + (is_span >= nodes.num_tokens)
        own = nodes.own[part].expand(len(read), -1).unsqueeze(-1)
        index = torch.cat((2 * own, columns), -1).unsqueeze(1).expand_as(weights)
        return weights.new_zeros(*weights.shape[:3], 2 * width).scatter_add(3, index, weights)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Refuse, because the engine computes attention between nodes, not between tokens.

        Raises:
            UnsupportedBackendError: always; it gives the number of pairs and the call of `explain` that works.
        """
        pattern, nodes = self.config.pattern, 2 * num_keys
        pairs = pattern.resolve(nodes).num_pairs(nodes, nodes)
        raise UnsupportedBackendError(
            f"A layer of a BP-Transformer attends to nodes: {num_keys:,} tokens and the same number of spans. A head "
            f"computes {pairs:,} pairs (full attention computes {num_keys**2:,}). For details, call "
            f"explain(model.config.pattern, query_tokens={nodes})."
        )


def write_spans(held: Tensor, new: Tensor, columns: Tensor, is_new: Tensor) -> None:
    """Write the keys or values of new spans to their columns, in place, [B, H, K, D] and [B, H, C, D]."""
    is_step = held.device.type != "cpu" and columns.shape[1] <= FEW_COLUMNS
    if not (torch.compiler.is_compiling() or is_step):
        rows, places = is_new.nonzero().unbind(1)
        held[rows, :, columns[rows, places]] = new[rows, :, places]
        return
    # one at a time, because spans that do not exist may have the column of a span that does
    for place in range(columns.shape[1]):
        index = columns[:, None, place : place + 1, None].expand(-1, held.shape[1], -1, held.shape[3])
        kept = torch.where(
            is_new[:, None, place : place + 1, None], new[:, :, place : place + 1], held.gather(2, index)
        )
        held.scatter_(2, index, kept)


def check_layer(cache: Cache, layer_idx: int) -> None:
    """Raise UnsupportedBackendError if a layer of a cache cannot hold spans."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise UnsupportedBackendError(
            f"The cache has layers of type {type(layer).__name__}, in which a BP-Transformer cannot write spans. "
            "Generate with the default cache or a static one."
        )


# A layer of a BP-Transformer: attention over nodes, then an MLP, each followed by a norm.


class BPLayer(Block):
    """One update of tokens and spans. [B, T, hidden_size] and [B, S, hidden_size] → the same.

    is_causal: whether tokens attend only to their left; None: the config decides.
    """

    def __init__(self, config: Any, layer_idx: int, is_causal: bool | None = None) -> None:
        super().__init__(config, TreeAttention(config, layer_idx, is_causal))

    def forward(
        self, tokens: Tensor, spans: Tensor, nodes: WholeTree | NextNodes, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        states, num_tokens = self.feed(self.read(tokens, spans, nodes, **kwargs)), tokens.shape[1]
        return states[:, :num_tokens], states[:, num_tokens:]

    def read(self, tokens: Tensor, spans: Tensor, nodes: WholeTree | NextNodes, **kwargs: Any) -> Tensor:
        """Return the states of tokens and spans after attention to their nodes, [B, T + S, hidden_size]."""
        attended, _ = self.self_attn(tokens, spans, nodes, **kwargs)
        return self.after(torch.cat((tokens, spans), 1), torch.cat(attended, 1), self.attention_norm)


class BPCrossLayer(BPLayer):
    """One update of tokens and spans in which tokens also attend to tokens outside of their tree, those of a source.

    Shapes: [B, T, hidden_size] and [B, S, hidden_size] → the same. Spans have no cross-attention and no norm after it:
    what their tokens take from the source reaches them in the next layer.
    """

    def __init__(self, config: Any, layer_idx: int, is_causal: bool | None = None) -> None:
        super().__init__(config, layer_idx, is_causal)
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_norm = build_norm(config)

    # positional, because reentrant checkpointing returns gradients for positional arguments only
    def forward(
        self,
        tokens: Tensor,
        spans: Tensor,
        nodes: WholeTree | NextNodes,
        encoder_hidden_states: Tensor,
        source: TokenMask = NO_MASK,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = tokens.shape[1]
        own_cache = None if cache is None else cache.self_attention_cache
        states = self.read(tokens, spans, nodes, cache=own_cache, **kwargs)
        # contiguous, because torch multiplies slices by frozen and by trainable weights in kernels that round
        # differently: the outputs of an adapter would differ between training and loading
        tokens, read = states[:, :num_tokens].contiguous(), encoder_hidden_states.contiguous()
        attended, _ = self.cross_attn(tokens, read, source, cache, **kwargs)
        tokens = self.after(tokens, attended, self.cross_norm)
        states = self.feed(torch.cat((tokens, states[:, num_tokens:]), 1))
        return states[:, :num_tokens], states[:, num_tokens:]
