"""The blocks of the score matrix that a kernel computes, as the BlockMask of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hf_efficient_attn.backends.flex.mods import MaskMod, layout_text
from hf_efficient_attn.layout.block_table import (
    CACHE_BYTES,
    Documents,
    GlobalsFirst,
    block_table,
    by_column,
    globals_first,
    selected_tables,
)
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense_mask import documents_of
from hf_efficient_attn.layout.grouped_keys import read_selected_keys, write_chosen_text
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.operator_args import read_call_text, read_layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import send
from hf_efficient_attn.patterns.pattern import Pattern

# (queries, keys) per block, in tokens: on CPUs short blocks waste fewer scores and are as fast
BLOCK_SIZES = {"cpu": (32, 64), "cuda": (128, 128)}
Tables = tuple[Tensor, ...]


def block_mask(
    call: AttentionCall, device: torch.device, mask_mod: MaskMod, order: GlobalsFirst | None = None
) -> BlockMask:
    """Return the blocks that hold allowed pairs, with the function that says which pairs of a block are allowed."""
    layout, tokens, inputs = call.layout, call.tokens, call.inputs
    lengths = layout.num_queries, layout.num_keys
    if torch.compiler.is_compiling():
        batch_size = 1 if tokens.is_empty and call.chosen is None else inputs.batch_size
        tables = blocks_operator(
            list(tokens.tensors),
            [] if call.chosen is None else call.chosen.tensors,
            layout_text(layout),
            "" if call.chosen is None else write_chosen_text(call.chosen),
            [batch_size, layout.num_heads, *lengths],
            layout.query_offset,
            inputs.needs_grad,
            device,
        )
    elif call.chosen is not None:
        masks = (tokens, documents_of(call))
        tables = selected_tables(call.chosen, layout, *masks, BLOCK_SIZES[device.type], device, inputs.needs_grad)
    else:
        tables = _tables(layout, documents_of(call), device, inputs.needs_grad, order)
    of_columns = tables[4:] or (None,) * 4
    # mypy does not count the tensors of a tuple
    return BlockMask(lengths, *tables[:4], *of_columns, BLOCK_SIZES[device.type], mask_mod)  # type: ignore[arg-type, call-arg]


@cached(CACHE_BYTES)
def _tables(
    layout: Layout,
    documents: Documents | None,
    device: torch.device,
    needs_grad: bool,
    order: GlobalsFirst | None = None,
) -> Tables:
    """Return four tensors: how many partial blocks each row of blocks has, their indices, and the same for full blocks.

    With gradients there are four more, the same for each column, for the backward pass.
    """
    table = block_table(layout, documents, BLOCK_SIZES[device.type], device, order)
    partial, full = (table.num_partial, table.partial), (table.num_full, table.full)
    return (*partial, *full, *by_column(*partial), *by_column(*full)) if needs_grad else (*partial, *full)


# the operator reads masks on the host, which a CUDA graph cannot replay
@torch.library.custom_op("hf_efficient_attn::flex_blocks", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def blocks_operator(
    masks: list[Tensor | None],
    chosen: list[Tensor | None],
    call_text: str,
    chosen_text: str,
    shape: Sequence[int],
    query_offset: int,
    needs_grad: bool,
    device: torch.device,
) -> list[Tensor]:
    """Return the tables of a BlockMask, four, or eight with gradients. A compiler cannot trace this.

    Args:
        chosen, chosen_text: the tensors of selected blocks, the rest as `write_chosen_text` writes it; "": all keys.
        shape: (batch or 1, heads, queries, keys).
    """
    batch_size, num_heads, num_queries, num_keys = shape
    layout = read_layout(call_text, num_heads, num_queries, num_keys, query_offset)
    tokens = TokenMask(*masks)
    documents = None if tokens.is_empty else tokens.documents(batch_size, num_keys, layout.num_positions)
    if chosen_text:
        own = (read_selected_keys(chosen_text, chosen), layout, tokens, documents)
        tables = selected_tables(*own, BLOCK_SIZES[device.type], device, needs_grad)
    else:
        tables = _tables(layout, documents, device, needs_grad)
    lead = batch_size, num_heads if chosen_text else _num_table_heads(layout.pattern, num_heads)
    # copies, because a compiled program may write into the results of an operator
    return [table.expand(*lead, *table.shape[2:]).clone(memory_format=torch.contiguous_format) for table in tables]


@blocks_operator.register_fake
def _(
    masks: list[Tensor | None],
    chosen: list[Tensor | None],
    call_text: str,
    chosen_text: str,
    shape: Sequence[int],
    query_offset: int,
    needs_grad: bool,
    device: torch.device,
) -> list[Tensor]:
    batch_size, num_heads, *lengths = shape
    rows, columns = (-(-length // size) for length, size in zip(lengths, BLOCK_SIZES[device.type], strict=True))
    lead = batch_size, num_heads if chosen_text else _num_table_heads(read_call_text(call_text)[0], num_heads)
    sizes = [(rows,), (rows, columns)] * 2 + ([(columns,), (columns, rows)] * 2 if needs_grad else [])
    return [torch.empty(*lead, *size, dtype=torch.int32, device=device) for size in sizes]


def _num_table_heads(pattern: Pattern, num_heads: int) -> int:
    """Return how many heads the tables have: 1 if all heads are alike, whatever is drawn."""
    return 1 if pattern.num_head_patterns == 1 and not pattern.is_random else num_heads


# The order in which flex takes the tokens of a call: scattered global tokens first, since each needs whole blocks.


@dataclass(frozen=True, eq=False)
class Order:
    """An order of tokens.

    Attributes:
        kind: the order in the form that block tables take.
        positions: the position of the token at each place, int [tokens].
        places: the place of the token at each position, int [tokens].
    """

    kind: GlobalsFirst
    positions: Tensor
    places: Tensor

    def sort(self, tensor: Tensor) -> Tensor:
        """Return [batch, heads, tokens, ...] with the tokens in this order."""
        return Sorted.apply(tensor, self.positions, self.places)  # type: ignore[no-any-return, no-untyped-call]

    def sort_back(self, tensor: Tensor) -> Tensor:
        """Return [batch, heads, tokens, ...], which `sort` has sorted, with the tokens in the order of positions."""
        return Sorted.apply(tensor, self.places, self.positions)  # type: ignore[no-any-return, no-untyped-call]


class Sorted(torch.autograd.Function):
    """Tokens in another order. The gradient is sorted back, not added up as for an arbitrary `index_select`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return tensor.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return Sorted.apply(grads[0], back, order), None, None  # type: ignore[no-untyped-call]


def order_of(call: AttentionCall, device: torch.device) -> Order | None:
    """Return the order of a call; None: that of the positions, as always while compiling."""
    keeps_order = call.chosen is not None or any(term.values.shape[2] > 1 for term in call.terms)
    return None if torch.compiler.is_compiling() or keeps_order else _order(call.layout, documents_of(call), device)


@cached()
def _order(layout: Layout, documents: Documents | None, device: torch.device) -> Order | None:
    kind = globals_first(layout, documents)
    if kind is None:
        return None
    positions = kind.positions()
    return Order(kind, *send((positions, positions.argsort()), device))
