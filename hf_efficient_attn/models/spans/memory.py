"""The memory of models with spans from one training segment to the next, and their cache for `generate`.

Between segments, a model keeps the inputs of its layers, without gradients. The next segment computes keys and values
from them again, with the current weights. Source: Dai et al., "Transformer-XL" (arXiv:1901.02860), section 3.2;
Sukhbaatar et al. (arXiv:1905.07799), whose code does the same. In their code the memory starts with zeros, which
queries attend to; here, queries attend only to tokens that exist.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.cache_layers import Padding, PatternLayer
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, CACHE_NAMES, cache_in
from hf_efficient_attn.integration.packing import ENDS, NUMBERS
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.module import DYNAMIC, SpanBounds, span_modules

# A cache for `generate` that keeps only the keys that the heads of each layer can still attend to.


class SpanCache(Cache):
    """A cache whose layers keep the keys within their longest span and ramp; with dynamic spans, within the limit.

    Args:
        model: a model of any family whose spans do not change while the cache is in use.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        layers = DynamicCache(config=config).layers
        for spans in span_modules(model):
            # the layers keep no first tokens, so they need not know the number of padding tokens
            layers[spans.layer_idx] = PatternLayer(0, kept_tokens(spans, config), Padding())
        super().__init__(layers=layers)

    @property
    def max_cache_len(self) -> int:
        """The largest number of tokens; -1: no limit. PEFT needs it of caches other than `DynamicCache`."""
        return -1


def kept_tokens(spans: Any, config: Any, bounds: SpanBounds | None = None) -> int:
    """Return how many tokens before a query the heads of a layer attend to; bounds: of its spans, if known."""
    window = span_window(config)
    if spans.kind == DYNAMIC:
        longest: float = window.limit
    else:
        longest = float(spans.head_spans().max()) if bounds is None else max(bounds.highest)
    return window.num_keys(longest) - 1 + window.shift


class SpanGeneration:
    """Mixin for causal language models: if the model has spans, `generate` uses a `SpanCache` by default.

    It does not use one in assisted decoding, which removes tokens from the cache, nor with padding after a text.
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
    """Return whether a padding mask has padding after a real token."""
    mask = model_kwargs.get("attention_mask")
    return isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, :-1] > mask[:, 1:]).any())


# tokens that a layer keeps beyond its longest span, so that spans can grow
SPARE_TOKENS = 64


class Segment:
    """The segment of a text that the layers are computing.

    Attributes:
        number: the index of the segment in the text of its row.
        memories: the inputs that each layer has kept of earlier segments, [B, C, hidden_size]; None: nothing.
        inputs: the inputs of the layers called so far, [B, T, hidden_size].
    """

    def __init__(self, number: int, memories: list[Tensor | None]) -> None:
        self.number, self.memories = number, memories
        self.inputs: list[Tensor] = []

    def read(self, hidden_states: Tensor) -> Tensor | None:
        """Return the memory of the next layer, and record its input."""
        self.inputs.append(hidden_states)
        return self.memories[len(self.inputs) - 1]

    def position_ids(self, states: Tensor) -> Tensor:
        """Return the positions of the tokens in memory, which are negative, and of the new tokens, [1, C + T].

        states: states of the new tokens, [B, T, hidden_size].
        """
        longest = max(0 if memory is None else memory.shape[1] for memory in self.memories)
        return torch.arange(-longest, states.shape[1], device=states.device)[None]

    def kept(self, model: Any, bounds: Sequence[SpanBounds | None]) -> list[Tensor]:
        """Return the last inputs of each layer, as many as its spans reach plus `SPARE_TOKENS`."""
        config = model.config
        return [
            remember(memory, states, min(config.span_limit, kept_tokens(spans, config, own) + SPARE_TOKENS))
            for memory, states, spans, own in zip(self.memories, self.inputs, span_modules(model), bounds, strict=True)
        ]


class SegmentMemory:
    """Past inputs of every layer, [B, C, hidden_size] each, kept separately for training and evaluation."""

    def __init__(self) -> None:
        self._kept: dict[bool, tuple[int, list[Tensor]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether it remembers nothing."""
        return not self._kept

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def open(self, segment_index: Tensor, is_training: bool, num_layers: int) -> Segment:
        """Return the segment with the memory of each layer, which is None at the start of a text.

        Args:
            segment_index: int [B], the index of this segment in the text of its row, the same in all rows.

        Raises:
            InputError: rows at different segments, or a segment that does not follow the last one.
        """
        numbers = sorted(set(on_host(segment_index).tolist()))
        if len(numbers) != 1:
            raise InputError(
                f"segment_index holds {numbers[:5]}, but all rows of a batch must be at the same segment of their "
                "texts. TextSegments with num_rows = batch size x processes gives such batches, if they are not "
                "shuffled."
            )
        if numbers[0] == 0:
            return Segment(0, [None] * num_layers)
        last, kept = self._kept.get(is_training, (None, []))
        if last is None or numbers[0] != last + 1 or len(kept[0]) != segment_index.shape[0]:
            seen = "none came before it" if last is None else f"the last one was {last}, of {len(kept[0])} rows"
            raise InputError(
                f"segment_index={numbers[0]} of {segment_index.shape[0]} rows, but {seen}: segments must come in "
                "order, and the next batch must continue each row. Do not shuffle "
                "(train_sampling_strategy='sequential'), drop an incomplete last batch, and start new texts with "
                "segment_index=0. Training that resumes in the middle of a text needs the segment_memory file that "
                "SpanCallback writes next to each checkpoint."
            )
        return Segment(numbers[0], list(kept))

    def close(self, segment: Segment, model: Any, bounds: Sequence[SpanBounds | None]) -> None:
        """Keep the inputs of a segment's layers for the next segment."""
        self.write(segment.number, model.training, segment.kept(model, bounds))

    def write(self, number: int, is_training: bool, states: list[Tensor]) -> None:
        """Keep these inputs of the layers in segment `number` for the next segment."""
        self._kept[is_training] = (number, [tensor.detach() for tensor in states])


def remember(memory: Tensor | None, hidden_states: Tensor, num_tokens: int) -> Tensor:
    """Return the last `num_tokens` tokens of memory and new states, [B, at most num_tokens, hidden_size]."""
    joined = hidden_states if memory is None else torch.cat((memory, hidden_states), 1)
    return joined[:, max(0, joined.shape[1] - num_tokens) :].detach()


def check_segment(segment_index: Tensor, batch_size: int, attention_mask: Any, options: dict[str, Any]) -> None:
    """Raise InputError for inputs that cannot be combined with segments of a text.

    options: the call's other arguments.
    """
    if attention_mask is not None and not bool((on_host(attention_mask) == 1).all()):
        raise InputError(
            "attention_mask masks tokens of a segment, but remembered segments cannot have padding. Pass segments of "
            "full length (TextSegments drops the rest of a text), or leave segment_index out."
        )
    for name in ("position_ids", *CACHE_NAMES, *ENDS, NUMBERS):
        if options.get(name) is not None:
            raise InputError(f"segment_index and {name} exclude each other: a segment continues the one before it.")
    if not isinstance(segment_index, Tensor) or segment_index.is_floating_point():
        raise InputError(
            f"segment_index={shown(segment_index)} must be a tensor of integers, [batch] = [{batch_size}]."
        )
    if segment_index.shape != (batch_size,):
        shape = list(segment_index.shape)
        raise InputError(f"segment_index has shape {shape}; it must be [batch] = [{batch_size}].")
