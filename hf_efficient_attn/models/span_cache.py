"""A cache for `generate` that holds of each layer only the keys that its heads can still read."""

from typing import Any

from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from hf_efficient_attn.attention.cache import Padding, PatternCache, PatternLayer
from hf_efficient_attn.models.span_config import span_window
from hf_efficient_attn.models.spans import DYNAMIC, span_modules


class SpanCache(PatternCache):
    """As `PatternCache`; a layer keeps as many keys as its longest span with its ramp, a dynamic one the limit.

    Args:
        model: with spans, of any family; they must not change while the cache is in use.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.padding = Padding()
        layers = DynamicCache(config=config).layers
        for spans in span_modules(model):
            layers[spans.layer_idx] = PatternLayer(0, kept_tokens(spans, config), self.padding)
        Cache.__init__(self, layers=layers)


def kept_tokens(spans: Any, config: Any) -> int:
    """Return how many tokens before a query the heads of a layer can read."""
    window = span_window(config)
    longest = window.limit if spans.kind == DYNAMIC else float(spans.head_spans().max())
    return window.num_keys(longest) - 1 + window.shift
