"""ETC by its formula, one text at a time: all pairs, a label and a mask for each, written from the paper alone.

The score of query i and key j is (qᵢ · (kⱼ + a_label) + b_label) / √d; long queries have one softmax over their band
and all global tokens, global queries one over all tokens. Only the weights are the model's.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Text:
    """A text without padding.

    Attributes:
        ids, global_ids: long and global tokens.
        links: for each long token the numbers of the global tokens to which it belongs.
        contexts: of each global token; empty: all are in one.
        attends_to_all: the global tokens that read everything.
        long_contexts: of each long token, neighbours in one number by number; empty: all are in one.
    """

    ids: list[int]
    global_ids: list[int]
    links: list[set[int]]
    contexts: list[int] = field(default_factory=list)
    attends_to_all: set[int] = field(default_factory=set)
    long_contexts: list[int] = field(default_factory=list)


def chunked(ids: list[int], config: Any) -> Text:
    """Return a text whose global tokens are those of its chunks."""
    links = [{place // config.chunk_tokens} for place in range(len(ids))]
    return Text(ids, [config.global_token_id] * (links[-1].copy().pop() + 1), links)


def distance_label(query: int, key: int, most: int) -> int:
    """Return 0 for the token itself, 1 … k to its right, k + 1 … 2k to its left."""
    offset = key - query
    return min(offset, most) if offset >= 0 else most + min(-offset, most)


def label_of(text: Text, query: int, key: int, most: int) -> int:
    """Return the label of a pair of tokens; global ones come first."""
    num_global = len(text.global_ids)
    if query >= num_global and key >= num_global:
        return distance_label(query - num_global, key - num_global, most)
    if query < num_global and key < num_global:
        is_other = bool(text.contexts) and text.contexts[query] != text.contexts[key]
        return 2 * most + 3 if is_other else distance_label(query, key, most)
    number, token = min(query, key), max(query, key) - num_global
    return 2 * most + 1 + (number in text.links[token])


def may_read(config: Any, text: Text, pattern: Any, query: int, key: int) -> bool:
    """Return whether a token may read another one; global ones come first."""
    num_global = len(text.global_ids)
    if query >= num_global and key >= num_global:
        query, key = query - num_global, key - num_global
        if not text.long_contexts:
            return bool(pattern.allowed(query, key))
        between = text.long_contexts[min(query, key) : max(query, key) + 1]
        start = query
        while start and text.long_contexts[start - 1] == text.long_contexts[query]:
            start -= 1
        # a pattern is that of the context alone
        return len(set(between)) == 1 and bool(pattern.allowed(query - start, key - start))
    if query < num_global and key < num_global:
        return True
    number, token = min(query, key), max(query, key) - num_global
    is_linked = number in text.links[token]
    if query < num_global:
        return not config.hard_global_to_long or is_linked or number in text.attends_to_all
    return not config.hard_long_to_global or is_linked


def dense_layer(layer: Any, states: Tensor, text: Text) -> Tensor:
    """Return the states of global and long tokens [N, hidden_size] after a layer."""
    config, attention = layer.self_attn.config, layer.self_attn
    num_global, size = len(text.global_ids), len(states)
    heads, width = config.num_attention_heads, config.head_dim
    is_global = torch.arange(size) < num_global

    def by_input(states: Tensor, of_global: Any, of_long: Any) -> Tensor:
        return torch.where(is_global[:, None], of_global(states), of_long(states))

    read = by_input(states, layer.global_attention_norm, layer.attention_norm) if layer.is_pre_norm else states
    long_side = attention.long_side
    global_side = long_side if attention.global_side is None else attention.global_side
    # [queries' input][keys' input]; 0 is the global one
    sides, maps = (global_side, long_side), {}
    for mine, side in enumerate(sides):
        for theirs in (0, 1):
            prefix = "other_" if mine != theirs and hasattr(side, "other_k_proj") else ""
            maps[mine, theirs] = [getattr(side, f"{prefix}{name}_proj")(read).view(size, heads, width) for name in "kv"]
    queries = [side.q_proj(read).view(size, heads, width) for side in sides]
    tables = (attention.global_labels, attention.long_labels)
    patterns = attention.layer_spec().pattern.heads(heads)
    out = torch.zeros(size, heads, width, dtype=states.dtype)
    for head in range(heads):
        pattern = patterns[head if len(patterns) > 1 else 0].resolve(len(text.ids), attention.layer_idx, head, heads)
        for i in range(size):
            mine = int(i >= num_global)
            scores, values = [], []
            for j in range(size):
                if not may_read(config, text, pattern, i, j):
                    continue
                key, value = (each[j, head] for each in maps[mine, int(j >= num_global)])
                query, bias = queries[mine][i, head], 0.0
                if tables[mine] is not None:
                    label = label_of(text, i, j, config.max_relative_distance)
                    key, bias = key + tables[mine].vectors[label, head], tables[mine].biases[label, head]
                scores.append((query @ key + bias) / width**0.5)
                values.append(value)
            out[i, head] = torch.stack(scores).softmax(0) @ torch.stack(values)
    joined = out.flatten(1)
    global_map = attention.o_proj if attention.global_o_proj is None else attention.global_o_proj
    states = states + by_input(joined, global_map, attention.o_proj)
    mlps = (layer.mlp if layer.global_mlp is None else layer.global_mlp, layer.mlp)
    mlp_norms = (layer.mlp_norm if layer.global_mlp_norm is None else layer.global_mlp_norm, layer.mlp_norm)
    if layer.is_pre_norm:
        return states + by_input(by_input(states, *mlp_norms), *mlps)
    states = by_input(states, layer.global_attention_norm, layer.attention_norm)
    return by_input(states + by_input(states, *mlps), *mlp_norms)


def dense_etc(model: Any, text: Text) -> tuple[Tensor, Tensor]:
    """Return the last states of long and of global tokens, [T, hidden_size] and [G, hidden_size]."""
    embeddings, num_global = model.embeddings, len(text.global_ids)
    states = model.embed_tokens(torch.tensor([*text.global_ids, *text.ids]))
    if embeddings.token_types is not None:
        types = torch.tensor([0] * num_global + [1] * len(text.ids))
        states = states + embeddings.token_types(types)
    states = torch.cat((embeddings.global_norm(states[:num_global]), embeddings.norm(states[num_global:])))
    for layer in model.layers:
        states = dense_layer(layer, states, text)
    return model.norm(states[num_global:]), model.global_norm(states[:num_global])
