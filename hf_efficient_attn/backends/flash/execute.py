"""Forward and backward of a whole call by FlashAttention-4: one kernel per part, joined by log-sum-exp.

The backward pass of every part gets the output and the log-sum-exp of all parts together, so that its weights, and what
is subtracted from their gradients, are those of the whole row.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hf_efficient_attn.backends.flash import library as flash
from hf_efficient_attn.backends.flash.parts import (
    HeadParts,
    Part,
    indices_on,
    layout_with,
    listed_on,
    parts_of,
    selected_parts,
)
from hf_efficient_attn.backends.kernels import empty_output, lse_of_weights, sink_gradient
from hf_efficient_attn.layout.block_table import BlockTable, Documents, block_table, by_column, selected_tables
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache, cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense_mask import documents_of, is_idle
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.selected_keys import ChosenKeys, in_range
from hf_efficient_attn.layout.token_locations import axis_locations
from hf_efficient_attn.layout.transfer import device_numbers
from hf_efficient_attn.patterns.pattern import Pattern

# most queries that a kernel of any GPU computes at once
LARGEST_TILE = 256
# dimensions of the tensors that kernels take, [batch, tokens, heads, width]
TOKENS, HEADS = 1, 2


def parts_of_call(call: AttentionCall) -> tuple[HeadParts, ...]:
    """Return the parts of all heads."""
    return selected_parts(call.layout) if call.chosen is not None else parts_of(call.layout, documents_of(call))


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Nq, Dv] in q's dtype, and lse [B, H, Nq] in float32."""
    divided, group = parts_of_call(call), q.shape[1] // k.shape[1]
    # in the memory order that the operator promises while tracing; one group of heads is written to it without a copy
    result = empty_output(q, v, q.dtype)
    whole = result.transpose(1, 2) if len(divided) == 1 and result.stride(-1) == 1 else None
    found = []
    for heads in divided:
        of_keys = heads.key_heads(group)
        states = tuple(each.transpose(1, 2) for each in (q[:, heads.heads], k[:, of_keys], v[:, of_keys]))
        sinks = None if call.sinks is None else call.sinks[heads.heads].float()
        found.append(forward_heads(heads, call, states, sinks, whole))
    out, lse = (
        each[0] if len(each) == 1 else torch.cat(each, axis)
        for each, axis in zip(zip(*found, strict=True), (HEADS, 1), strict=True)
    )
    out, lse = stored_as(result, out.transpose(1, 2)), lse.contiguous()
    masked = call.masked_queries
    if masked is not None:
        out.masked_fill_(masked, 0.0)
        lse.masked_fill_(masked[..., 0], -torch.inf)
    return out, lse


def stored_as(like: Tensor, result: Tensor) -> Tensor:
    """Return a result in the dtype and the memory order of another tensor, without a copy if it has them."""
    is_same = result.stride() == like.stride() and result.dtype == like.dtype
    return result if is_same else like.copy_(result)


