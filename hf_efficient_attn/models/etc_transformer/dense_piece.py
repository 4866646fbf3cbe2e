"""The pieces of ETC's attention in which all pairs are computed: with masks and labels that say what the text is.

Long texts, and all texts of compiled models, are computed by tiles of queries. A backward pass computes the scores of a
tile again, so that no more than one tile's lie in memory. A layer keeps states, which grow with the tokens; of every
pair with a global token nothing is kept but a bool in each of the tables of `Structure`, once for all layers.

Shapes: B rows, H heads, Q queries, K keys, D head size.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from hf_efficient_attn.layout.tracing import is_exporting

from .dense_operator import added_to_scores, dense_tiles, scores_of, tiles

# what is added to the scores of some keys: the values of labels, [B, H, Q, labels], and the label of each pair,
# [B or 1, 1, Q, keys] of integers, or of bools for two labels
Labelled = tuple[Tensor, Tensor]


def attend_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: tuple[Labelled, ...],
    allowed: Tensor,
    scale: float,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs [B, H, Q, D], log-sum-exps [B, H, Q] and, if they are needed, weights [B, H, Q, K].

    Those of queries without keys are 0, -inf and 0. Softmax and log-sum-exp are computed in float32 or float64.

    Args:
        query, key, value: [B, H, Q, D] and [B, H, K, D].
        added: to the scores, part by part of the keys; empty: nothing.
        allowed: True = the query reads the key; [B or 1, 1, Q, K].
        dropout: of the weights.
    """
    values, labels = ([each[index] for each in added] for index in (0, 1))
    if _is_tiled(query, key) and not need_weights:
        seed = torch.randint(2**62, (), dtype=torch.int64) if dropout > 0.0 else None
        out, lse = dense_tiles(query, key, value, values, labels, allowed, seed, scale, dropout)
        return out, lse, None
    scores, has_keys = scores_of(query, key, added_to_scores(values, labels, slice(None)), allowed, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~has_keys, 0.0)
    lse = torch.where(has_keys[..., 0], lse, -torch.inf)
    return drop(weights, dropout).to(value.dtype) @ value, lse, weights if need_weights else None


def _is_tiled(query: Tensor, key: Tensor) -> bool:
    """Return whether tiles are worth their scores being computed twice, or a compiler does not know."""
    if is_exporting():
        # other runtimes have no such operator
        return False
    return torch.compiler.is_compiling() or len(tiles(query, key)) > 1
