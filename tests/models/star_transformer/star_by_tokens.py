"""A star computed token by token in plain loops, as the specification defines it, with gradients.

No line of the package is used: the reference knows a text without padding, and the weights of a model by their names.
"""

from typing import Any

import torch
from torch import Tensor


def star_by_tokens(config: Any, weights: dict[str, Tensor], embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of the tokens [T, hidden_size] and of the relay [hidden_size].

    Args:
        weights: of the backbone, by name.
        embedded: what is read again at every update, [T, hidden_size].
    """
    nodes, relay = embedded, embedded.mean(0)
    if config.relay_init == "learned":
        relay = weights["first_relay.vector"]
    for update in range(config.num_hidden_layers):
        layer = f"layers.{0 if config.share_layers else update}"
        nodes = torch.stack([token(config, weights, layer, i, nodes, embedded, relay) for i in range(len(nodes))])
        relay = relay_of(config, weights, layer, relay, nodes)
    return nodes, relay


def token(
    config: Any, weights: dict[str, Tensor], layer: str, i: int, nodes: Tensor, embedded: Tensor, relay: Tensor
) -> Tensor:
    """Return the new state of token i."""
    is_pre, name, last = config.norm_position == "pre", f"{layer}.self_attn", len(nodes) - 1
    read = normed(config, weights, f"{layer}.attention_norm", nodes) if is_pre else nodes
    context = [read[i], embedded[i], relay]
    nothing = []
    for beside in (i - 1, i + 1):
        if 0 <= beside <= last:
            context.append(read[beside])
        elif config.ring == "closed":
            context.append(read[beside % len(nodes)])
        elif config.ring == "zero_ends":
            nothing.append(torch.zeros(config.num_attention_heads * config.head_dim, dtype=nodes.dtype))
    keys = torch.stack([mapped(weights, f"{name}.k_proj", each) for each in context] + nothing)
    values = torch.stack([mapped(weights, f"{name}.v_proj", each) for each in context] + nothing)
    found = activated(config, attended(config, weights, name, read[i], keys, values))
    return found if is_pre else normed(config, weights, f"{layer}.attention_norm", found)


def relay_of(config: Any, weights: dict[str, Tensor], layer: str, relay: Tensor, nodes: Tensor) -> Tensor:
    """Return the new state of the relay, from the new states of the tokens."""
    name, context = f"{layer}.relay_attn", torch.cat((relay[None], nodes))
    keys, values = (mapped(weights, f"{name}.{each}", context) for each in ("k_proj", "v_proj"))
    found = activated(config, attended(config, weights, name, relay, keys, values))
    return found if config.norm_position == "pre" else normed(config, weights, f"{layer}.relay_norm", found)


def attended(config: Any, weights: dict[str, Tensor], name: str, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return what one query reads in all heads, after the output map."""
    query = mapped(weights, f"{name}.q_proj", query)
    out = []
    for head in range(config.num_attention_heads):
        own = slice(head * config.head_dim, (head + 1) * config.head_dim)
        scores = keys[:, own] @ query[own] / config.head_dim**0.5
        out.append(scores.softmax(0) @ values[:, own])
    return mapped(weights, f"{name}.o_proj", torch.cat(out))


def mapped(weights: dict[str, Tensor], name: str, states: Tensor) -> Tensor:
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def activated(config: Any, states: Tensor) -> Tensor:
    slope = {"relu": 0.0, "leaky_relu": 0.01}[config.hidden_act]
    return torch.where(states > 0, states, slope * states)


def normed(config: Any, weights: dict[str, Tensor], name: str, states: Tensor) -> Tensor:
    centred = states - states.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    return centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]
