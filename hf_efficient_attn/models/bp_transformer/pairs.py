"""The roots of the trees of a row, and its two sentences where it has a pair."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.tree.nodes import NextNodes, WholeTree, roots_of


@dataclass(frozen=True)
class Sentences:
    """The two sentences of each row.

    Attributes:
        own: which real tokens each has, bool [B, 2, T].
        other: which tokens a token reads across: those of the sentence that it is not of.
    """

    own: Tensor
    other: TokenMask


def sentences_of(types: Tensor, nodes: Any) -> Sentences:
    """Return the sentences of rows whose tokens have these types, 0 or 1, [B, T]."""
    mask = nodes.mask.key_mask
    real = torch.ones_like(types, dtype=torch.bool) if mask is None else mask[:, ::2]
    own = torch.stack((real & (types == 0), real & (types == 1)), 1)
    of_keys = None if mask is None else real
    return Sentences(own, TokenMask(of_keys, segment_ids=types, query_segment_ids=1 - types))


def check_pieces(types: Tensor, mask: Any) -> None:
    """Raise InputError if the real tokens of a sentence do not all stand together: each has one tree."""
    if torch.compiler.is_compiling() or is_tracing(types):
        return
    numbers = on_host(types)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        # padding is counted to the token before it
        real = on_host(mask) != 0
        index = torch.where(real, torch.arange(numbers.shape[1]), -1).cummax(1).values
        first = real.int().argmax(1, keepdim=True)
        numbers = numbers.gather(1, torch.where(index < 0, first, index))
    changes = (numbers[:, 1:] != numbers[:, :-1]).sum(1)
    if bool((changes > 1).any()):
        row = int((changes > 1).nonzero()[0])
        raise InputError(
            f"token_type_ids of row {row} change {int(changes[row])} times, but each sentence must stand in one piece, "
            "with a tree of its own: pass 0 for all tokens of the one and 1 for all of the other."
        )


def roots_of_rows(
    tokens: Tensor, spans: Tensor, nodes: WholeTree | NextNodes, sentences: Sentences | None
) -> Tensor | None:
    """Return the states of the roots, [B, 1, hidden_size], of two sentences [B, 2, hidden_size]; None: not known."""
    if sentences is not None:
        found = [take_roots(tokens, spans, roots_of(own)) for own in sentences.own.unbind(1)]
        # an empty sentence has no root
        exists = sentences.own.any(2).unsqueeze(-1)
        return torch.where(exists, torch.stack(found, 1), 0)
    roots = nodes.roots if isinstance(nodes, WholeTree) else None
    return None if roots is None else take_roots(tokens, spans, roots)[:, None]


def take_roots(tokens: Tensor, spans: Tensor, roots: Tensor) -> Tensor:
    """Return the states of the roots, [B, T, hidden_size] twice and [B] → [B, hidden_size]."""
    index = (roots >> 1)[:, None, None].expand(-1, 1, tokens.shape[2])
    is_span = (roots % 2 == 1)[:, None]
    return torch.where(is_span, spans.gather(1, index)[:, 0], tokens.gather(1, index)[:, 0])
