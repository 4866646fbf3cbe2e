"""The attention of ETC: four pieces under two softmaxes, with labels as learned parts of the scores.

A long token reads a band of long tokens and all global tokens in one softmax; a global token reads all global tokens
and all long tokens in another. The score of query i and key j is

    (qᵢ · (kⱼ + a_label(i, j)) + b_label(i, j)) / √d

with a vector a and a number b per head for each label, in one table for long queries and one for global ones.

The band goes to the engine: labels of distances are a learned term, and its cost is that of the pattern. The other
three pieces have every pair that they can have, n_g · (n_g + 2n) of them, and labels and masks that say what the text
is, not where it stands. They are products of matrices, by tiles. Both pieces of a long token join by their log-sum-exp.

Shapes: B rows, T long tokens, G global tokens, H heads, D head size. Source: Ainslie et al. (arXiv:2004.08483),
section 3.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.joined import join_attention
from hf_efficient_attn.attention.layer_attention import attend_layer
from hf_efficient_attn.attention.layer_patterns import LayerPattern, layer_pattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.model_parts import part_of
from hf_efficient_attn.attention.weight_rows import chosen_rows
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import device_numbers
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.parts.blocks import drop_rate
from hf_efficient_attn.patterns.bands import Band

from .dense_piece import Labelled, attend_pairs
from .labels import LINKED, NOT_LINKED, labels_by_distance
from .structure import Structure

KeysAndValues = tuple[Tensor, Tensor]


class RelativeTable(nn.Module):
    """The vectors and numbers of labels, [labels, heads, head_dim] and [labels, heads]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = (config.relative_vocab_size, config.num_attention_heads)
        self.std = config.relative_std
        self.vectors = nn.Parameter(torch.empty(*size, config.head_dim))
        self.biases = nn.Parameter(torch.empty(size))

    def initialize(self) -> None:
        """Start as the authors do: vectors from a truncated normal distribution, biases as 0."""
        init.trunc_normal_(self.vectors, std=self.std, a=-2 * self.std, b=2 * self.std)
        init.zeros_(self.biases)

    def forward(self, query: Tensor, labels: list[int] | slice, scale: float) -> Tensor:
        """Return what these labels add to the scores of queries, [B, H, N, D] → [B, H, N, labels]."""
        chosen = labels if isinstance(labels, slice) else device_numbers(tuple(labels), query.device, torch.long)
        vectors, biases = self.vectors[chosen], self.biases[chosen]
        products = query @ vectors.permute(1, 2, 0).to(query.dtype)
        return (products + biases.T.unsqueeze(1).to(products.dtype)) * scale


class QuerySide(nn.Module):
    """The maps of the queries of one input, and of the keys and values that they read in it and in the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        names = ["q_proj", "k_proj", "v_proj"]
        # keys of the other input have maps of their own only if nothing is shared
        self.has_others = not (config.share_qkv_projections or config.share_kv_projections)
        for name in names + ["other_k_proj", "other_v_proj"] * self.has_others:
            setattr(self, name, nn.Linear(width, width, bias=config.attention_bias))
        self.head_dim = config.head_dim

    def heads(self, states: Tensor) -> Tensor:
        """Return [B, N, H · D] as [B, H, N, D]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, states: Tensor) -> Tensor:
        """Return the queries of the own input."""
        return self.heads(self.q_proj(states))

    def own(self, states: Tensor) -> KeysAndValues:
        """Return keys and values of the own input."""
        return self.heads(self.k_proj(states)), self.heads(self.v_proj(states))

    def other(self, states: Tensor) -> KeysAndValues:
        """Return keys and values of the other input."""
        if not self.has_others:
            return self.own(states)
        return self.heads(self.other_k_proj(states)), self.heads(self.other_v_proj(states))


