"""Which of the allowed pairs are read, and what is added to their scores. It takes memory for all pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.chosen_keys import ChosenKeys
from hf_efficient_attn.layout.chosen.dense_pairs import chosen_pairs
from hf_efficient_attn.layout.dense.additive import close_pairs, term_bias
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask


def read_pairs(
    allowed: Tensor | None,
    terms: Sequence[Term],
    chosen: ChosenKeys | None,
    layout: Layout,
    tokens: TokenMask,
    num_key_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    query_start: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return (pairs, added): the pairs that terms and a choice leave, and finite numbers to add to their scores.

    A term closes pairs by -inf, before keys are chosen: what is chosen then knows which a query can read at all. A key
    that is chosen n times adds log n.

    Args:
        allowed: which pairs the pattern and the masks allow, bool [batch or 1, heads or 1, queries, keys]; None: all.
        dtype: that of log n.
        query_start: as for `allowed_pairs`.
    """
    pairs, added = allowed, term_bias(terms, layout, tokens, device, query_start)
    if added is not None:
        added, pairs = close_pairs(added, pairs)
    if chosen is None:
        return pairs, added
    pairs, counts = chosen_pairs(chosen, pairs, layout, tokens, num_key_heads, query_start)
    repeats = counts.to(dtype).log()
    return pairs, repeats if added is None else added + repeats
