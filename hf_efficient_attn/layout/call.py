"""AttentionCall: one call of attention as one value, everything about it but the numbers in q, k and v."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask


@dataclass(frozen=True)
class Inputs:
    """What q, k and v are like: all that a backend has to know of them before it says whether it can compute a call.

    Attributes:
        device: type of the device, such as "cpu" or "cuda".
        head_dim, value_dim: width of a query and key, and of a value.
        num_key_heads: heads of k and v, which divide the query heads.
        needs_grad: gradients will be asked for, of any of them or of a term.
        is_compiling: the call is being traced by `torch.compile` or `torch.export`.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    num_key_heads: int
    batch_size: int
    needs_grad: bool = False
    is_compiling: bool = False


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention, from the layer to the kernel.

    Attributes:
        layout: the pattern over queries, keys and heads.
        inputs: what q, k and v are like.
        tokens: what differs between examples: padding, documents, chosen global tokens.
        terms: learned parts of the scores.
        sinks: a logit for each of these heads, [heads], which every row's softmax counts beside its keys; not scaled.
        softcap: bound c of the scaled scores, c · tanh(score / c), before terms are added.
        scale: factor of the scores, before they are capped and terms are added.
        dropout: probability with which a weight is dropped.
        query_start: position of the first query as an integer tensor, in the place of the layout's `query_offset`; only
            while compiling, where its value is not known.
    """

    layout: Layout
    inputs: Inputs
    tokens: TokenMask = NO_MASK
    terms: tuple[Term, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    dropout: float = 0.0
    query_start: Tensor | None = None

    @property
    def masked_queries(self) -> Tensor | None:
        """The masked queries, bool [batch, 1, queries, 1]; None: there are none."""
        mask = self.tokens.query_mask if self.layout.is_cross else self.tokens.key_mask
        return None if mask is None else ~mask[:, None, self.layout.queries, None]


def inputs_of(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Inputs:
    """Return what q [B, H, Nq, D], k [B, Hkv, Nk, D] and v [B, Hkv, Nk, Dv] are like.

    learned: tensors that are part of the scores.
    """
    return Inputs(
        device=q.device.type,
        dtype=q.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        num_key_heads=k.shape[1],
        batch_size=q.shape[0],
        needs_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v, *learned)),
        is_compiling=torch.compiler.is_compiling(),
    )