class EtcAttention(nn.Module):
    """Long tokens [B, T, hidden_size] and global tokens [B, G, hidden_size] → the same."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.scaling = config, layer_idx, config.head_dim**-0.5
        self.is_causal, self.num_heads = False, config.num_attention_heads
        self.band = Band(config.local_radius, config.local_radius)
        self.long_side = QuerySide(config)
        self.global_side = None if config.share_qkv_projections else QuerySide(config)
        self.o_proj, global_o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_output_bias) if each else None
            for each in (True, not config.share_output_projection)
        )
        self.global_o_proj = global_o_proj
        has_labels = config.relative_vocab_size is not None
        self.long_labels, self.global_labels = (RelativeTable(config) if has_labels else None for _ in range(2))
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self, long: Tensor, globals_: Tensor, structure: Structure, token_mask: TokenMask, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return the long output, its weights [B, H, T, G + T] or None, and the global output, its weights likewise.

        Weights of long tokens are computed with `output_attentions`, densely; those of global tokens then, too, or with
        `output_global_attentions`. In both, global tokens come first.
        """
        side = self.long_side if self.global_side is None else self.global_side
        near, to_global = self.long_side.own(long), self.long_side.other(globals_)
        among, to_long = (to_global, near) if self.global_side is None else (side.own(globals_), side.other(long))
        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        need_global = bool(kwargs.get("output_global_attentions", False)) or need_weights
        query, global_query = self.long_side.queries(long), side.queries(globals_)
        out, weights = self.read_long(query, near, to_global, structure, token_mask, need_weights)
        global_out, global_weights = self.read_all(global_query, among, to_long, structure, need_global)
        global_map = self.o_proj if self.global_o_proj is None else self.global_o_proj
        out, global_out = (each.transpose(1, 2).flatten(2) for each in (out, global_out))
        return self.o_proj(out), weights, global_map(global_out), global_weights

    def read_long(
        self,
        query: Tensor,
        near: KeysAndValues,
        to_global: KeysAndValues,
        structure: Structure,
        token_mask: TokenMask,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what long tokens read, of their band and of all global tokens, and the weights."""
        followed, terms, rate = self.followed(), self.terms(query), drop_rate(self.dropout)
        options: dict[str, Any] = {"scale": self.scaling, "dropout": rate, "backend": backend_of(self.config)}
        masks = {"key_mask": token_mask.key_mask, "segment_ids": token_mask.segment_ids}
        lse_options = {"return_lse": True, "lse_gradient": True}
        where = {"layer": followed.layer, **masks, **options, **lse_options}
        part: Any = attention(query, *near, followed.pattern, terms=terms, **where)
        added = self.of_links(self.long_labels, query, structure.linked)
        dense: dict[str, Any] = {"scale": self.scaling, "dropout": rate, "need_weights": need_weights}
        *other, other_weights = attend_pairs(query, *to_global, added, structure.long_to_global, **dense)
        out, lse = join_attention((part, (other[0], other[1])))
        if not need_weights:
            return out, None
        options["dropout"] = 0.0
        _, weights = attend_layer(query, *near, followed, tokens=token_mask, terms=terms, need_weights=True, **options)
        own_share, share = (
            torch.where(lse > -torch.inf, (each - lse).exp(), 0.0).unsqueeze(-1) for each in (part[1], other[1])
        )
        joined = (other_weights * share).to(query.dtype), own_share.to(query.dtype)
        rows = chosen_rows()
        if rows is not None:
            joined = (joined[0][:, :, list(rows)], joined[1][:, :, list(rows)])
        return out, torch.cat((joined[0], weights * joined[1]), -1)

    def read_all(
        self,
        query: Tensor,
        among: KeysAndValues,
        to_long: KeysAndValues,
        structure: Structure,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what global tokens read, of each other and of the long tokens, and the weights."""
        added = self.of_links(self.global_labels, query, structure.linked.transpose(2, 3))
        if self.global_labels is not None and structure.labels is not None:
            added = ((self.global_labels(query, slice(None), self.scaling), structure.labels), *added)
        key, value = (torch.cat(each, 2) for each in zip(among, to_long, strict=True))
        dense: dict[str, Any] = {
            "scale": self.scaling,
            "dropout": drop_rate(self.dropout),
            "need_weights": need_weights,
        }
        out, _, weights = attend_pairs(query, key, value, added, structure.from_global, **dense)
        return out.to(query.dtype), None if weights is None else weights.to(query.dtype)

    def of_links(self, table: RelativeTable | None, query: Tensor, linked: Tensor) -> tuple[Labelled, ...]:
        """Return what is added to the scores of queries, by whether a global and a long token belong together."""
        if table is None:
            return ()
        first = 2 * self.config.max_relative_distance
        of_links = slice(first + NOT_LINKED, first + LINKED + 1)
        return ((table(query, of_links, self.scaling), linked),)

    def terms(self, query: Tensor) -> tuple[Term, ...]:
        """Return the labels of distances as a learned part of the scores."""
        if self.long_labels is None:
            return ()
        reach = self.config.max_relative_distance
        values = self.long_labels(query, labels_by_distance(reach), self.scaling)
        return (Term(values, Distance(-reach, reach)),)

    def followed(self) -> LayerPattern:
        """Return which long tokens a long token reads: the config's pattern, or the band of the paper."""
        own = layer_pattern(self, {"is_causal": False})
        return replace(own, pattern=self.band, reads_all=False) if own.is_own else own

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what this layer asks the engine for at a length in tokens."""
        config, reach = self.config, self.config.max_relative_distance
        num_global = -(-num_keys // config.chunk_tokens)
        besides = num_global * (num_global + 2 * num_keys)
        return LayerRequest(
            self.followed(),
            config.num_attention_heads,
            config.num_attention_heads,
            config.head_dim,
            config.head_dim,
            config,
            part=part_of(self),
            layer=self.layer_idx,
            labels=() if self.long_labels is None else (Distance(-reach, reach),),
            backend=backend_of(config),
            notes=(
                f"Besides, a head computes {besides:,} pairs with global tokens: {num_global:,} of them, one for every "
                f"{config.chunk_tokens} tokens where a call gives no others.",
            ),
        )
