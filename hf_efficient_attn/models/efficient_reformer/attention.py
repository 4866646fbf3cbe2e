"""The two kinds of attention of a Reformer: within hash buckets, and within chunks of neighbouring tokens."""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.layer import attend_layer, readable_keys
from hf_efficient_attn.layout.grouped_keys import ChunkedOrder
from hf_efficient_attn.models.inputs import NO_INPUTS, LayerInputs
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import append_to_cache
from hf_efficient_attn.models.parts.embeddings import rotate
from hf_efficient_attn.models.parts.memberships import NONE, Membership, record_membership
from hf_efficient_attn.patterns.bands import Band, Full
from hf_efficient_attn.patterns.blocks import Blocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

from .configuration_efficient_reformer import LSH
from .hashing import LSHRule, chunk_order, draw_rotations, hash_vectors


class ReformerAttention(MultiHeadAttention):
    """What both kinds have in common. [B, T, hidden_size] → the same, and the weights [B, H, T, K] or None."""

    def __init__(self, config: Any, layer_idx: int, dropout: float) -> None:
        super().__init__(config, layer_idx, dropout=dropout)
        width = self.num_heads * self.head_dim
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)

    def projected(self, projection: nn.Module, hidden_states: Tensor, rotation: Any) -> Tensor:
        """Return queries or keys of the heads, [B, H, T, D], rotated if positions are."""
        states = self.heads(projection(hidden_states))
        return states if rotation is None else rotate(states, *rotation)

    def layer_spec(self) -> LayerPattern:
        """Return which pairs of positions are allowed in the layer."""
        pattern = self.pattern()
        pattern = pattern.causal() if self.is_causal else pattern
        return LayerPattern(pattern, self.layer_idx, is_own=False, is_causal=self.is_causal)

    def pattern(self) -> Pattern:
        """Return the pattern without causality."""
        raise NotImplementedError

    def layer_request(self, num_keys: int, task: str | None, notes: tuple[str, ...] = ()) -> LayerRequest:
        """Return what this layer asks the engine for at a length in tokens."""
        return self.request(self.layer_spec(), notes=notes)


