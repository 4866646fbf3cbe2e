"""How far the heads of a layer attend: up to a limit, to a learned span per head, or to a span chosen by each token.

With span z, a head multiplies the exponential of the score of the key at index x (0 is the nearest key) by m_z(x) =
clamp((R + z − x) / R, 0, 1) before the softmax is normalised, which equals softmax(s + log m). The gradient of z comes
from the ramp of R tokens.

Source: Sukhbaatar et al., "Adaptive Attention Span in Transformers" (arXiv:1905.07799), section 2.2. As in the authors'
code, and unlike in the paper's text, the nearest key has index 0 and not 1, so a span of 0 attends to R keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.attention.sharded.collectives import largest, summed
from hf_efficient_attn.attention.sharded.shards import SequenceShards, shards_of
from hf_efficient_attn.errors import CheckpointError, InputError, UnsupportedBackendError
from hf_efficient_attn.layout.score_terms import SoftSpan
from hf_efficient_attn.layout.transfer import device_numbers, on_host
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.inputs import prefetch_inputs
from hf_efficient_attn.models.parts.blocks import KeptInFloat32, is_a_copy

FIXED, ADAPTIVE, DYNAMIC, FROZEN = "fixed", "adaptive", "dynamic", "frozen"
KINDS = (FIXED, ADAPTIVE, DYNAMIC)


class Spans(KeptInFloat32):
    """The spans of one layer's heads. Shapes: hidden states [B, T, hidden_size] → spans in tokens.

    The kind of spans is one of

    - `adaptive`: `limit` · `ratio`, a parameter [H] that `clamp_` keeps between 0 and 1; `clamp_spans` calls it before
      every forward pass in training.
    - `dynamic`: limit · sigmoid(weight·x_t + bias), with a bias and a weight vector per head. The weight starts at 0
      (the paper does not say how it starts).
    - `fixed`: the limit.
    - `frozen`: the config's `frozen_spans`.

    Parameters stay in float32 even if the model is cast, because in bfloat16 a span of 8,192 tokens moves in steps of
    32.

    Uses the config fields `span`, `span_limit`, `span_ramp`, `span_init`, `dynamic_span_bias` and `frozen_spans`.
    """

    is_span = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.num_heads = layer_idx, config.num_attention_heads
        self.limit, self.ramp = config.span_limit, config.span_ramp
        self.kind = config.span if config.frozen_spans is None else FROZEN
        self.frozen = None if config.frozen_spans is None else tuple(config.frozen_spans[layer_idx])
        self.initial_ratio, self.initial_bias = float(config.span_init), float(config.dynamic_span_bias)
        # mean and longest span in the last forward pass, for reports
        self.seen: Tensor | None = None
        self.seen_longest: Tensor | None = None
        if self.kind == ADAPTIVE:
            self.ratio = nn.Parameter(torch.full((self.num_heads,), self.initial_ratio, dtype=torch.float32))
            self.register_state_dict_pre_hook(clamp_before_saving)
        elif self.kind == DYNAMIC:
            self.weight = nn.Parameter(torch.zeros(self.num_heads, config.hidden_size, dtype=torch.float32))
            self.bias = nn.Parameter(torch.full((self.num_heads,), self.initial_bias, dtype=torch.float32))

    def initialize(self) -> None:
        """Set the initial values."""
        if self.kind == ADAPTIVE:
            init.constant_(self.ratio, self.initial_ratio)
        elif self.kind == DYNAMIC:
            init.zeros_(self.weight)
            init.constant_(self.bias, self.initial_bias)

    def forward(self, hidden_states: Tensor | None) -> Tensor | None:
        """Return spans in tokens, float32 [1, H, 1], or [B, H, T] if dynamic; None: all heads attend up to the limit.

        hidden_states: used for dynamic spans, and for the device of frozen spans.
        """
        if self.kind == FIXED:
            return None
        if self.kind == FROZEN:
            return device_numbers(self.frozen, hidden_states.device, torch.float32)[None, :, None]
        if self.kind == ADAPTIVE:
            # in evaluation, `clamp_spans` does nothing after an optimizer step; so clamp the value here, but not the
            # gradient
            ratio = self.ratio.clamp(0.0, 1.0)
            if torch.is_grad_enabled():
                ratio = ratio.detach() + (self.ratio - self.ratio.detach())
            return self.limit * ratio.view(1, -1, 1)
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = nn.functional.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)
        return self.limit * torch.sigmoid(logits).transpose(1, 2)

    def note(self, spans: Tensor | None, real_tokens: Tensor | None) -> None:
        """Keep the mean and the longest dynamic span of each head for reports; do nothing while compiling.

        Args:
            spans: the output of `forward`.
            real_tokens: bool [B, T], True for the tokens that count; None: all.
        """
        if self.kind != DYNAMIC or spans is None or torch.compiler.is_compiling():
            return
        weights = torch.ones_like(spans[:, 0]) if real_tokens is None else real_tokens.to(spans.dtype)
        counted = spans.detach() * weights[:, None]
        total, longest, count = counted.sum((0, 2)), counted.amax((0, 2)), weights.sum()
        if self.shards is not None:
            total, count = summed(torch.cat((total, count[None])), self.shards.group).tensor_split([-1])
            longest = largest(longest, self.shards.group)
        self.seen, self.seen_longest = total / count.clamp(min=1), longest

    @property
    def shards(self) -> SequenceShards | None:
        """The processes that share the texts of these dynamic spans; None: this process has whole texts."""
        return shards_of(self) if self.kind == DYNAMIC else None

    def clamp_(self) -> None:
        """Clamp learned spans to 0 … limit, in place; an optimizer does not know these bounds."""
        if self.kind == ADAPTIVE:
            with torch.no_grad():
                if torch.compiler.is_compiling():
                    self.ratio.clamp_(0.0, 1.0)
                else:
                    # .data, so that autograd accepts a second forward pass before backward(): the change of a saved
                    # tensor is not counted
                    self.ratio.data.clamp_(0.0, 1.0)

    @property
    def is_away(self) -> bool:
        """Whether the parameters are offloaded, so that their values are available only in a forward pass."""
        return any(parameter.is_meta for parameter in self.parameters())

    def head_spans(self) -> Tensor:
        """Return the span of each head in tokens, without the ramp, [H].

        A dynamic span is the mean over the tokens of the last forward pass, or its initial value before the first one.
        If the parameters are offloaded, it is the limit.
        """
        with torch.no_grad():
            if self.kind == FIXED or self.is_away:
                return torch.full((self.num_heads,), float(self.limit), dtype=torch.float32)
            if self.kind == FROZEN:
                return torch.tensor(self.frozen, dtype=torch.float32)
            if self.kind == ADAPTIVE:
                return self.limit * whole(self.ratio).clamp(0.0, 1.0)
            return self.limit * torch.sigmoid(whole(self.bias)) if self.seen is None else self.seen

    def longest_spans(self) -> Tensor:
        """Return the longest span of each head in tokens, without the ramp, [H].

        For a dynamic span, this is the maximum over the tokens of the last forward pass; otherwise see `head_spans`.
        """
        return self.head_spans() if self.seen_longest is None else self.seen_longest

    def freeze(self, tokens: list[float]) -> None:
        """Replace the parameter with these constants, in tokens."""
        self.kind, self.frozen = FROZEN, tuple(tokens)
        del self.ratio

    @torch.no_grad()
    def set_limit(self, limit: int) -> None:
        """Change the limit; learned spans keep their length in tokens, up to the limit."""
        if self.kind == ADAPTIVE:
            self.ratio.mul_(self.limit / limit).clamp_(0.0, 1.0)
        self.limit = limit

    def check(self) -> None:
        """Raise CheckpointError if learned spans are outside of 0 … limit, which never happens after training."""
        if self.kind != ADAPTIVE or self.is_away:
            return
        ratios = whole(self.ratio)
        if bool(((ratios < 0) | (ratios > 1)).any()) or not bool(ratios.isfinite().all()):
            found = shown([round(ratio, 4) for ratio in ratios.tolist()])
            raise CheckpointError(
                f"Layer {self.layer_idx} has span ratios {found}; a ratio must be a fraction of "
                f"span_limit={self.limit}, from 0 to 1. The checkpoint is damaged, holds tokens instead of fractions "
                "(divide them by span_limit), or was saved without clamping its spans after the last step."
            )


def span_modules(model: nn.Module) -> list[Spans]:
    """Return the spans of all layers of a model, in the order of the layers; empty if it has none.

    If an adapter trains a copy (PEFT's `modules_to_save`), the list has the copy instead of the original.
    """
    return [
        module
        for name, module in model.named_modules()
        if getattr(type(module), "is_span", False) and "original_module" not in name.split(".")
    ]  # type: ignore[return-value]


def clamp_before_saving(module: nn.Module, *_: Any) -> None:
    """Clamp the spans of a module before its weights are saved; a module-level function, so that it can be pickled."""
    module.clamp_()  # type: ignore[operator]


def known_spans(model: nn.Module) -> list[Spans]:
    """Return the spans of all layers, after checking that their values are available.

    Raises:
        InputError: the model has no spans, or their parameters are offloaded.
    """
    found = span_modules(model) if isinstance(model, nn.Module) else []
    if not found:
        raise InputError(
            f"{type(model).__name__} has no spans. Use a model of AdaptiveSpanConfig, or of another config that sets "
            "span."
        )
    away = [spans.layer_idx for spans in found if spans.is_away]
    if away:
        raise InputError(
            f"The spans of layers {away} are offloaded and cannot be read or changed. Load the model without "
            "offloading (device_map='cpu'), or call this function before offloading."
        )
    return found


def head_spans(model: nn.Module) -> Tensor:
    """Return the span of every head of a model in tokens, without the ramp: float32 [layers, heads], on the CPU.

    Dynamic spans, which are predicted for every token, are averaged over the tokens of the last forward pass; before
    the first one they have their initial value. Fixed spans are the span limit.

    Raises:
        InputError: the model has no spans, or they are offloaded.

    >>> import hf_efficient_attn as hea
    >>> config = hea.AdaptiveSpanConfig(
    ...     hidden_size=16, num_hidden_layers=2, num_attention_heads=2, span_limit=64, span_init=0.25
    ... )
    >>> hea.training.head_spans(hea.AdaptiveSpanModel(config)).tolist()
    [[16.0, 16.0], [16.0, 16.0]]
    """
    return torch.stack([spans.head_spans().float().cpu() for spans in known_spans(model)])


def clamp_spans(model: nn.Module) -> None:
    """Clamp the learned spans of a backbone before a forward pass in training; in evaluation, do nothing.

    It must run before the layers are called, because in the layers, sharded parameters (FSDP) are copies of those that
    the optimizer updates.
    """
    if model.training:
        for spans in span_modules(model):
            if spans.kind == ADAPTIVE and is_a_copy(spans.ratio):
                raise UnsupportedBackendError(
                    "DeepSpeed's ZeRO trains copies of the learned spans, and does not clamp them to the range from 0 "
                    f"to span_limit={spans.limit}. Train with DDP or FSDP2, with span='dynamic', or with frozen spans "
                    "(hea.freeze_spans)."
                )
            spans.clamp_()


def log_soft_mask(spans: Tensor, first: int, count: int, ramp: int) -> Tensor:
    """Return log m_z(x) for `count` keys from index `first` on: 0 within the span, -inf beyond the ramp.

    Shapes: spans [...] in tokens → [..., count]. See `SoftSpan`.

    >>> log_soft_mask(torch.tensor([1.0]), 0, 5, 2).exp().tolist()
    [[1.0, 1.0, 0.5, 0.0, 0.0]]
    """
    return SoftSpan(ramp).score(spans[..., None], torch.arange(first, first + count, device=spans.device))


def whole(parameter: Tensor) -> Tensor:
    """Return the full tensor of a parameter, which may be sharded over processes."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


# The bounds of learned spans, copied from the device once for all layers of a forward pass if possible.
#
# Dynamic spans depend on the output of earlier layers, so they are copied in every layer.


@dataclass(frozen=True)
class SpanBounds:
    """Bounds of the spans of each head in tokens, `lowest` and `highest`, both [H].

    Attributes:
        are_constant: whether both are the spans themselves, which stay the same in all calls until a parameter changes.
    """

    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    are_constant: bool = False


def all_bounds(model: nn.Module, modules: Iterable[Any], *inputs: Any) -> tuple[SpanBounds | None, ...]:
    """Return the bounds of every layer's spans; None for spans that are unknown before their layer is called.

    In training, spans are clamped first. All spans are copied from a device at once; while compiling, none are. Sharded
    and offloaded spans are available only within their layer.

    Args:
        model: a backbone before its layers are called.
        modules: its `Spans`, or modules that replace them.
        inputs: other tensors that the host will need; see `prefetch_inputs`.

    Raises:
        InputError: spans that are not finite.
    """
    clamp_spans(model)
    modules = list(modules)
    bounds: list[SpanBounds | None] = [None] * len(modules)
    if torch.compiler.is_compiling():
        return tuple(bounds)
    learned: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.no_grad():
        for index, module in enumerate(modules):
            spans = module(None) if is_whole(module) else None
            if spans is not None and spans.shape[1] == module.num_heads:
                learned.setdefault(spans.device, []).append((index, spans.flatten()))
        joined = [torch.cat([spans for _, spans in layers]) for layers in learned.values()]
        prefetch_inputs(*joined, *inputs)
        for layers, spans_of_device in zip(learned.values(), joined, strict=True):
            numbers = iter(on_host(spans_of_device).tolist())
            for index, spans in layers:
                own = tuple(next(numbers) for _ in range(len(spans)))
                bounds[index] = checked(SpanBounds(own, own, are_constant=True), modules[index].layer_idx)
    return tuple(bounds)


def is_whole(module: Any) -> bool:
    """Return whether the learned spans of a layer are available outside of the layer."""
    if module.kind != ADAPTIVE:
        return False
    ratio = module.ratio
    # `full_tensor` is a method of DTensor; shards of flat parameters are not nn.Parameter, or have another size
    return isinstance(ratio, nn.Parameter) and not ratio.is_meta and not hasattr(ratio, "full_tensor")


def layer_bounds(module: Any, spans: Tensor | None, known: Sequence[SpanBounds | None] | None) -> SpanBounds | None:
    """Return the bounds of a layer's spans: the known bounds, or else those from `bounds_of`.

    Args:
        module: the layer's `Spans`, which returned `spans`.
        known: the output of `all_bounds`.
    """
    own = None if known is None else known[module.layer_idx]
    return own or bounds_of(spans, module.frozen, module.layer_idx, module.shards)


def bounds_of(
    spans: Tensor | None, frozen: tuple[float, ...] | None, layer_idx: int, shards: SequenceShards | None = None
) -> SpanBounds | None:
    """Return the bounds of a layer's spans, [1, H, 1] or [B, H, T]; None if it has no spans, or while compiling.

    Args:
        frozen: constant spans, for which nothing is copied from the device.
        shards: the processes that share the texts of these spans; the bounds are then those of all processes.

    Raises:
        InputError: spans that are not finite.
    """
    if frozen is not None:
        return SpanBounds(frozen, frozen, are_constant=True)
    if spans is None or torch.compiler.is_compiling():
        return None
    if spans.shape[0] == spans.shape[2] == 1 and shards is None:
        lowest = highest = spans.detach()[0, :, 0].tolist()
    else:
        per_head = spans.detach().transpose(0, 1).flatten(1)
        edges = torch.stack((-per_head.amin(1), per_head.amax(1)))
        edges = edges if shards is None else largest(edges, shards.group)
        lowest, highest = torch.stack((-edges[0], edges[1])).tolist()
    return checked(SpanBounds(tuple(lowest), tuple(highest)), layer_idx)


def checked(bounds: SpanBounds, layer_idx: int) -> SpanBounds:
    """Return the bounds, or raise InputError if they are not finite."""
    numbers = (*bounds.lowest, *bounds.highest)
    if not all(isfinite(number) for number in numbers):
        raise InputError(
            f"The spans of layer {layer_idx} are {shown(list(bounds.lowest))}: training has diverged, or inputs were "
            "not finite. Lower the learning rate of the spans (optimizer_groups(..., span_lr=...)), or clip gradients."
        )
    return bounds
