"""A cache for `generate` that holds, for each layer, only the keys that its heads can still read."""

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT, cache_in
from hf_efficient_attn.attention.cache_layers import Padding, PatternLayer
from hf_efficient_attn.models.spans.bounds import SpanBounds
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.module import DYNAMIC, span_modules


class SpanCache(Cache):
    """A cache whose layers keep as many keys as their longest span plus ramp, with dynamic spans up to the limit.

    Args:
        model: of any family, with spans that do not change while the cache is in use.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        layers = DynamicCache(config=config).layers
        for spans in span_modules(model):
            # without first tokens, a layer need not know how many tokens are padding
            layers[spans.layer_idx] = PatternLayer(0, kept_tokens(spans, config), Padding())
        super().__init__(layers=layers)

    @property
    def max_cache_len(self) -> int:
        """The most tokens that a text may have: -1, any number. PEFT asks caches other than `DynamicCache`."""
        return -1


def kept_tokens(spans: Any, config: Any, bounds: SpanBounds | None = None) -> int:
    """Return how many tokens before a query the heads of a layer can read; `bounds`: those of its spans, if known."""
    window = span_window(config)
    if spans.kind == DYNAMIC:
        longest: float = window.limit
    else:
        longest = float(spans.head_spans().max()) if bounds is None else max(bounds.highest)
    return window.num_keys(longest) - 1 + window.shift


class SpanGeneration:
    """Mixin for causal language models: `generate` uses a `SpanCache` by default if the model has spans.

    It does not in assisted decoding, which takes tokens back, and with padding after a text.
    """

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_default = generation_config.cache_implementation is None and cache_in(model_kwargs) is None
        is_final = generation_mode != GenerationMode.ASSISTED_GENERATION and not generation_config.is_assistant
        model: Any = self
        can_serve = is_default and is_final and generation_config.use_cache and not pads_behind(model_kwargs)
        if can_serve and span_modules(model):
            model_kwargs[CACHE_ARGUMENT] = SpanCache(model)
            return None
        parent: Any = super()
        return parent._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)


def pads_behind(model_kwargs: dict[str, Any]) -> bool:
    """Return whether a padding mask masks a token after one that it does not mask."""
    mask = model_kwargs.get("attention_mask")
    return isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, :-1] > mask[:, 1:]).any())
