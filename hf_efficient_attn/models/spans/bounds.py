"""The bounds of learned spans, read from the device once for all layers of a forward pass where possible.

Dynamic spans depend on the output of earlier layers, and are read in every layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.attention.sharded.sums import largest
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.inputs.masks import bring_inputs
from hf_efficient_attn.models.spans.module import ADAPTIVE, clamp_spans


@dataclass(frozen=True)
class SpanBounds:
    """The spans of each head lie between these numbers, in tokens: `lowest` and `highest`, both [H].

    Attributes:
        are_lasting: whether these are the spans themselves, and those of other calls, until a parameter changes.
    """

    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    are_lasting: bool = False


def all_bounds(model: nn.Module, modules: Iterable[Any], *inputs: Any) -> tuple[SpanBounds | None, ...]:
    """Return the bounds of every layer's spans; None for spans that cannot be known before the layers compute.

    In training, spans are clamped first. All are read from a device at once; while compiling, none are. Sharded and
    offloaded spans are whole only within their layer.

    Args:
        model: a backbone before its layers are called.
        modules: its `Spans`, or modules that replace them.
        inputs: what else will be read on the host, see `bring_inputs`.

    Raises:
        InputError: spans that are not numbers.
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
        bring_inputs(*joined, *inputs)
        for layers, spans_of_device in zip(learned.values(), joined, strict=True):
            numbers = iter(on_host(spans_of_device).tolist())
            for index, spans in layers:
                own = tuple(next(numbers) for _ in range(len(spans)))
                bounds[index] = checked(SpanBounds(own, own, are_lasting=True), modules[index].layer_idx)
    return tuple(bounds)


def is_whole(module: Any) -> bool:
    """Return whether the learned spans of a layer can be read outside of it."""
    if module.kind != ADAPTIVE:
        return False
    ratio = module.ratio
    # a DTensor has the method; shards of flat parameters are no parameters, or have other sizes
    return isinstance(ratio, nn.Parameter) and not ratio.is_meta and not hasattr(ratio, "full_tensor")


def layer_bounds(module: Any, spans: Tensor | None, known: Sequence[SpanBounds | None] | None) -> SpanBounds | None:
    """Return the bounds of a layer's spans: the known ones, or else those that `bounds_of` reads.

    Args:
        module: the layer's `Spans`, which returned `spans`.
        known: as `all_bounds` returned them.
    """
    own = None if known is None else known[module.layer_idx]
    return own or bounds_of(spans, module.frozen, module.layer_idx, module.shards)


def bounds_of(
    spans: Tensor | None, frozen: tuple[float, ...] | None, layer_idx: int, shards: SequenceShards | None = None
) -> SpanBounds | None:
    """Return the bounds of a layer's spans, [1, H, 1] or [B, H, T]; None if it has no spans, or while compiling.

    Args:
        frozen: spans that are known as numbers, so that nothing is read.
        shards: the processes that share the texts whose tokens have these spans, of all of which the bounds are then.

    Raises:
        InputError: spans that are not numbers.
    """
    if frozen is not None:
        return SpanBounds(frozen, frozen, are_lasting=True)
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
    """Return the bounds, or raise InputError if they are not numbers."""
    numbers = (*bounds.lowest, *bounds.highest)
    if not all(isfinite(number) for number in numbers):
        raise InputError(
            f"The spans of layer {layer_idx} are {shown(list(bounds.lowest))}: training has diverged, or inputs were "
            "not finite. Lower the learning rate of the spans (optimizer_groups(..., span_lr=...)), or clip gradients."
        )
    return bounds
