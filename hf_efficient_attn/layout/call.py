"""AttentionCall: everything about one call of attention except q, k and v; attention sinks and soft caps."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hf_efficient_attn.layout.layout import Layout, query_rows
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import DOCUMENT, ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask


@dataclass(frozen=True)
class Inputs:
    """The properties of q, k and v that a backend needs to decide whether it can compute a call.

    Attributes:
        device: the type of the device, such as "cpu" or "cuda".
        head_dim, value_dim: the width of queries and keys, and of values.
        num_key_heads: the number of heads of k and v, which divides the number of query heads.
        needs_grad: whether gradients of any of them, or of a term, will be needed.
        is_compiling: whether `torch.compile` or `torch.export` is tracing the call.
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

    The layout is hashable, so that whatever is compiled from it can be cached. Anything that depends on an example, or
    on the contents of its tokens, is a separate tensor, never part of the layout.

    Attributes:
        layout: the pattern over queries, keys and heads.
        inputs: what q, k and v are like.
        tokens: what differs between examples: padding, documents, chosen global tokens.
        terms: learned parts of the scores.
        sinks: one logit per head, [heads], which the softmax of every row counts as one more key; not scaled.
        softcap: bound c of the scaled scores, c · tanh(score / c), before terms are added.
        scale: factor of the scores, before they are capped and terms are added.
        dropout: probability with which a weight is dropped.
        query_start: position of the first query as an integer tensor, instead of the layout's `query_offset`; only used
            while compiling, when its value is unknown.
        chosen: the keys selected for each query, among those that the pattern and the masks allow; None for all.
        lse_needs_grad: whether the returned log-sum-exp will be differentiated as well.
    """

    layout: Layout
    inputs: Inputs
    # torch before 2.13 cannot trace a class that has an object as a default
    tokens: TokenMask = field(default_factory=TokenMask)
    terms: tuple[Term, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    dropout: float = 0.0
    query_start: Tensor | None = None
    chosen: ChosenKeys | None = None
    lse_needs_grad: bool = False

    @property
    def traits(self) -> Hashable:
        """Everything except the contents of tensors: a backend's cost, memory and refusals depend on nothing else."""
        labels = tuple(term.label for term in self.terms)
        exist = (self.tokens.is_empty, self.sinks is None, self.query_start is None)
        chosen = None if self.chosen is None else self.chosen.traits
        numbers = (self.softcap, self.scale, self.dropout, self.lse_needs_grad)
        return self.layout, self.inputs, labels, exist, *numbers, chosen

    @property
    def differentiates_lse(self) -> bool:
        """Whether the log-sum-exp without sinks has a gradient: its own, or one through the sinks joined to it."""
        return self.lse_needs_grad or (self.sinks is not None and self.inputs.needs_grad)

    @property
    def counts_from_other_documents(self) -> bool:
        """Whether chosen keys are counted from the starts of several documents of another sequence."""
        counts = self.chosen is not None and self.chosen.counted_from == DOCUMENT
        return counts and self.layout.is_cross and self.tokens.segment_ids is not None

    @property
    def masked_queries(self) -> Tensor | None:
        """The masked queries, bool [batch, 1, queries, 1]; None if there is no mask."""
        mask = self.tokens.query_mask if self.layout.is_cross else self.tokens.key_mask
        return None if mask is None else ~mask[:, None, query_rows(self.layout, self.query_start), None]


def inputs_of(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Inputs:
    """Return the properties of q [B, H, Nq, D], k [B, Hkv, Nk, D] and v [B, Hkv, Nk, Dv].

    learned: further tensors that may require gradients, such as the values of terms.
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


# Attention sinks, extra logits in the softmax of every row, and soft caps, which bound scores by tanh.


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(scores / softcap), or the scores if softcap is None. Source: Gemma 2 (arXiv:2408.00118)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of rows whose softmax also counts a sink, which has no value vector.

    out' = out · σ(lse − s) and lse' = log(exp(lse) + exp(s)); a row without keys has lse' = s, and a sink
    of -inf changes nothing. Source: GPT-OSS.

    Args:
        out, lse: the output and log-sum-exp of attention without sinks, [B, H, N, D] and [B, H, N].
        sinks: s, a logit for each head, [H].
    """
    logits = sinks.to(lse.dtype)[:, None]
    # lse is -inf in rows without keys, whose output is 0 anyway; masked, since -inf minus a sink of -inf is NaN
    excess = logits - lse.masked_fill(lse == -torch.inf, 0.0)
    # σ(−excess), in a form whose derivative by autograd is also accurate where the result is near 1
    share = torch.exp(-softplus(excess, threshold=50))
    return out * share[..., None].to(out.dtype), torch.logaddexp(lse, logits)
