"""A BP-Transformer node by node, in plain loops, from the edges of the authors' builder and the specification."""

from collections.abc import Sequence
from typing import Any

import torch
from patterns.tree_by_pointers import build
from torch import Tensor
from torch.nn.functional import layer_norm

Weights = dict[str, Tensor]


def tree_by_nodes(config: Any, weights: Weights, embedded: Tensor, real: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return the last states of the tokens, [T, hidden_size], and that of the root, in evaluation.

    Args:
        weights: of a `BPTransformerModel`, by name.
        embedded: the embeddings, [T, hidden_size].
        real: which tokens are read.
    """
    num_tokens, k = len(embedded), config.num_nodes
    labels = build(num_tokens, k, config.is_causal, "fixed")
    num_nodes = 1 + max(query for query, _ in labels)
    members = {node: [key for query, key in labels if query == node and key < num_tokens] for node in range(num_nodes)}
    exists = [
        real[node] if node < num_tokens else any(real[token] for token in members[node]) for node in range(num_nodes)
    ]
    first = layer_norm(
        embedded, embedded.shape[1:], weights["embedding_norm.weight"], weights["embedding_norm.bias"], config.norm_eps
    )
    states = torch.cat((first, first.new_zeros(num_nodes - num_tokens, first.shape[1])))
    for layer in range(config.num_hidden_layers):
        own = {name.removeprefix(f"layers.{layer}."): each for name, each in weights.items()}
        states = update(config, own, states, labels, exists)
    return states[:num_tokens], states[-1]


def update(config: Any, own: Weights, states: Tensor, labels: dict[tuple[int, int], int], exists: list[bool]) -> Tensor:
    """Return the states of all nodes after one layer, all at once."""
    per_level, clip = 2 * config.num_nodes + 1, config.clip_distance
    shape = (len(states), config.num_attention_heads, config.head_dim)
    query, key, value = (
        torch.nn.functional.linear(states, own[f"self_attn.{name}_proj.weight"]).view(shape) for name in "qkv"
    )
    rows = []
    for node in range(len(states)):
        read = [other for reader, other in labels if reader == node and exists[other]]
        if not read:
            rows.append(torch.zeros_like(states[0]))
            continue
        scores = torch.einsum("hd,khd->hk", query[node], key[read])
        if "self_attn.relations.weight" in own:
            numbers = [labels[node, other] for other in read]
            table = [min(number // per_level, clip) * per_level + number % per_level for number in numbers]
            scores = scores + query[node] @ own["self_attn.relations.weight"][table].T
        shares = (scores * config.head_dim**-0.5).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", shares, value[read]).flatten())
    states = states + torch.stack(rows) @ own["self_attn.o_proj.weight"].T
    states = normed(config, own, "attention_norm", states)
    inner = torch.relu(states @ own["mlp.up_proj.weight"].T + own["mlp.up_proj.bias"])
    return normed(config, own, "mlp_norm", states + inner @ own["mlp.down_proj.weight"].T + own["mlp.down_proj.bias"])


def normed(config: Any, own: Weights, name: str, states: Tensor) -> Tensor:
    """Return the states behind a norm."""
    return layer_norm(states, states.shape[1:], own[f"{name}.weight"], own[f"{name}.bias"], config.norm_eps)
