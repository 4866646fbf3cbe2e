"""What spans cost: the figures by which the authors compare models."""

from math import ceil
from typing import Any

from torch import nn

from hf_efficient_attn.models.spans.module import known_spans


def average_span(model: nn.Module) -> float:
    """Return the average span in tokens as the authors report it: per layer ⌈mean span⌉ + ramp, at most the limit.

    Raises:
        InputError: no spans, or offloaded ones.
    """
    spans = known_spans(model)
    per_layer = [min(each.limit, ceil(float(each.head_spans().mean())) + each.ramp) for each in spans]
    return sum(per_layer) / len(per_layer)


def max_span(model: nn.Module) -> int:
    """Return how many keys the head with the longest span reads, ramp included.

    For dynamic spans this is over the heads and tokens of the last forward pass.

    Raises:
        InputError: no spans, or offloaded ones.
    """
    return max(min(each.limit, ceil(float(each.longest_spans().max())) + each.ramp) for each in known_spans(model))


def span_flops(config: Any, span: float) -> float:
    """Return the multiply-adds of one token: L · (4d² + 2·d·d_ff + 2·span·d), with 3·d·d_ff for a gated MLP.

    Encoders read a span on either side: 4·span·d. Simplified blocks have fewer maps than four, and where they subtract
    the mean over the soft mask, the keys are read twice. Not counted, as in the paper's figures: embeddings, norms,
    softmax, the output layer, positions.

    Args:
        span: average span in tokens, ramp included.

    >>> from hf_efficient_attn.models.adaptive_span.configuration_adaptive_span import AdaptiveSpanConfig
    >>> span_flops(AdaptiveSpanConfig.text8_small(), 314)
    41607168

    Source: the paper (arXiv:1905.07799) prints no formula; this one gives the figures of its tables.
    """
    width, inner, num_layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    maps = config.num_attention_maps * width * width + num_layers * (3 if config.gated_mlp else 2) * width * inner
    reads = (1 if config.is_causal else 2) * (2 if getattr(config, "is_centered", False) else 1)
    return maps + num_layers * 2 * reads * span * width  # type: ignore[no-any-return]