class LocalAttention(ReformerAttention):
    """Attention within chunks of neighbouring tokens, and to the chunks before and after."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.attention_dropout)
        width = config.num_attention_heads * config.head_dim
        self.q_proj, self.k_proj = (nn.Linear(config.hidden_size, width, bias=config.attention_bias) for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        inputs: LayerInputs = NO_INPUTS,
        position_embeddings: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key = (self.projected(each, hidden_states, position_embeddings) for each in (self.q_proj, self.k_proj))
        value = self.heads(self.v_proj(hidden_states))
        if cache is not None:
            key, value = append_to_cache(cache, key, value, self.layer_idx)
        options = self.engine_options(inputs, kwargs)
        out, weights = attend_layer(query, key, value, self.layer_spec(), scale=self.scaling, **options)
        return self.o_proj(out.flatten(2)), weights

    def pattern(self) -> Pattern:
        config = self.config
        before, after = config.local_num_chunks_before, config.local_num_chunks_after
        read: Pattern = Band(before, after)
        if config.local_wraps and not self.is_causal:
            # chunks near one end of the text, and the chunks at the other end to which they attend
            ends = [([each], range(each - before, 0)) for each in range(before)]
            ends += [([-1 - each], range(after - each)) for each in range(after)]
            for chunk, others in ends:
                read = read | (GlobalTokens(chunk, attended_by_all=False) & GlobalTokens(others, attends_to_all=False))
        return Blocks(read, config.local_attn_chunk_length)


class LSHAttention(ReformerAttention):
    """Attention within hash buckets, with one projection for queries and keys: score = q·k/‖k‖, where k is a query.

    A token attends to itself only if it may attend to nothing else. Gradients flow through scores and values, not
    through hashing. A cache holds values and queries; keys and buckets are computed from the queries.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        own = config.lsh_attention_dropout
        super().__init__(config, layer_idx, config.attention_dropout if own is None else own)
        self.qk_proj = nn.Linear(
            config.hidden_size, config.num_attention_heads * config.head_dim, bias=config.attention_bias
        )
        # by device, the arguments of the rotations in evaluation, and these rotations
        self.fixed: dict[torch.device, tuple[tuple[Any, ...], Tensor]] = {}

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors of the number of buckets; like the number of rounds, they may be changed at any time."""
        return self.config.bucket_factors

    def forward(
        self,
        hidden_states: Tensor,
        inputs: LayerInputs = NO_INPUTS,
        position_embeddings: Any = None,
        cache: Cache | None = None,
        hash_step: Tensor | None = None,
        kept: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, K], else None.

        Args:
            hash_step: the number from which rotations are drawn in training; None: they are fixed.
            kept: the buckets of this call, once they are known; recomputed vectors, not bitwise equal, must not change
                them.
        """
        query = read = self.projected(self.qk_proj, hidden_states, position_embeddings)
        value = self.heads(self.v_proj(hidden_states))
        if cache is not None:
            read, value = append_to_cache(cache, query, value, self.layer_idx)
        kept = {} if kept is None else kept
        if "buckets" not in kept:
            kept["buckets"] = hash_vectors(read, self.rotations(hash_step, read.device), self.factors)
        record_membership(self.layer_idx, lambda: self.membership(kept["buckets"], inputs))
        chosen = self.chosen(kept["buckets"], inputs, query.shape[0])
        options = self.engine_options(inputs, kwargs)
        out, weights = attend_layer(query, read, value, self.layer_spec(), scale=1.0, chosen=chosen, **options)
        return self.o_proj(out.flatten(2)), weights

    def rotations(self, hash_step: Tensor | None, device: torch.device) -> Tensor:
        """Return the rotations of a call, [H, D, r, Σ factors / 2]."""
        config = self.config
        sizes = (config.num_attention_heads, self.head_dim, config.num_hashes, self.factors)
        drawn_from = (*sizes, config.hash_seed or 0, self.layer_idx)
        if hash_step is not None:
            return draw_rotations(*drawn_from, hash_step)
        first = torch.zeros((), dtype=torch.long, device=device)
        if torch.compiler.is_compiling():
            return draw_rotations(*drawn_from, first)
        known = self.fixed.get(device)
        if known is None or known[0] != drawn_from:
            self.fixed[device] = known = (drawn_from, draw_rotations(*drawn_from, first))
        return known[1]

    def chosen(self, buckets: Tensor, inputs: LayerInputs, batch_size: int) -> ChunkedOrder:
        """Return the order in which this call's tokens form chunks."""
        config = self.config
        rule = LSHRule(
            prod(self.factors),
            config.lsh_attn_chunk_length,
            config.lsh_num_chunks_before,
            config.lsh_num_chunks_after,
            config.attend_across_buckets,
            config.count_duplicates,
            config.chunk_by_bucket,
        )
        real = self.real_tokens(inputs, batch_size)
        return replace(chunk_order(buckets, rule, real, inputs.token_mask.segment_ids), unit_keys=True)

    def real_tokens(self, inputs: LayerInputs, batch_size: int) -> Tensor | None:
        """Return which keys are tokens, bool [B, K]; None: all are."""
        return inputs.token_mask.key_mask if inputs.matrix is None else readable_keys(inputs.matrix, batch_size)

    def membership(self, buckets: Tensor, inputs: LayerInputs) -> Membership:
        """Return the buckets [B, H, r, N] of the tokens; buckets of different rounds have different numbers."""
        count = prod(self.factors)
        rounds = count * torch.arange(buckets.shape[2], device=buckets.device)
        numbers = (buckets + rounds[:, None]).transpose(2, 3)
        real = self.real_tokens(inputs, buckets.shape[0])
        numbers = numbers if real is None else torch.where(real[:, None, :, None], numbers, NONE)
        return Membership("bucket", count, numbers, numbers)

    def pattern(self) -> Pattern:
        return Full()

    def layer_request(self, num_keys: int, task: str | None, notes: tuple[str, ...] = ()) -> LayerRequest:
        """Return what this layer asks the engine for at a length in tokens."""
        config = self.config
        chunks = 1 + config.lsh_num_chunks_before + config.lsh_num_chunks_after
        count = min(num_keys, config.num_hashes * config.lsh_attn_chunk_length * chunks)
        note = f"Hashing selects at most {count} keys for each token, depending on the text."
        buckets = torch.empty(
            1, config.num_attention_heads, config.num_hashes, num_keys, dtype=torch.long, device="meta"
        )
        # in each round a token is among its own keys, but attends to itself only if it may attend to nothing else
        most = max(1, config.num_hashes * (config.lsh_attn_chunk_length * chunks - 1))
        chosen = self.chosen(buckets, NO_INPUTS, 1)
        request = super().layer_request(num_keys, task, (*notes, note))
        return replace(request, chosen=chosen, most_keys=most)


def build_attention(config: Any, layer_idx: int) -> ReformerAttention:
    """Return the attention of a layer, as the config says."""
    kind = config.layer_kinds[layer_idx]
    return LSHAttention(config, layer_idx) if kind == LSH else LocalAttention(config, layer_idx)
