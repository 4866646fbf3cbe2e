"""The order in which flex takes the tokens of a call: scattered global ones first, as each would fill whole blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.backends.flex.blocks import documents_of
from hf_efficient_attn.layout.blocks.globals_first import GlobalsFirst, globals_first
from hf_efficient_attn.layout.blocks.table import Documents
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.device_copies import send
from hf_efficient_attn.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class Order:
    """An order of tokens.

    Attributes:
        kind: as block tables know it.
        positions: that of the token at each place, int [tokens].
        places: that of the token at each position, int [tokens].
    """

    kind: GlobalsFirst
    positions: Tensor
    places: Tensor

    def sort(self, tensor: Tensor) -> Tensor:
        """Return [batch, heads, tokens, ...] with the tokens in this order."""
        return Sorted.apply(tensor, self.positions, self.places)  # type: ignore[no-any-return, no-untyped-call]

    def sort_back(self, tensor: Tensor) -> Tensor:
        """Return what `sort` was given, by what it returned."""
        return Sorted.apply(tensor, self.places, self.positions)  # type: ignore[no-any-return, no-untyped-call]


class Sorted(torch.autograd.Function):
    """Tokens in another order; the gradient is sorted back, where that of any selection would be added up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return tensor.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return Sorted.apply(grads[0], back, order), None, None  # type: ignore[no-untyped-call]


def order_of(call: AttentionCall, device: torch.device) -> Order | None:
    """Return the order of a call; None: that of the positions, as in every program of a caller's own."""
    keeps_order = call.chosen is not None or any(term.values.shape[2] > 1 for term in call.terms)
    return None if torch.compiler.is_compiling() or keeps_order else _order(call.layout, documents_of(call), device)


@cached()
def _order(layout: Layout, documents: Documents | None, device: torch.device) -> Order | None:
    kind = globals_first(layout, documents)
    if kind is None:
        return None
    positions = kind.positions()
    return Order(kind, *send((positions, positions.argsort()), device))
