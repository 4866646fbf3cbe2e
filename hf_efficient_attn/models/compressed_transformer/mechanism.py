"""What several mechanisms of this family share: states that layers pass on, and sequences split into strides."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.tracing import is_exporting
from hf_efficient_attn.models.sparse.attention import SparseAttention


def zeroed(states: Tensor, real: Tensor | None) -> Tensor:
    """Return states [R, L, X] with zeros after the end of each sequence."""
    return states if real is None else torch.where(real.unsqueeze(-1), states, 0)


# Queries and keys that a layer passes on to layers above, which compare them again; memory is linear in the length.


class PassedStates:
    """The queries and keys that layers pass on in one forward pass, by index of the layer: [B, H, T or K, D].

    This is not a dict, because libraries that move or cast arguments would give each layer its own copy.
    """

    def __init__(self) -> None:
        self._of_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self._have_gradients = True

    def keep(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Pass on the queries of the new tokens of a layer, and all its keys, the cached ones first."""
        self._of_layer[layer] = query, key
        self._have_gradients &= torch.is_grad_enabled()

    def joined(self, layers: Sequence[int], own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the concatenated queries and keys of layers; their products are the sums of the layers' products.

        own: states of the layer that uses them, with the same number of keys: [B, any, K, any].

        Raises:
            InputError: the cache of a layer holds other tokens.
        """
        queries, keys = zip(*(self._of_layer[layer] for layer in layers), strict=True)
        if any(key.shape[2] != own.shape[2] for key in keys):
            counts = ", ".join(f"{key.shape[2]} in layer {layer}" for layer, key in zip(layers, keys, strict=True))
            raise InputError(
                "A layer uses the keys of several layers together, but these have different numbers of keys: "
                f"{counts}, and {own.shape[2]} in this layer. Generate with the default cache, which holds all keys of "
                "all layers."
            )
        query, key = (torch.cat([each.to(own.device) for each in states], -1) for states in (queries, keys))
        return query, key

    def check_gradients(self) -> None:
        """Refuse layers that were computed without gradients in a pass that has them.

        Raises:
            UnsupportedBackendError: they were; layers below would get no gradient from layers that use their states.
        """
        if torch.is_grad_enabled() and not self._have_gradients:
            raise UnsupportedBackendError(
                "Layers use the queries and keys of layers below, but these were computed without gradients, as "
                "gradient checkpointing with use_reentrant=True does. Pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )


class PassingAttention(SparseAttention):
    """Attention that follows a pattern, and passes on its queries and keys if a layer above uses them."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        above = range(layer_idx + 1, config.num_hidden_layers)
        self.passes_on = any(layer_idx in config.compared_layers(layer) for layer in above)

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self.passes_on:
            kwargs["passed_states"].keep(self.layer_idx, query, key)
        return query, key

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        return replace(super().layer_request(num_keys, task), head_dim=self.config.compared_width(self.layer_idx))


# Sequences split into strides of several tokens, and convolutions that make one slot of each stride.


class StrideConvolution(nn.Conv1d):
    """A convolution whose kernels are as long as its stride, [R, C, S · stride] → [R, C, S].

    Computed as a matrix product, which torch compiles and exports for any length, unlike its convolutions.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Return the slots of sequences."""
        made = convolved(states.mT, self.weight.unflatten(0, (self.groups, -1)))
        # adapters build convolutions of this class without a bias
        if self.bias is not None:
            made = made + self.bias.to(made.dtype)
        return made.mT


def convolved(states: Tensor, weight: Tensor) -> Tensor:
    """Return one slot for each stride, [R, S · stride, H · D] → [R, S, H · O].

    weight: [O, D, stride] for all H heads, or [H, O, D, stride].
    """
    windows = by_strides(states, weight.shape[-1]).unflatten(3, (-1, weight.shape[-2]))
    if not torch.compiler.is_compiling():
        letters = "odt" if weight.ndim == 3 else "hodt"
        return torch.einsum(f"rsthd,{letters}->rsho", windows, weight).flatten(2)
    # einsum would merge the axes of sequences and strides; an exporter cannot prove that the merged axis is longer than
    # the axis of sequences, and if there is only one stride the compiler wrongly takes the gradient for contiguous
    kernels = weight.mT.flatten(-2).mT.expand(windows.shape[3], -1, -1)
    made = [own.flatten(2) @ kernel.unsqueeze(0) for own, kernel in zip(windows.unbind(3), kernels, strict=True)]
    return torch.cat(made, 2)


def whole_strides(states: Tensor, stride: int) -> Tensor:
    """Return states padded with zeros to whole strides, [R, L, X] → [R, S · stride, X]."""
    num_strides = (states.shape[1] + stride - 1) // stride
    return pad(states, (0, 0, 0, num_strides * stride - states.shape[1]))


def by_strides(states: Tensor, stride: int) -> Tensor:
    """Return states split into strides, [R, S · stride, X] → [R, S, stride, X]."""
    return states.unflatten(1, (states.shape[1] // stride, stride))


def filled_slots(real: Tensor | None, stride: int) -> Tensor | None:
    """Return which strides hold tokens of a sequence, bool [R, S]; None: all."""
    if real is None:
        return None
    return by_strides(whole_strides(real.unsqueeze(-1).int(), stride), stride).amax((2, 3)) > 0


def with_spare_stride(states: list[Tensor], real: Tensor | None, stride: int) -> tuple[list[Tensor], Tensor | None]:
    """Return sequences, [R, L, X] each, and which tokens are real; while exporting, with one more stride of padding.

    Without it, an exporter refuses a range of lengths that includes one stride, because it makes this a special case.
    """
    if not is_exporting():
        return states, real
    if real is None:
        real = torch.ones(states[0].shape[:2], dtype=torch.bool, device=states[0].device)
    return [pad(each, (0, 0, 0, stride)) for each in states], pad(real, (0, stride))
