"""Which query may read which key, for every pair. It takes memory for all pairs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import MEBIBYTE, BoundedCache, cached
from hf_efficient_attn.layout.call_text import read_layout, write_call_text
from hf_efficient_attn.layout.dense.cache import CACHE_BYTES, mask_key
from hf_efficient_attn.layout.device_copies import tables_on
from hf_efficient_attn.layout.layout import HeadGroups, Layout
from hf_efficient_attn.layout.onnx import is_written, written_groups
from hf_efficient_attn.layout.query_rows import query_rows
from hf_efficient_attn.layout.relation import relation
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, TokenLocations, axis_locations, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.algebra import allowed_by

# how many pairs are looked at together
MAX_LOOKED_AT = 1 << 22
# of one mask; on CPUs the operating system would kill the process before torch could refuse
MAX_MASK_BYTES = 16 * 1024 * MEBIBYTE

_pairs: BoundedCache[Tensor] = BoundedCache(CACHE_BYTES)


def allowed_pairs(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, query_start: Tensor | None = None
) -> Tensor | None:
    """Return which query may read which key: bool [batch or 1, heads or 1, queries, keys]. None: all may read all.

    query_start: while compiling, the position of the first query if the layout's is a guess; see `AttentionCall`.
    """
    if torch.compiler.is_compiling():
        traced = _written_pairs if is_written() else _traced_pairs
        return traced(layout, tokens, batch_size, device, query_start)
    if is_idle(tokens):
        if reads_everything(layout):
            return None
        check_size(layout, 1)
        return _pairs.get((mask_key(layout), device), lambda: _of_pattern(layout, device))
    check_size(layout, batch_size)
    if layout.is_drawn_by_document:
        return _of_documents(layout, tokens, batch_size, device)
    return _of_locations(layout, tokens, device)


def uncached_pairs(layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device) -> Tensor:
    """Return `allowed_pairs`, or a single True for None, without caching them: for masks made in parts."""
    if is_idle(tokens) and not torch.compiler.is_compiling():
        return _of_pattern(layout, device)
    allowed = allowed_pairs(layout, tokens, batch_size, device)
    return torch.ones((), dtype=torch.bool, device=device) if allowed is None else allowed


def check_size(layout: Layout, batch_size: int) -> None:
    """Raise InputError for a mask over all pairs that is too large for any machine."""
    num_bytes, heads = num_mask_bytes(layout, batch_size), num_mask_heads(layout)
    if num_bytes > MAX_MASK_BYTES:
        raise InputError(
            f"A mask over all pairs of {layout.num_queries:,} queries and {layout.num_keys:,} keys (examples: "
            f"{batch_size}, heads that differ: {heads}) takes {num_bytes / 2**30:,.0f} GiB; at most "
            f"{MAX_MASK_BYTES / 2**30:,.0f} GiB are tried. Use backend='blocked' or 'flex', or shorter inputs."
        )


def num_mask_bytes(layout: Layout, batch_size: int, width: int = 4) -> int:
    """Return the size in bytes of a mask over all pairs, with `width` bytes per number."""
    return width * batch_size * num_mask_heads(layout) * layout.num_queries * layout.num_keys


def num_mask_heads(layout: Layout) -> int:
    """Return how many heads a mask over all pairs has: 1 if all heads are alike."""
    return 1 if len(layout.fitted.head_groups()) == 1 else layout.num_heads


def _written_pairs(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, query_start: Tensor | None
) -> Tensor:
    """Return `allowed_pairs` for lengths that may be symbols, in operators that ONNX has."""
    groups = _with_tables(written_groups(layout, tokens), device)
    of_queries, of_keys = axis_locations(layout, tokens, device)
    rows = query_rows(layout, query_start)
    queries, keys = of_queries.positions[:, rows, None], of_keys.positions[:, None, :]
    parts = [pattern.allowed(queries, keys)[:, None].expand(-1, count, -1, -1) for _, count, pattern in groups]
    allowed = parts[0][:, :1] if len(parts) == 1 else torch.cat(parts, 1)
    if tokens.is_empty:
        return allowed
    return _in_documents(allowed, of_queries, of_keys, rows, layout.pattern.is_causal)


def _traced_pairs(
    layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device, query_start: Tensor | None
) -> Tensor:
    return pairs_operator(
        list(tokens.tensors),
        write_call_text(layout.pattern, layout.layer, (), layout.first_head, layout.num_model_heads, layout.is_cross),
        [1 if tokens.is_empty else batch_size, layout.num_heads, layout.num_queries, layout.num_keys],
        layout.query_offset,
        device,
        query_start,
    )


# it may look at masks on the host, which a CUDA graph cannot replay
@torch.library.custom_op("hf_efficient_attn::allowed_pairs", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def pairs_operator(
    masks: list[Tensor | None],
    call_text: str,
    shape: Sequence[int],
    query_offset: int,
    device: torch.device,
    query_start: Tensor | None = None,
) -> Tensor:
    """Return `allowed_pairs` as bool of the whole shape; opaque to a compiler, which cannot trace patterns.

    query_start: int64 scalar that replaces `query_offset`.
    """
    batch_size, num_heads, num_queries, num_keys = shape
    query_offset = query_offset if query_start is None else int(query_start)
    layout = read_layout(call_text, num_heads, num_queries, num_keys, query_offset)
    allowed = allowed_pairs(layout, TokenMask(*masks), batch_size, device)
    if allowed is None:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    return allowed.expand(*shape).clone(memory_format=torch.contiguous_format)


@pairs_operator.register_fake
def _(
    masks: list[Tensor | None],
    call_text: str,
    shape: Sequence[int],
    query_offset: int,
    device: torch.device,
    query_start: Tensor | None = None,
) -> Tensor:
    return torch.empty(*shape, dtype=torch.bool, device=device)


def is_idle(tokens: TokenMask) -> bool:
    """Return whether the mask changes nothing; False may also mean that finding out would cost too much."""
    if tokens.is_empty:
        return True
    if torch.compiler.is_compiling() or any(
        mask is not None for mask in (tokens.segment_ids, tokens.global_mask, tokens.query_segment_ids)
    ):
        return False
    masks = [mask for mask in (tokens.key_mask, tokens.query_mask) if mask is not None]
    return all(mask.device.type == "cpu" and bool(mask.all()) for mask in masks)


def reads_everything(layout: Layout) -> bool:
    """Return whether every query of every head may read every key."""
    first, last = layout.query_offset, layout.query_offset + layout.num_queries - 1
    everything = ((0, layout.num_keys),)
    return all(
        pattern.full_key_intervals(first, last, layout.num_keys) == everything for _, _, pattern in layout.head_groups()
    )


def _of_pattern(layout: Layout, device: torch.device) -> Tensor:
    groups, offset = groups_on(layout, device), layout.query_offset

    def of_rows(rows: slice) -> Tensor:
        return _of_extent(
            groups, range(offset + rows.start, offset + min(rows.stop, layout.num_queries)), layout.num_keys, device
        )

    return _by_queries(layout, 1, device, of_rows)


def _of_extent(groups: HeadGroups, queries: range, num_keys: int, device: torch.device) -> Tensor:
    """Return [1, heads or 1, queries, keys] for these queries and the keys 0 … num_keys - 1."""
    positions = torch.arange(queries.start, queries.stop, device=device)
    return _of_heads(groups, positions[None], torch.arange(num_keys, device=device)[None])


def _by_queries(layout: Layout, batch_size: int, device: torch.device, of_rows: Callable[[slice], Tensor]) -> Tensor:
    """Return `of_rows` of all queries, [batch, heads or 1, queries, keys], computed for some queries at a time.

    The intermediates of a pattern take many times the memory of its result.
    """
    step = max(1, MAX_LOOKED_AT // (max(1, batch_size) * layout.num_keys))
    if step >= layout.num_queries:
        return of_rows(slice(0, layout.num_queries))
    shape = (batch_size, num_mask_heads(layout), layout.num_queries, layout.num_keys)
    allowed = torch.empty(shape, dtype=torch.bool, device=device)
    for first in range(0, layout.num_queries, step):
        rows = slice(first, first + step)
        allowed[:, :, rows] = of_rows(rows)
    return allowed


@cached()
def groups_on(layout: Layout, device: torch.device) -> HeadGroups:
    """Return the groups of heads, with the lookup tables of their patterns as tensors."""
    return _with_tables(layout.head_groups(), device)


def _with_tables(groups: HeadGroups, device: torch.device) -> HeadGroups:
    tabled = tables_on([pattern for _, _, pattern in groups], device)
    return tuple((first, count, pattern) for (first, count, _), pattern in zip(groups, tabled, strict=True))


def _of_heads(groups: HeadGroups, queries: Tensor, keys: Tensor) -> Tensor:
    """Return [batch, heads or 1, queries, keys] for positions [batch, queries] and [batch, keys]."""
    # on other devices it would ask the device how many intervals there are
    look = relation if keys.device.type == "cpu" else allowed_by
    if len(queries) != len(keys):
        batch_size = max(len(queries), len(keys))
        queries, keys = queries.expand(batch_size, -1), keys.expand(batch_size, -1)
    parts = [look(pattern, queries[:, :, None], keys[:, None, :])[:, None] for _, _, pattern in groups]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.expand(-1, count, -1, -1) for part, (_, count, _) in zip(parts, groups, strict=True)], 1)


def _of_locations(layout: Layout, tokens: TokenMask, device: torch.device) -> Tensor:
    """Return the pairs of all documents at once, for patterns that are the same at every length."""
    of_queries, locations = axis_locations(layout, tokens, device)
    batch_size = max(len(of_queries.positions), len(locations.positions))
    groups, offset = groups_on(layout, device), layout.query_offset

    def of_rows(some: slice) -> Tensor:
        rows = slice(offset + some.start, min(offset + some.stop, layout.queries.stop))
        allowed = _at_positions(groups, of_queries.positions[:, rows], locations.positions)
        return _in_documents(allowed, of_queries, locations, rows, layout.pattern.is_causal)

    return _by_queries(layout, batch_size, device, of_rows)


def _in_documents(
    allowed: Tensor, of_queries: TokenLocations, of_keys: TokenLocations, rows: slice | Tensor, is_causal: bool
) -> Tensor:
    """Return the pairs, with those of chosen global tokens, as far as they lie in the same document."""
    if of_keys.is_global is not None:
        chosen = of_keys.is_global[:, rows, None] | of_keys.is_global[:, None, :]
        if is_causal:
            chosen = chosen & (of_keys.positions[:, None, :] <= of_queries.positions[:, rows, None])
        allowed = allowed | chosen[:, None]
    return allowed & _same_document(of_queries, of_keys, rows)


def _at_positions(groups: HeadGroups, queries: Tensor, keys: Tensor) -> Tensor:
    """Return [batch, heads or 1, queries, keys] for positions [batch, queries] and [batch, keys], in any order."""
    if keys.device.type != "cpu" or queries.numel() == 0:
        return _of_heads(groups, queries, keys)
    first, stop, num_keys = int(queries.min()), int(queries.max()) + 1, int(keys.max()) + 1
    is_dense = stop - first <= 2 * queries.shape[1] and num_keys <= 2 * keys.shape[1]
    if not is_dense or min(first, int(keys.min())) < 0:
        return _of_heads(groups, queries, keys)
    # the examples have positions in common, which are looked at once
    (extent,) = _of_extent(groups, range(first, stop), num_keys, keys.device)
    batch = torch.broadcast_shapes(queries.shape[:1], keys.shape[:1])
    rows, columns = (queries - first).expand(*batch, -1), keys.expand(*batch, -1)
    return torch.stack([extent[:, row][:, :, column] for row, column in zip(rows, columns, strict=True)])


def _same_document(of_queries: TokenLocations, of_keys: TokenLocations, rows: slice | Tensor) -> Tensor:
    queries, keys = of_queries.documents[:, None, rows, None], of_keys.documents[:, None, None, :]
    return (queries == keys) & (keys != NO_DOCUMENT)


def _of_documents(layout: Layout, tokens: TokenMask, batch_size: int, device: torch.device) -> Tensor:
    """Return the pairs document by document, each with the pattern drawn for its own length."""
    allowed = torch.zeros(
        batch_size, layout.num_heads, layout.num_queries, layout.num_keys, dtype=torch.bool, device=device
    )
    for row, documents in enumerate(tokens.documents(batch_size, layout.num_keys)):
        for document in documents:
            own = layout.of_document(document)
            first = document.start + own.query_offset - layout.query_offset
            if own.num_queries:
                allowed[row, :, first : first + own.num_queries, document.start : document.stop] = _of_pattern(
                    own, device
                )[0]
    locations = token_locations(tokens, layout.num_keys, device)
    return allowed & _same_document(locations, locations, layout.queries)
