"""A BP-Transformer node by node, in plain loops, from the edges of the authors' builder and the specification."""

from collections.abc import Sequence
from typing import Any

import torch
from patterns.tree_by_pointers import build
from torch import Tensor
from torch.nn.functional import layer_norm

Weights = dict[str, Tensor]


def tree_by_nodes(
    config: Any,
    weights: Weights,
    embedded: Tensor,
    real: Sequence[bool],
    is_causal: bool | None = None,
    source: Tensor | None = None,
    reads: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the last states of the tokens, [T, hidden_size], and that of the root, in evaluation.

    Args:
        weights: of a `BPTransformerModel`, or of a stack of `BPSeq2SeqModel`, by name.
        embedded: the embeddings, [T, hidden_size].
        real: which tokens are read.
        is_causal: None: as the config says.
        source: what tokens read besides, in a decoder, [S, hidden_size].
        reads: the source tokens that each token reads; None: all.
    """
    num_tokens, (states, labels, exists) = len(embedded), first_nodes(config, weights, embedded, real, is_causal)
    for own in layers_of(weights, "layers"):
        states = update(config, own, states, labels, exists, num_tokens, source, reads)
    return states[:num_tokens], states[-1]


def pair_by_nodes(config: Any, weights: Weights, sentences: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the last states of the tokens and of the root of two sentences, of embeddings [T, hidden_size] each."""
    nodes = [first_nodes(config, weights, embedded, [True] * len(embedded), None) for embedded in sentences]
    states, sizes = [first for first, _, _ in nodes], [len(embedded) for embedded in sentences]
    for name in ("layers", "cross_layers"):
        for own in layers_of(weights, name):
            read = [each[:size] for each, size in zip(states, sizes, strict=True)][::-1]
            sources = read if name == "cross_layers" else (None, None)
            states = [
                update(config, own, each, *tree[1:], size, source)
                for each, tree, size, source in zip(states, nodes, sizes, sources, strict=True)
            ]
    return [(each[:size], each[-1]) for each, size in zip(states, sizes, strict=True)]


def first_nodes(
    config: Any, weights: Weights, embedded: Tensor, real: Sequence[bool], is_causal: bool | None
) -> tuple[Tensor, dict[tuple[int, int], int], list[bool]]:
    """Return the nodes before the first layer, the labels of what they read, and which exist."""
    num_tokens, k = len(embedded), config.num_nodes
    labels = build(num_tokens, k, config.is_causal if is_causal is None else is_causal, "fixed")
    num_nodes = 1 + max(query for query, _ in labels)
    members = {node: [key for query, key in labels if query == node and key < num_tokens] for node in range(num_nodes)}
    exists = [
        real[node] if node < num_tokens else any(real[token] for token in members[node]) for node in range(num_nodes)
    ]
    name = "embedding_norm" if "embedding_norm.weight" in weights else "embeddings.norm"
    first = normed(config, weights, name, embedded)
    return torch.cat((first, first.new_zeros(num_nodes - num_tokens, first.shape[1]))), labels, exists


def layers_of(weights: Weights, name: str) -> list[Weights]:
    """Return the weights of each layer of a list, by their names in it."""
    numbers = sorted({int(each.split(".")[1]) for each in weights if each.startswith(f"{name}.")})
    starts = [f"{name}.{number}." for number in numbers]
    return [
        {each.removeprefix(start): weight for each, weight in weights.items() if each.startswith(start)}
        for start in starts
    ]


def update(
    config: Any,
    own: Weights,
    states: Tensor,
    labels: dict[tuple[int, int], int],
    exists: list[bool],
    num_tokens: int,
    source: Tensor | None,
    reads: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the states of all nodes after one layer."""
    states = read_nodes(config, own, states, labels, exists)
    if source is not None:
        every = [range(len(source))] * num_tokens
        read = read_source(config, own, states[:num_tokens], source, every if reads is None else reads)
        states = torch.cat((read, states[num_tokens:]))
    inner = torch.relu(states @ own["mlp.up_proj.weight"].T + own["mlp.up_proj.bias"])
    inner = inner @ own["mlp.down_proj.weight"].T + own["mlp.down_proj.bias"]
    return normed(config, own, "mlp_norm", states + inner)


def read_source(config: Any, own: Weights, states: Tensor, source: Tensor, reads: Sequence[Sequence[int]]) -> Tensor:
    """Return the states of target tokens after each has read its tokens of the source."""
    rows = []
    for state, numbers in zip(states, reads, strict=True):
        heads, read = [], source[list(numbers)]
        for head in range(config.num_attention_heads):
            part = slice(head * config.head_dim, (head + 1) * config.head_dim)
            query, key, value = (own[f"cross_attn.{name}_proj.weight"][part] for name in "qkv")
            shares = ((read @ key.T) @ (query @ state) * config.head_dim**-0.5).softmax(0)
            heads.append(shares @ (read @ value.T))
        rows.append(own["cross_attn.o_proj.weight"] @ torch.cat(heads))
    return normed(config, own, "cross_norm", states + torch.stack(rows))


def read_nodes(
    config: Any, own: Weights, states: Tensor, labels: dict[tuple[int, int], int], exists: list[bool]
) -> Tensor:
    """Return the states of all nodes after each has read its nodes, all at once."""
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
    return normed(config, own, "attention_norm", states)


def normed(config: Any, own: Weights, name: str, states: Tensor) -> Tensor:
    """Return the states behind a norm."""
    return layer_norm(states, states.shape[1:], own[f"{name}.weight"], own[f"{name}.bias"], config.norm_eps)
