"""The centring term C of shaped attention: the mean of the values a query may attend to.

C is the softmax matrix at equal logits, so C·V is the mean of the values over the allowed keys: a running mean if
causal, the mean of the real tokens if bidirectional, in each packed document. No [T, T] matrix is built unless the
caller passes one as a mask.

Source: He & Hofmann (arXiv:2311.01906), section 4.1, after Noci et al. (arXiv:2306.17759). The paper defines C without
padding; here it is renormalised over the allowed keys, so that A = C at zero logits under any mask.
"""

from typing import NamedTuple

import torch
from torch import nn

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.mechanisms.feature_maps import wide

SCAN_TOKENS = 16


class Centering(NamedTuple):
    """What is needed for the mean over allowed values; computed once per forward pass and shared by all layers.

    Shapes: B batch, T new tokens, K cached and new tokens.
        weights [B, T, 1]: True for a real token, False for padding; None if all are real.
        counts [B or 1, T or 1, 1]: number of keys each query may attend to, at least 1.
        past_weights [B, K - T, 1]: `weights` of cached tokens; None if all are real or nothing is cached.
        bounds ([B, T, 1], [B, T, 1]): first and last token a query sees of its packed document; None if not packed.
        matrix [B, T, K]: C itself, from a mask that the caller passed; the other fields are then unused.
        shared_tokens: how long the texts are that processes share, of which each has some tokens; T is then their
            length. None: this one has whole texts.
    """

    is_causal: bool
    counts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    past_weights: torch.Tensor | None = None
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None
    matrix: torch.Tensor | None = None
    shared_tokens: int | None = None

    def mean(self, values: torch.Tensor, past_sum: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Return C·V.

        Shapes: values [B, T, hidden_size] (with `matrix`: [B, K, hidden_size]), past_sum [B, 1, hidden_size], at least
        in float32 → [B, T, hidden_size], or [B, 1, hidden_size] where all queries share one mean.
        """
        if self.matrix is not None:
            return torch.matmul(self.matrix.to(values.dtype), values)
        weighted = self.weighted(values)
        if self.bounds is not None:
            # document sums are differences of prefix sums: float64 keeps them exact to float32
            total = prefix_sum(weighted.double())
            total = nn.functional.pad(total, (0, 0, 1, 0))
            first, last = (bound.expand_as(values) for bound in self.bounds)
            mean = (total.gather(1, last + 1) - total.gather(1, first)) / self.counts
        elif self.is_causal:
            mean = prefix_mean(wide(weighted), self.counts, past_sum)
        else:
            mean = wide(weighted).sum(1, keepdim=True) / self.counts
        return mean.to(values.dtype)

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values with padding set to zero. Shapes as `values`."""
        return values if self.weights is None else torch.where(self.weights, values, 0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum, in float32 or wider, of the real values. Shape [B, 1, hidden_size]."""
        return wide(self.weighted(values)).sum(1, keepdim=True)

    def sum_past(self, cached: torch.Tensor) -> torch.Tensor:
        """Return the sum, in float32 or wider, of the real cached values.

        Shapes: [B, K - T, hidden_size] → [B, 1, hidden_size].
        """
        if self.past_weights is not None:
            cached = torch.where(self.past_weights, cached[:, : self.past_weights.shape[1]], 0)
        return wide(cached).sum(1, keepdim=True)


def prefix_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the inclusive cumulative sum along dimension 1, in the precision of `x`. Shapes: [B, T, D] → the same."""
    return x.cumsum(1) if _scans_natively(x) else prefix_mean(x, torch.ones_like(x[:1, :, :1]), 0.0)


def prefix_mean(x: torch.Tensor, counts: torch.Tensor, past_sum: torch.Tensor | float) -> torch.Tensor:
    """Return (cumulative sum along dimension 1 + past_sum) / counts, in the precision of `x`.

    On a CPU, `torch.cumsum` along a strided dimension is slow: there, blocks of `SCAN_TOKENS` are averaged by a small
    triangular matrix with the counts folded in, and the totals of the blocks before are added.
    Shapes: x [B, T, D], counts [B or 1, T, 1], past_sum [B, 1, D] → [B, T, D].
    """
    batch, tokens, width = x.shape
    if tokens == 1 and torch.compiler.is_compiling() and x.device.type == "cpu" and torch.is_tensor(past_sum):
        # torch's compiler for CPUs (2.13) fails with KeyError where a norm reads a sum of what is written in the same
        # step, as the running sum of a static cache is, without an operator between (pytorch/pytorch#188228)
        return torch.cat((past_sum, x), 1).cumsum(1)[:, 1:] / counts
    if tokens == 1:
        return (x + past_sum) / counts
    if _scans_natively(x):
        return (x.cumsum(1) + past_sum) / counts
    padding = -tokens % SCAN_TOKENS
    x = nn.functional.pad(x, (0, 0, 0, padding)).view(batch, -1, SCAN_TOKENS, width)
    inverse = nn.functional.pad(counts, (0, 0, 0, padding), value=1.0).reciprocal().to(x.dtype)
    inverse = inverse.view(counts.shape[0], -1, SCAN_TOKENS, 1)
    with torch.autocast("cpu", enabled=False):  # it would round the sums to its own precision
        mean = torch.matmul(inverse * torch.ones(SCAN_TOKENS, SCAN_TOKENS, dtype=x.dtype).tril(), x)
        if tokens > SCAN_TOKENS or torch.is_tensor(past_sum):
            totals = x.sum(2)
            before = prefix_sum(totals) - totals + past_sum
            mean = torch.addcmul(mean, before.unsqueeze(2), inverse)
    return mean.view(batch, -1, width)[:, :tokens]


def _scans_natively(x: torch.Tensor) -> bool:
    # compiled, blocks would tie the graph to one length
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def build_centering(
    tokens: int,
    past_tokens: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: torch.Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> Centering:
    """Return the centring term for one forward.

    Args:
        tokens, past_tokens: lengths of the new and of the cached part.
        attention_mask: None, [B, K or more] (1 = real token) or [B, 1, T, K] (True or 0.0 = allowed).
        documents: [B, T], equal numbers for tokens of one packed document, ascending; None if not packed.
        is_causal, device: those of the model.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return Centering(is_causal, matrix=_matrix(attention_mask))
    if documents is not None:
        return _packed(documents, attention_mask, is_causal)
    if attention_mask is None:
        counts = torch.full((1, 1, 1), tokens, dtype=torch.float32, device=device)
        if is_causal:
            counts = (torch.arange(1, tokens + 1, device=device) + past_tokens).view(1, -1, 1).float()
        return Centering(is_causal, counts)
    mask = attention_mask.to(device).bool().unsqueeze(-1)
    new = torch.arange(tokens, device=device) + past_tokens
    seen = mask.float().cumsum(1).index_select(1, new) if is_causal else mask.float().sum(1, keepdim=True)
    past_weights = mask & (torch.arange(mask.shape[1], device=device) < past_tokens).unsqueeze(-1)
    if isinstance(past_tokens, int):
        past_weights = past_weights[:, :past_tokens]
    return Centering(is_causal, seen.clamp(min=1), mask.index_select(1, new), past_weights)


def _matrix(mask: torch.Tensor) -> torch.Tensor:
    if mask.shape[1] != 1:
        raise InputError(
            f"A 4-D attention_mask of shape {tuple(mask.shape)} has one mask per head, but the centring term is shared "
            "by the heads of a layer. Pass [batch, 1, query_tokens, key_tokens]."
        )
    allowed = (mask if mask.dtype == torch.bool else mask == 0).squeeze(1).float()
    return allowed / allowed.sum(-1, keepdim=True).clamp(min=1)


def _packed(documents: torch.Tensor, attention_mask: torch.Tensor | None, is_causal: bool) -> Centering:
    documents = documents.contiguous()
    first = torch.searchsorted(documents, documents, right=False)
    last = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    if not is_causal:
        last = torch.searchsorted(documents, documents, right=True) - 1
    if attention_mask is None:
        counts, weights = last - first + 1, None
    else:
        weights = attention_mask.to(documents.device).bool()
        real = nn.functional.pad(weights.long().cumsum(1), (1, 0))
        counts, weights = real.gather(1, last + 1) - real.gather(1, first), weights.unsqueeze(-1)
    bounds = (first.unsqueeze(-1), last.unsqueeze(-1))
    return Centering(is_causal, counts.clamp(min=1).unsqueeze(-1).float(), weights, bounds=bounds)
