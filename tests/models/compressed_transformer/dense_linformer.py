"""A Linformer layer as the specification defines it, head by head in plain loops; no line of the package is used."""

from typing import Any

import torch
from torch import Tensor


def linformer(config: Any, weights: dict[str, Tensor], layer: int, text: Tensor, maps: list[Tensor]) -> Tensor:
    """Return the output of the attention of a layer, [n, hidden_size], for one text of n tokens.

    maps: E and F of each head, each [H, k, n] over the columns that the text uses.
    """
    name, width = f"layers.{layer}.self_attn", config.head_dim
    queries = mapped(weights, f"{name}.q_proj", text)
    out = []
    for head in range(config.num_attention_heads):
        own = slice(head * width, (head + 1) * width)
        read = []
        for which, matrix in zip(("k_proj", "v_proj"), maps, strict=True):
            if config.projection_first:
                read.append(mapped(weights, f"{name}.{which}", matrix[head] @ text)[:, own])
            else:
                read.append(matrix[head] @ mapped(weights, f"{name}.{which}", text)[:, own])
        scores = queries[:, own] @ read[0].T / width**0.5
        out.append(scores.softmax(-1) @ read[1])
    return mapped(weights, f"{name}.o_proj", torch.cat(out, 1))


def matrices(config: Any, weights: dict[str, Tensor], layer: int, tokens: int) -> list[Tensor]:
    """Return E and F of every head of a layer, [H, k, n], from the parameters that its sharing mode has."""
    owner = "shared_maps" if config.projection_sharing == "layerwise" else f"layers.{layer}.self_attn.length_maps"
    heads, found = config.num_attention_heads, []
    for which in (0, 1):
        if config.projection_type == "mean":
            stride = config.max_position_embeddings // config.projected_tokens
            rows = [
                [float(start <= token < start + stride) / min(stride, tokens - start) for token in range(tokens)]
                for start in range(0, tokens, stride)
            ]
            found.append(torch.tensor(rows, dtype=torch.float64).expand(heads, -1, -1))
            continue
        own = ("key", "value")[which] if config.projection_sharing in ("none", "headwise") else "key"
        matrix = weights[f"{owner}.{own}_map"]
        matrix = matrix if config.projection_sharing == "none" else matrix.expand(heads, -1, -1)
        found.append(matrix[:, :, :tokens])
    return found


def mapped(weights: dict[str, Tensor], name: str, states: Tensor) -> Tensor:
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def block(config: Any, weights: dict[str, Tensor], layer: int, text: Tensor, attended: Tensor) -> Tensor:
    """Return the states after a post-norm block with gelu."""
    name = f"layers.{layer}"
    text = normed(config, weights, f"{name}.attention_norm", text + attended)
    inner = mapped(weights, f"{name}.mlp.up_proj", text)
    inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    return normed(config, weights, f"{name}.mlp_norm", text + mapped(weights, f"{name}.mlp.down_proj", inner))


def normed(config: Any, weights: dict[str, Tensor], name: str, states: Tensor) -> Tensor:
    centred = states - states.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    return centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]