def forward_heads(
    heads: HeadParts, call: AttentionCall, states: tuple[Tensor, ...], sinks: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output [batch, tokens, heads, width] and the log-sum-exp [batch, heads, tokens] of some heads.

    Args:
        sinks: the sinks of these heads; each row counts its sink in one kernel only.
        out: where the output may be written; None: a new tensor.
    """
    q, k, v = states
    shape, device = q.shape[:3], q.device
    kernels = [kernel_of(part, call, device, len(q)) for part in heads.parts]
    joined = [kernel for kernel in kernels if not kernel.part.is_whole_row]
    if not joined:
        # rows that are not whole rows of a part have no keys
        out = q.new_zeros(*shape, v.shape[-1])
        of_none = torch.full((1,), -torch.inf, device=device) if sinks is None else sinks
        lse = of_none[:, None].expand(shape[0], shape[2], shape[1]).clone()
    elif len(joined) == 1:
        out, lse = joined[0].forward(q, k, v, sinks, out)
    else:
        outs = q.new_empty(len(joined), *shape, v.shape[-1])
        lses = torch.empty(len(joined), shape[0], shape[2], shape[1], device=device)
        for number, kernel in enumerate(joined):
            kernel.forward(q, k, v, None if number else sinks, outs[number], lses[number])
        out, lse = torch.empty_like(outs[0]) if out is None else out, torch.empty_like(lses[0])
        flash.library().combine(outs, lses.transpose(2, 3), out, lse.transpose(1, 2))
    for kernel in kernels:
        if kernel.part.is_whole_row:
            index = indices_on(kernel.part, "queries", device)
            rows, row_lse = kernel.forward(q, k, v, sinks)
            out.index_copy_(TOKENS, index, rows)
            lse.index_copy_(2, index, row_lse)
    return out, lse


def backward(
    grad: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k and v, and of the sinks if there are any."""
    masked, group = call.masked_queries, q.shape[1] // k.shape[1]
    grad = grad if masked is None else grad.masked_fill(masked, 0.0)
    weights_lse = lse_of_weights(lse)
    d_lse = None if d_lse is None else d_lse.float().where(weights_lse < torch.inf, 0.0)
    found, divided = [], parts_of_call(call)
    grads = [torch.empty_like(each) for each in (q, k, v)]
    # kernels write only contiguous rows
    is_whole = len(divided) == 1 and all(each.stride(-1) == 1 for each in grads)
    whole = [each.transpose(1, 2) for each in grads] if is_whole else [None] * 3
    for heads in divided:
        own, of_keys = heads.heads, heads.key_heads(group)
        rows = tuple(each[:, own].transpose(1, 2) for each in (q, out, grad))
        keys = tuple(each[:, of_keys].transpose(1, 2) for each in (k, v))
        own_d_lse = None if d_lse is None else d_lse[:, own]
        found.append(backward_heads(heads, call, rows, keys, weights_lse[:, own], own_d_lse, whole))
    joined = [each[0] if len(each) == 1 else torch.cat(each, HEADS) for each in zip(*found, strict=True)]
    grads = [stored_as(each, total.transpose(1, 2)) for each, total in zip(grads, joined, strict=True)]
    learned = []
    if call.sinks is not None:
        delta = (grad.float() * out).sum(-1)
        delta = delta if d_lse is None else delta - d_lse
        learned.append(sink_gradient(call.sinks, grad, out, weights_lse, delta))
    return grads[0], grads[1], grads[2], learned


def backward_heads(
    heads: HeadParts,
    call: AttentionCall,
    rows: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    lse: Tensor,
    d_lse: Tensor | None,
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return dq, dk and dv of some heads, [batch, tokens, heads, width].

    Args:
        rows: q, output and its gradient, [batch, tokens, heads, width].
        keys: k and v.
        lse: [batch, heads, tokens]; exp(score - lse) is the weight of a pair.
        grads: where dq, dk and dv may be written; None: new tensors.
    """
    (q, out, grad), (k, v), device = rows, keys, rows[0].device
    # a pattern may let no query attend to any key
    totals = [] if heads.parts else [torch.zeros_like(each) for each in (q, k, v)]
    of_rest = lse
    for part in heads.parts:
        if part.is_whole_row:
            # in other parts, these rows get weights of 0
            of_rest = lse.index_fill(2, indices_on(part, "queries", device), torch.inf)
    for part in heads.parts:
        kernel = kernel_of(part, call, device, len(q))
        is_first = not totals and part.queries is None and part.keys is None
        of_part = (lse if part.is_whole_row else of_rest, d_lse, grads if is_first else [None] * 3)
        found = kernel.backward(q, out, grad, k, v, *of_part)
        if is_first:
            totals = list(found)
            continue
        if not totals:
            totals = [torch.zeros_like(each) for each in (q, k, v)]
        for total, each, name in zip(totals, found, ("queries", "keys", "keys"), strict=True):
            if getattr(part, name) is None:
                total.add_(each)
            else:
                total.index_add_(TOKENS, indices_on(part, name, device), each)
    return totals


@dataclass(frozen=True)
class Kernel:
    """A kernel call of one part.

    Attributes:
        options: options of both passes.
        forward_options, backward_options: options of one pass.
        num_examples: the batch size.
    """

    part: Part
    options: dict[str, Any]
    forward_options: dict[str, Any]
    backward_options: dict[str, Any]
    num_examples: int

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the queries of the part, in their order, in `out` and `lse` if given."""
        states = self._taken((q,), (k, v))
        options = {**self.options, **self.forward_options, "learnable_sink": sinks, "return_lse": True}
        if self.part.bounds is None:
            return flash.library().forward(*states, **options, out=out, lse=lse)[:2]  # type: ignore[no-any-return]
        packed, packed_lse = flash.library().forward(*states, **options)[:2]
        found = zip((out, lse), (self._put_back(packed), self._unpacked_lse(packed_lse)), strict=True)
        return tuple(each if to is None else to.copy_(each) for to, each in found)  # type: ignore[return-value]

    def backward(
        self,
        q: Tensor,
        out: Tensor,
        grad: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        d_lse: Tensor | None,
        grads: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries and the keys of the part, in their order; in `grads` if possible."""
        part = self.part
        q, out, grad, k, v = self._taken((q, out, grad), (k, v))
        numbers = [None if each is None else self._taken_lse(each) for each in (lse, d_lse)]
        options = {**self.options, **self.backward_options, "dlse": numbers[1]}
        options["softcap"] = float(options["softcap"] or 0.0)
        options["deterministic"] = torch.are_deterministic_algorithms_enabled() and not self.backward_options
        if part.bounds is None:
            options |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        found = flash.library().backward(q, k, v, out, grad, numbers[0], **options)[:3]
        if part.bounds is None:
            return tuple(found)  # type: ignore[return-value]
        return tuple(map(self._put_back, found))  # type: ignore[return-value]

    def _index(self, name: str, device: torch.device) -> Tensor | None:
        """Return the indices of the queries or keys that are taken, in their order; None: all, in order of position."""
        name = name if self.part.order is None else "order"
        return None if getattr(self.part, name) is None else indices_on(self.part, name, device)

    def _taken(self, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the tokens of the part, packed if it has bounds: [tokens of all examples, heads, width]."""
        found = []
        for tensors, name in ((of_queries, "queries"), (of_keys, "keys")):
            index = self._index(name, tensors[0].device)
            for tensor in tensors:
                taken = tensor if index is None else tensor.index_select(TOKENS, index)
                # kernels take only contiguous rows
                taken = taken if taken.stride(-1) == 1 else taken.contiguous()
                found.append(taken if self.part.bounds is None else taken.flatten(0, 1))
        return found

    def _taken_lse(self, lse: Tensor) -> Tensor:
        index = self._index("queries", lse.device)
        lse = lse if index is None else lse.index_select(2, index)
        return lse.contiguous() if self.part.bounds is None else lse.transpose(0, 1).flatten(1).contiguous()

    def _put_back(self, packed: Tensor) -> Tensor:
        """Return packed tokens as [batch, tokens, heads, width] in the order of their positions."""
        return self._in_order(packed.unflatten(0, (self.num_examples, -1)), TOKENS)

    def _unpacked_lse(self, lse: Tensor) -> Tensor:
        return self._in_order(lse.unflatten(1, (self.num_examples, -1)).transpose(0, 1), 2)

    def _in_order(self, tokens: Tensor, axis: int) -> Tensor:
        if self.part.order is None:
            return tokens
        return tokens.index_select(axis, indices_on(self.part, "back", tokens.device))


def kernel_of(part: Part, call: AttentionCall, device: torch.device, num_examples: int) -> Kernel:
    """Return the kernel call of a part."""
    options: dict[str, Any] = {"softmax_scale": call.scale, "softcap": call.softcap}
    if part.has_mask:
        mask, aux = mask_of(part, call, device)
        options |= {"mask_mod": mask, "aux_tensors": aux or None}
        if part.has_tables:
            if call.chosen is not None:
                return Kernel(part, options, *selected_tables_of(call, device), num_examples)
            tables = tables_of(part.masked_layout(call.layout), documents_of(call), device, call.inputs.needs_grad)
            of_rows, of_columns = ({"block_sparse_tensors": each} for each in tables)
            return Kernel(part, options, of_rows, of_columns, num_examples)
        return Kernel(part, options, {}, {}, num_examples)
    left, right = part.window or (None, None)
    options |= {"window_size_left": left, "window_size_right": right}
    if part.bounds is not None:
        bounds = batch_bounds(part, num_examples)
        longest = max(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
        numbers = device_numbers(bounds, device, torch.int32)
        options |= {"cu_seqlens_q": numbers, "cu_seqlens_k": numbers, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return Kernel(part, options, {}, {}, num_examples)


def make_kernels(call: AttentionCall, device: torch.device) -> None:
    """Make the tables and numbers that the kernels of a call take, which later calls find in caches."""
    for heads in parts_of_call(call):
        for part in heads.parts:
            kernel_of(part, call, device, call.inputs.batch_size)


def selected_tables_of(call: AttentionCall, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options with the tables of selected blocks, by rows and by columns, made on the device."""
    size, needs_grad = flash.block_size(flash.generation_of(device)), call.inputs.needs_grad
    chosen = cast(ChosenKeys, call.chosen)
    found = selected_tables(chosen, call.layout, call.tokens, None, size, device, needs_grad)
    rows, columns = stored(found[:4], size), stored(found[4:], size) if needs_grad else None
    return {"block_sparse_tensors": rows}, {"block_sparse_tensors": columns}


def batch_bounds(part: Part, num_examples: int) -> tuple[int, ...]:
    """Return the starts of sequences in the tokens of all examples, and the end of the last one."""
    bounds = part.bounds or ()
    if part.order is None:
        return bounds
    total = bounds[-1]
    return (0, *(example * total + bound for example in range(num_examples) for bound in bounds[1:]))


@cached()
def tables_of(layout: Layout, documents: Documents | None, device: torch.device, needs_grad: bool) -> tuple[Any, Any]:
    """Return the blocks that a kernel computes, by rows for the forward pass and by columns for the backward pass."""
    size = flash.block_size(flash.generation_of(device))
    table: BlockTable = block_table(layout, documents, size, device)
    partial, full = (table.num_partial, table.partial), (table.num_full, table.full)
    columns = (*by_column(*partial), *by_column(*full)) if needs_grad else ()
    return stored((*partial, *full), size), stored(columns, size) if needs_grad else None


def stored(tables: tuple[Tensor, ...], size: tuple[int, int]) -> Any:
    """Return tables as kernels take them: contiguous, also in the strides of dimensions of size 1."""
    return flash.library().tables(*(each.clone(memory_format=torch.contiguous_format) for each in tables), size)


def mask_of(part: Part, call: AttentionCall, device: torch.device) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return the function that says which pairs of a part are allowed, and the tensors that it looks up."""
    layout, aux = call.layout, []
    look, blocks = flash.library().look, part.blocks

    def kept(tensor: Tensor, rows: int | None = None) -> int:
        tensor = tensor.to(torch.int32)
        # a tile of queries may reach beyond the last one
        tensor = (
            tensor
            if rows is None
            else torch.cat(
                [tensor, tensor.narrow(rows, tensor.shape[rows] - 1, 1).repeat_interleave(LARGEST_TILE, rows)], rows
            )
        )
        # kernels find the last dimension by its stride, which must be the only one of 1
        tensor = tensor.expand(*tensor.shape[:-1], 2) if tensor.shape[-1] == 1 else tensor
        aux.append(tensor.contiguous())
        return len(aux) - 1

    # numbers that differ between calls are looked up, so that kernels need not be compiled again
    of_offset = -1 if layout.query_offset == 0 else kept(device_numbers((layout.query_offset,), device, torch.int32))
    of_queries = -1 if part.queries is None else kept(indices_on(part, "queries", device), 0)
    of_keys = -1 if part.keys is None else kept(indices_on(part, "keys", device))
    of_blocks, tokens, num_lists, most = -1, 1, 1, 0
    if blocks is not None:
        found = listed_on(layout_with(blocks, layout), device)
        of_blocks, tokens, (num_lists, _, most) = kept(found.table, 1), found.tokens, found.table.shape
    selected = None if call.chosen is None else cast(ChosenBlocks, call.chosen)
    of_selected, num_selected, heads_per_choice, has_one = -1, 0, 1, (True, True)
    if selected is not None:
        numbers = in_range(selected.blocks, layout.num_keys)
        of_selected, num_selected = kept(numbers, 2), numbers.shape[3]
        has_one = (numbers.shape[0] == 1, numbers.shape[1] == 1)
        heads_per_choice = layout.num_heads // numbers.shape[1]
    locations = []
    if not is_idle(call.tokens):
        located = _located.get_of(
            call.tokens.tensors, (layout.extent, layout.is_cross), lambda: _locations(call, device)
        )
        locations = [kept(each) for each in located]
    has_globals = len(locations) > 4

    def allowed(batch: Any, head: Any, row: Any, column: Any, seqlen_info: Any, aux: Any) -> Any:
        query = row if of_queries < 0 else look(aux[of_queries], row)
        query = query if of_offset < 0 else query + look(aux[of_offset], 0)
        key = column if of_keys < 0 else look(aux[of_keys], column)
        if locations:
            query, key = look(aux[locations[0]], batch, row), look(aux[locations[1]], batch, column)
        found = None if part.mask is None else part.mask.allowed(query, key)
        if most:
            own, block = head * 0 if num_lists == 1 else head, column // tokens
            for number in range(most):
                is_listed = look(aux[of_blocks], own, row // tokens, number) == block
                found = is_listed if found is None else found | is_listed
        if part.excluded is not None:
            found = found & ((~part.excluded).allowed(query, key))
        if selected is not None:
            example, own = batch * 0 if has_one[0] else batch, head * 0 if has_one[1] else head // heads_per_choice
            choice, block = row // selected.queries_per_choice, column // selected.block_tokens
            is_selected = block < 0
            for number in range(num_selected):
                is_selected = is_selected | (look(aux[of_selected], example, own, choice, number) == block)
            found = found & is_selected
        if has_globals:
            is_global = (look(aux[locations[4]], batch, row) | look(aux[locations[5]], batch, column)) > 0
            found = found | (is_global & (key <= query) if layout.pattern.is_causal else is_global)
        if locations:
            document = look(aux[locations[3]], batch, column)
            found = found & (look(aux[locations[2]], batch, row) == document) & (document >= 0)
        return found

    # all functions with this text share one compiled kernel, which may be kept on disk
    numbers_of = () if selected is None else (selected.queries_per_choice, selected.block_tokens, num_selected)
    indices = (of_offset, of_queries, of_keys, of_blocks, of_selected, locations)
    kinds = (part.mask, part.excluded, tokens, num_lists, most, numbers_of, heads_per_choice, has_one, *indices)
    allowed.__cute_hash__ = f"{kinds!r} {layout.pattern.is_causal} {hash_of_sources()}"  # type: ignore[attr-defined]
    return flash.library().jit(allowed), aux


@lru_cache
def hash_of_sources() -> str:
    """Return a hash of the files that define what masks compute: this one, and those of the patterns."""
    folder = Path(str(sys.modules[Pattern.__module__].__file__)).parent
    return sha256(b"".join(path.read_bytes() for path in (Path(__file__), *sorted(folder.glob("*.py"))))).hexdigest()


# the layers of a forward pass and of its backward pass share locations
_located: BoundedCache[list[Tensor]] = BoundedCache(SMALL_BYTES)


def _locations(call: AttentionCall, device: torch.device) -> list[Tensor]:
    """Return positions of queries and keys, their documents, and whether they are global tokens of their document."""
    queries, keys = axis_locations(call.layout, call.tokens, device)
    rows = slice(call.layout.query_offset, call.layout.query_offset + call.layout.num_queries)
    of_queries, of_keys = [queries.positions[:, rows], queries.documents[:, rows]], [keys.positions, keys.documents]
    if keys.is_global is not None:
        of_queries.append(keys.is_global[:, rows])
        of_keys.append(keys.is_global)
    # a tile of queries may reach beyond the last one
    of_queries = [torch.cat([each, each[:, -1:].expand(-1, LARGEST_TILE)], 1) for each in of_queries]
    listed = [each for pair in zip(of_queries, of_keys, strict=True) for each in pair]
    return [each.expand(call.inputs.batch_size, -1).to(torch.int32).contiguous() for each in listed]
