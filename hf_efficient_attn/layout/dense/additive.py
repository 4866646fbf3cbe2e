"""What is added to the scores of all pairs: 0 or -inf of a mask, and learned terms. It takes memory for all pairs."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import BoundedCache
from hf_efficient_attn.layout.dense.cache import CACHE_BYTES, mask_key
from hf_efficient_attn.layout.dense.pairs import allowed_pairs, is_idle
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.query_rows import query_rows
from hf_efficient_attn.layout.terms import Label, Term, look_up
from hf_efficient_attn.layout.token_locations import axis_locations
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask

AdditiveMask = tuple[Tensor | None, Tensor | None]

_masks: BoundedCache[AdditiveMask] = BoundedCache(CACHE_BYTES)
_labels: BoundedCache[Tensor] = BoundedCache(CACHE_BYTES)


def additive_mask(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, dtype: torch.dtype
) -> AdditiveMask:
    """Return (mask, keyless): 0 where a query may read a key and -inf elsewhere, and which queries have no keys.

    The mask is [batch or 1, heads or 1, queries, keys], or None if all may read all. Its rows of queries without keys
    are 0, so that no kernel takes the softmax of nothing. `keyless` is bool [batch or 1, heads or 1, queries, 1], or
    None if every query has keys.
    """

    def build() -> AdditiveMask:
        allowed = allowed_pairs(layout, tokens, batch_size, device)
        return (None, None) if allowed is None else additive(allowed, dtype)

    if torch.compiler.is_compiling():
        return build()
    is_whole = is_idle(tokens)
    key = (mask_key(layout, is_whole), device, dtype)
    if is_whole:
        return _masks.get(key, build)
    # the layers of one forward pass share the masks of its examples; the next pass has others
    return _masks.get_of(vars(tokens).values(), key, build)


def additive(allowed: Tensor, dtype: torch.dtype) -> AdditiveMask:
    """Return `additive_mask` of pairs, bool [batch or 1, heads or 1, queries, keys]."""
    keyless = ~allowed.any(-1, keepdim=True)
    # not in place: a compiler does not know that the operator which gives `allowed` without masks makes new memory
    closed = ~(allowed | keyless)
    mask = torch.zeros(closed.shape, dtype=dtype, device=closed.device).masked_fill_(closed, -torch.inf)
    # `any` would have to wait for a GPU, and cannot be evaluated while tracing
    has_keyless = torch.compiler.is_compiling() or keyless.device.type != "cpu" or bool(keyless.any())
    return mask, keyless if has_keyless else None


def term_bias(
    terms: Sequence[Term], layout: Layout, tokens: TokenMask, device: torch.device, query_start: Tensor | None = None
) -> Tensor | None:
    """Return the sum of the terms for every pair, [batch or 1, heads or 1, queries, keys]; None if there is no term.

    query_start: as for `allowed_pairs`.
    """
    if not terms:
        return None
    where = (layout, tokens, device, query_start)
    return reduce(add, (_scores(term, _labels_of(term.label, *where)) for term in terms))


def close_pairs(bias: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the bias of the terms with 0 instead of -inf, and the allowed pairs (None: all) without those of -inf.

    A row in which no pair is left then counts as a row without keys, and its softmax is taken of finite scores.
    """
    is_open = bias != -torch.inf
    return bias.masked_fill(~is_open, 0.0), is_open if allowed is None else allowed & is_open


def _scores(term: Term, labels: Tensor) -> Tensor:
    scores = term.label.score(look_up(term.values, labels), labels)
    return scores.expand(torch.broadcast_shapes(scores.shape, labels.shape))


def _labels_of(
    label: Label, layout: Layout, tokens: TokenMask, device: torch.device, query_start: Tensor | None
) -> Tensor:
    """Return the label of every pair, [batch or 1, 1, queries, keys]; nobody may change it."""
    tokens = NO_MASK if not torch.compiler.is_compiling() and is_idle(tokens) else tokens

    def build() -> Tensor:
        of_queries, of_keys = axis_locations(layout, tokens, device)
        queries = of_queries.positions[:, query_rows(layout, query_start), None]
        keys = of_keys.positions[:, None, :]
        return label.of(queries, keys)[:, None]

    if torch.compiler.is_compiling():
        return build()
    key = (label, layout.num_queries, layout.num_keys, layout.query_offset, layout.is_cross, device)
    if tokens.is_empty:
        return _labels.get(key, build)
    # as masks are shared: by the layers of one forward pass
    return _labels.get_of(vars(tokens).values(), key, build)
