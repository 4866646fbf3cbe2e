"""The layer of the sparse Transformer and of sparse encoders: multi-head attention that follows a pattern, and an MLP.

Sources: Beltagy et al., "Longformer" (arXiv:2004.05150); Zaheer et al., "BigBird" (arXiv:2007.14062).
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.layer import attend_layer, selected_rows
from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.integration.indexer import indexed_selected_keys, with_earlier_keys
from hf_efficient_attn.integration.layer_patterns import layer_pattern
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.operator_args import read_pattern_text, to_text
from hf_efficient_attn.layout.score_terms import Label
from hf_efficient_attn.layout.token_locations import last_positions, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import BACKEND_OF_IMPLEMENTATION
from hf_efficient_attn.models.global_tokens.global_attention import (
    GlobalAttention,
    GlobalRows,
    keys_of_text,
    read_together,
)
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import Block, append_to_cache, check_cached
from hf_efficient_attn.models.parts.embeddings import rotate, rotate_both
from hf_efficient_attn.models.parts.relative_positions import RelativePositions, reach_groups, reach_of
from hf_efficient_attn.models.sparse.inputs import NO_GLOBALS, SparseInputs, known_globals
from hf_efficient_attn.patterns.bands import Full
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

# Results about patterns that modules compute once in Python, because a compiler cannot trace the algebra of patterns.


_results: BoundedCache[Any] = BoundedCache(SMALL_BYTES)


def remembered(module: nn.Module, build: Callable[..., Any], pattern: Pattern, *arguments: Hashable) -> Any:
    """Return `build(pattern, *arguments)`, computed once per module.

    A compiler does not trace `build`, and treats its result as a constant.
    """
    if not torch.compiler.is_compiling():
        return _build(build, pattern, *arguments)
    name = f"_{build.__name__}"
    # the pattern is passed as text; writing it is traced, so that the graph is guarded by the pattern's fields
    run_untraced(_keep, module, name, build, to_text(pattern), *arguments)
    # not from __dict__, because the compiler may hold an older copy of it
    return getattr(module, name)


def _build(build: Callable[..., Any], *arguments: Hashable) -> Any:
    return _results.get((build, arguments), lambda: build(*arguments))


def _keep(module: nn.Module, name: str, build: Callable[..., Any], text: str, *arguments: Hashable) -> None:
    module.__dict__[name] = _build(build, read_pattern_text(text), *arguments)


# BigBird as transformers evaluates it: in eval mode each random block is replaced by a copy of block 0.
#
# The paper and the authors' code attend to the same random blocks in training and evaluation. This variant is for
# checkpoints that must give the same logits as in transformers: `random_blocks_in_eval="transformers"`.


def repeat_first_block(
    block_tokens: int, num_random: int, query: Tensor, key: Tensor, scale: float, tokens: TokenMask
) -> tuple[Tensor, Tensor]:
    """Return queries and keys that count block 0 once more for each random block of a row, instead of random blocks.

    A key that occurs r more times in a softmax has log(1 + r) added to its score. An extra dimension adds this: it is
    1 in the queries outside the first and the last block, and log(1 + r) / scale in the keys of block 0.
    Shapes: query [B, H, T, D], key [B, H, K, D] → the same with D + 1.

    tokens: blocks are counted from the first real token of a document to its last, as in the pattern; transformers
        counts padding as well.
    """
    locations = token_locations(tokens, key.shape[2], key.device)
    block, last = locations.positions // block_tokens, last_positions(locations) // block_tokens
    is_sparse = (block > 0) & (block < last)
    bonus = (block == 0) * (math.log(1 + num_random) / scale)
    wide_query, wide_key = (
        torch.cat((states, column.to(states.dtype)[:, None, :, None].expand(*states.shape[:3], 1)), -1)
        for states, column in ((query, is_sparse[:, -query.shape[2] :]), (key, bonus))
    )
    return wide_query, wide_key


def check_packing(full_attention_up_to: int | None, documents: Tensor | None, tokens: int) -> None:
    """Refuse packed documents in a row that is too long for full attention, which short documents would have alone.

    documents: [B, T], as `find_documents` returns them.

    Raises:
        InputError: packed documents in a row of more than `full_attention_up_to` tokens.
    """
    if full_attention_up_to is None or documents is None or tokens <= full_attention_up_to:
        return
    message = (
        f"full_attention_up_to={full_attention_up_to} applies to whole rows, but position_ids pack several documents "
        "into a longer row: a short document would be computed differently than in its own row. Pass one document per "
        "row, or set config.full_attention_up_to to None."
    )
    if not is_tracing(documents):
        raise InputError(message)
    # while tracing, `documents` is always a tensor, perhaps with one document per row
    torch._assert_async((documents == 0).all(), message)


def split_random(pattern: Pattern) -> tuple[Pattern, int, int]:
    """Return the part of a union that is not random, the block length in tokens, and the random blocks per row.

    >>> from hf_efficient_attn.patterns.big_bird import bigbird
    >>> split_random(bigbird(block_tokens=16, num_random_blocks=2))[1:]
    (16, 2)

    Raises:
        ConfigurationError: the random parts are not blocks of one length joined to the rest by `|`.
    """
    members = pattern.members()
    rest = [member for member in members if not member.is_random]
    drawn = [member for member in members if member.is_random]
    if not rest or not drawn:
        return pattern, 1, 0
    blocks = [member.drawn_blocks() for member in drawn]
    known = [found for found in blocks if found is not None]
    lengths = {found.block_tokens for found in known}
    if len(known) < len(blocks) or len(lengths) > 1:
        raise ConfigurationError(
            "random_blocks_in_eval='transformers' needs random blocks of one length that are joined to the rest of a "
            f"pattern by `|`, but attention_pattern is {shown(pattern.to_dict())}. Set random_blocks_in_eval='fixed'."
        )
    return reduce(or_, rest), lengths.pop(), sum(found.num_blocks for found in known)


class SparseAttention(MultiHeadAttention):
    """Attention over the keys that the layer's pattern and the global tokens allow. [B, T, hidden_size] → the same.

    The decoder of an encoder-decoder (`is_decoder`) is causal and has neither global tokens nor relative positions.

    Reads from the config: `hidden_size`, `num_attention_heads`, `key_value_heads`, `head_dim`, `attention_bias`,
    `attention_output_bias`, `attention_dropout`, `attention_pattern`, `is_causal`, `global_projections`,
    `random_blocks_in_eval`, `full_attention_up_to`, `position_embedding_type`, and `rope_theta_per_layer`.
    """

    # the implementations that attend to the keys that an indexer (`index`) selects
    index_implementations = tuple(BACKEND_OF_IMPLEMENTATION)

    def __init__(self, config: Any, layer_idx: int, is_decoder: bool = False) -> None:
        super().__init__(config, layer_idx, is_causal=is_decoder or config.is_causal)
        self.is_decoder = is_decoder
        self.make_maps(config.key_value_heads * self.head_dim)
        self.global_attention = None
        if config.global_projections and not is_decoder:
            maps = (self.q_proj, self.k_proj, self.v_proj)
            self.global_attention = GlobalAttention(*maps, self.num_heads, config.attention_dropout)
        is_relative = config.position_embedding_type == "relative" and not is_decoder
        self.relative = RelativePositions(config) if is_relative else None

    def forward(
        self,
        hidden_states: Tensor,
        inputs: SparseInputs = NO_GLOBALS,
        position_embeddings: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, K], else None.

        position_embeddings: cosines and sines of rotary positions, or a dict of them by theta.
        """
        query, key, value = self._states(hidden_states)
        rotation = self._rotation(position_embeddings)
        if rotation is not None:
            query, key = rotate_both(query, key, *rotation)
        cached_globals = None
        if cache is not None:
            key, value, cached_globals = self._update(cache, hidden_states, key, value, rotation)
        query, key = self._compared(query, key, kwargs)
        shards, global_mask = shards_of(self), inputs.token_mask.global_mask
        num_keys = keys_of_text(shards, key, inputs.token_mask)
        check_global_mask(global_mask, num_keys)
        layer_spec = replace(self._layer_spec(inputs.global_positions, num_keys), shards=shards)
        layer_spec = layer_spec if global_mask is None else layer_spec.with_globals
        masks = (inputs.token_mask, inputs.query_offset)
        layer_spec, key, value, masks, kwargs = with_earlier_keys(self, layer_spec, key, value, masks, kwargs)
        where = (*masks, inputs.matrix, query, key, self.scaling, None)
        options = {**self.engine_options(inputs, kwargs), "tokens": masks[0], "query_offset": masks[1]}
        options |= {"scale": self.scaling, "chosen": indexed_selected_keys(self, kwargs, layer_spec, *where)}
        if self.relative is not None:
            out, weights = self._attend_relative(query, key, value, layer_spec, options)
        else:
            out, weights = self._attend(query, key, value, layer_spec, options)
        out = self.o_proj(out.flatten(2))
        if inputs.global_rows is not None:
            return self._with_rows(out, weights, hidden_states, inputs.global_rows, rotation, cached_globals)
        return out, weights

    def _with_rows(
        self,
        out: Tensor,
        weights: Tensor | None,
        hidden_states: Tensor,
        rows: GlobalRows,
        rotation: tuple[Tensor, Tensor] | None,
        cached: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights with the rows of global tokens replaced; these have their own projections."""
        shards = shards_of(self)
        if shards is not None:
            read, rows = read_together(self.global_attention, hidden_states, rows, rotation, shards)
            return replace_rows(out, rows, self.o_proj(read.flatten(2)), 1), None
        read, read_weights = self.global_attention(hidden_states, rows, rotation, cached)
        # after o_proj, which keeps its input for the backward pass: replacing rows before it would keep a second copy
        out = replace_rows(out, rows, self.o_proj(read.flatten(2)), 1)
        if weights is not None:
            chosen = selected_rows()
            rows = rows if chosen is None else rows.among(chosen)
            weights = replace_rows(weights, rows, read_weights, 2)
        return out, weights

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what this layer asks the engine for, for texts of `num_keys` tokens in a model with this task."""
        chosen, notes = ((), ()) if self.is_decoder else known_globals(self.config, task, num_keys)
        layer_spec = self._layer_spec(chosen, num_keys)
        if not self.training:
            layer_spec = self._in_evaluation(layer_spec)[0]
        labels: tuple[Label, ...] = ()
        if self.relative is not None:
            reach = (self.config.max_position_embeddings, self.num_heads)
            labels = (reach_of(layer_spec.pattern, *reach),)
        if self.global_attention is not None:
            notes = (*notes, "Rows of global tokens have their own projections, and are computed in addition.")
        own = {"labels": labels, "notes": notes, "sends_more": self.global_attention is not None}
        return self.request(layer_spec, num_key_heads=self.config.key_value_heads, **own)

    def _states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of new tokens, [B, heads, T, head_dim] each."""
        query, key, value = (self.heads(each(hidden_states)) for each in (self.q_proj, self.k_proj, self.v_proj))
        return query, key, value

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the queries and all keys whose products are the scores; a subclass may change them.

        kwargs: the keyword arguments of `forward` that only the family has.
        """
        return query, key

    def _rotation(self, position_embeddings: Any) -> tuple[Tensor, Tensor] | None:
        if isinstance(position_embeddings, dict):
            return position_embeddings[self.config.rope_theta_per_layer[self.layer_idx]]
        return position_embeddings

    def _update(
        self, cache: Cache, hidden_states: Tensor, key: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return the keys and values of all tokens, and those of the global projections, cached as additional heads."""
        if self.global_attention is None:
            return *append_to_cache(cache, key, value, self.layer_idx), None
        own, (global_key, global_value) = key.shape[1], self.global_attention.keys_and_values(hidden_states)
        if rotation is not None:
            global_key = rotate(global_key, *rotation)
        why = f"{own + global_key.shape[1]} heads: with global_projections=True, global tokens have their own keys"
        check_cached(cache, self.layer_idx, why, (own + global_key.shape[1], None))
        states = torch.cat((key, global_key), 1), torch.cat((value, global_value), 1)
        key, value = append_to_cache(cache, *states, self.layer_idx)
        return key[:, :own], value[:, :own], (key[:, own:], value[:, own:])

    def _layer_spec(self, global_positions: tuple[int, ...], num_keys: int) -> LayerPattern:
        """Return what this layer computes: its pattern, joined with the global tokens that all examples share."""
        layer_spec = layer_pattern(self, {"is_causal": self.is_causal})
        limit = self.config.full_attention_up_to
        if limit is not None and num_keys <= limit and not self.is_causal:
            return LayerPattern(Full(), attends_to_all=True)
        if not global_positions or layer_spec.attends_to_all:
            return layer_spec
        # rows of global tokens with global projections are computed separately
        joined = remembered(
            self, join_globals, layer_spec.pattern, global_positions, self.global_attention is None, self.is_causal
        )
        return replace(layer_spec, pattern=joined, is_own=False)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer_spec: LayerPattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if not self.training:
            layer_spec, blocks = self._in_evaluation(layer_spec)
            if blocks is not None:
                query, key = repeat_first_block(*blocks, query, key, self.scaling, options["tokens"])
        return attend_layer(query, key, value, layer_spec, **options)

    def _in_evaluation(self, layer_spec: LayerPattern) -> tuple[LayerPattern, tuple[int, int] | None]:
        """Return what the layer follows in evaluation, and (block_tokens, number) of the replaced random blocks."""
        is_replaced = self.config.random_blocks_in_eval == "transformers"
        if not is_replaced or layer_spec.is_causal or layer_spec.attends_to_all:
            return layer_spec, None
        rest, *blocks = remembered(self, split_random, layer_spec.pattern)
        return (layer_spec, None) if rest == layer_spec.pattern else (replace(layer_spec, pattern=rest), (*blocks,))

    def _attend_relative(
        self, query: Tensor, key: Tensor, value: Tensor, layer_spec: LayerPattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with relative positions, one group of heads at a time, because each group needs other distances."""
        groups = remembered(self, reach_groups, layer_spec.pattern, self.config.max_position_embeddings, self.num_heads)
        num_keys = keys_of_text(layer_spec.shards, key, options["tokens"])
        query, terms = self.relative(query, groups, num_keys, self.scaling)
        key, value = (states.repeat_interleave(self.num_heads // states.shape[1], 1) for states in (key, value))
        parts = []
        for group, term in zip(groups, terms, strict=True):
            states = (each[:, group.heads] for each in (query, key, value))
            parts.append(
                self._attend(*states, replace(layer_spec, pattern=group.pattern), {**options, "terms": (term,)})
            )
        outs, weights = zip(*parts, strict=True)
        return torch.cat(outs, 2), None if weights[0] is None else torch.cat(weights, 1)


def check_global_mask(global_mask: Tensor | None, num_keys: int) -> None:
    """Raise InputError if the mask of global tokens does not cover exactly the keys of the cache."""
    if global_mask is not None and global_mask.shape[1] != num_keys:
        raise InputError(
            f"The global tokens are selected among {global_mask.shape[1]} keys, but the cache holds {num_keys}. "
            "Generate with the default cache, which keeps all keys."
        )


def join_globals(pattern: Pattern, positions: tuple[int, ...], attends_to_all: bool, is_causal: bool) -> Pattern:
    """Return the pattern joined with global tokens, in its causal form if `is_causal`.

    attends_to_all: whether global tokens also attend to everything; every token attends to them in any case.
    """
    joined = pattern | GlobalTokens(positions, attends_to_all=attends_to_all)
    return joined.causal() if is_causal else joined


def replace_rows(states: Tensor, rows: GlobalRows, new: Tensor, axis: int) -> Tensor:
    """Return `states` with the rows of global tokens, which lie on `axis`, replaced.

    Shapes: states [B, T, hidden_size] (axis 1) or [B, H, T, K] (axis 2); new, the same with X instead of T.
    """
    shape = [-1 if dim == axis else 1 for dim in range(states.ndim)]
    shape[0] = states.shape[0]
    index = rows.index.view(shape).expand(new.shape)
    found = torch.where(rows.is_global.view(shape), new.to(states.dtype), 0)
    # indices of rows that are not global tokens may repeat; they add 0
    return torch.where(rows.is_row.view(shape), torch.zeros_like(states).scatter_add(axis, index, found), states)


# The block of a sparse Transformer: attention and MLP, each with a skip and a norm after it (BERT) or before it.


class SparseLayer(Block):
    """One block. Shapes: [B, T, hidden_size] → the same.

    attention: a module that returns its output first; None: `SparseAttention`.
    """

    def __init__(self, config: Any, layer_idx: int, is_gated: bool = False, attention: nn.Module | None = None) -> None:
        attention = SparseAttention(config, layer_idx) if attention is None else attention
        super().__init__(config, attention, is_gated, has_first_norm=has_first_norm(config, layer_idx))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(self.before(hidden_states, self.attention_norm), **kwargs)
        return self.feed(self.after(hidden_states, attended, self.attention_norm))


def has_first_norm(config: Any, layer_idx: int) -> bool:
    """Return whether the attention of a layer has a norm; pre-norm models may leave out that of the first layer."""
    return config.norm_position != "pre" or layer_idx > 0 or bool(config.norm_before_first_layer)
