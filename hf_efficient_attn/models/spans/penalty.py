"""The penalty that keeps spans short: λ times the mean span of the heads, summed over layers, added to the loss.

Source: Sukhbaatar et al. (arXiv:1905.07799), section 2.2; the mean is over the heads of a layer, the sum over layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.attention.sharded.sums import SumOfProcesses
from hf_efficient_attn.models.heads.auxiliary_loss import expect_use


def mean_span(spans: Tensor | None, real_tokens: Tensor | None, shards: SequenceShards | None = None) -> Tensor | None:
    """Return the mean of spans [1, H, 1] or [B, H, T] over heads and real tokens, 0-dim; None: there are no spans.

    Args:
        real_tokens: bool [B, T]; None: all.
        shards: the processes that share the texts whose tokens have these spans; None: this one has whole texts.
    """
    if shards is not None and spans is not None:
        own = spans.mean(1)
        counted = torch.ones_like(own) if real_tokens is None else real_tokens.to(own.dtype)
        total, count = SumOfProcesses.apply(torch.stack(((own * counted).sum(), counted.sum())), shards.group)
        return total / count.clamp(min=1)  # type: ignore[no-any-return]
    if spans is None or spans.shape[2] == 1 or real_tokens is None:
        return None if spans is None else spans.mean()
    return (spans.mean(1) * real_tokens).sum() / real_tokens.sum().clamp(min=1)


def span_penalty(model: nn.Module, spans: list[Tensor | None], states: Tensor) -> Tensor | None:
    """Return λ · Σ over layers of the mean span in tokens, 0-dim; None in evaluation and for spans that do not train.

    Args:
        spans: the mean span of every layer; None: it has none.
        states: those behind the last layer; see `expect_use`.
    """
    config: Any = model.config
    trained = [span for span in spans if span is not None]
    if not model.training or not trained or config.frozen_spans is not None:
        return None
    total: Tensor = torch.stack([span.to(trained[0].device) for span in trained]).sum()
    return expect_use(config.span_penalty * total, states, config.span_penalty)
