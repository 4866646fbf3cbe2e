"""Forward and backward of a call with selected keys: a kernel computes gathered tiles, and lse joins them."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from hf_efficient_attn.backends.gathered.masks import NO_KEYS, TileMasks
from hf_efficient_attn.backends.gathered.rows import Rows, TileRows, TileTerm, gradient_rows, rows_of, wide_rows
from hf_efficient_attn.backends.kernels import (
    Explicit,
    FusedCPU,
    dropper,
    empty_output,
    is_fused,
    lse_of_weights,
    sink_gradient,
    wide,
    wide_dtype,
)
from hf_efficient_attn.backends.machine_costs import costs_of
from hf_efficient_attn.layout.call import AttentionCall, join_sinks
from hf_efficient_attn.layout.grouped_reference import unit, unit_gradient
from hf_efficient_attn.layout.selected_keys import MEAN, PLACES, Sizes, Tiles

# The rows of a call, joined from the rows of tiles by log-sum-exp, or as the mean of the groups that hold them.


class JoinedRows:
    """Output and log-sum-exp of every query so far, relative to the largest log-sum-exp of its tiles.

    Attributes:
        out: [heads of all examples, queries, width], the weighted sum of the outputs of tiles.
        total, largest: [heads of all examples, queries]; the log-sum-exp is largest + log(total).
    """

    def __init__(self, num_heads: int, num_queries: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.out = torch.zeros(num_heads, num_queries, width, dtype=dtype, device=device)
        self.total = self.out.new_zeros(num_heads, num_queries)
        self.largest = self.out.new_full((num_heads, num_queries), -torch.inf)
        self.is_new = [True] * num_heads

    def join(self, numbers: Tensor, out: Tensor, lse: Tensor, bounds: tuple[int, int]) -> None:
        """Join rows of tiles.

        Args:
            numbers: the numbers of the rows, (example · heads + head) · queries + query, [P].
            out, lse: [P, width] and [P], the first overwritten; a row without keys has a log-sum-exp below NO_KEYS.
            bounds: the range of heads of all examples in which the rows lie.
        """
        lse = lse.masked_fill(lse < NO_KEYS, -torch.inf)
        heads = slice(*bounds)
        flat = self.largest.view(-1)
        before = None if all(self.is_new[heads]) else self.largest[heads].clone()
        flat.scatter_reduce_(0, numbers, lse, "amax")
        if before is not None:
            # 1 for rows without keys before and now
            factor = (before - self.largest[heads]).nan_to_num_(0.0, neginf=-torch.inf).exp_()
            self.rescale(heads, factor, before > -torch.inf)
        self.is_new[heads] = [False] * (bounds[1] - bounds[0])
        weight = (lse - flat[numbers]).nan_to_num_(-torch.inf, neginf=-torch.inf).exp_()
        weighted = out.to(self.out.dtype).mul_(weight[:, None])
        self.out.view(-1, self.out.shape[2]).index_add_(0, numbers, weighted)
        self.total.view(-1).index_add_(0, numbers, weight)

    def rescale(self, heads: slice, factor: Tensor, was_there: Tensor) -> None:
        """Multiply the sums of some heads by factors [heads, queries].

        There are many parts, and most factors are 1, so that on CPUs only the other rows are touched.
        """
        self.total[heads].mul_(factor)
        if factor.device.type != "cpu":
            self.out[heads].mul_(factor[..., None])
            return
        changed = torch.nonzero(((factor != 1) & was_there).flatten())[:, 0]
        rows = self.out[heads].view(-1, self.out.shape[2])
        rows.index_copy_(0, changed, rows.index_select(0, changed) * factor.flatten()[changed, None])

    def finish(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return output [*heads, queries, width] and log-sum-exp [*heads, queries]: 0 and -inf for rows without keys.

        heads: the number of examples, and the number of heads of each.
        """
        total = self.total.masked_fill(self.total == 0, 1.0)
        lse = total.log().add_(self.largest)
        return self.out.div_(total[..., None]).unflatten(0, heads), lse.unflatten(0, heads)


class SingleRows:
    """Like `JoinedRows`, if one tile holds all keys of a query: nothing is joined, rows are written to the output.

    Attributes:
        out: [batch, heads, queries, width], zeros if no tile has keys; rows: its rows.
        largest: the log-sum-exp, [heads of all examples, queries].
    """

    def __init__(self, out: Tensor, dtype: torch.dtype) -> None:
        self.out = out.zero_()
        self.rows: Rows = rows_of(self.out)
        num_heads, num_queries = out.shape[0] * out.shape[1], out.shape[2]
        self.largest = torch.full((num_heads, num_queries), -torch.inf, dtype=dtype, device=out.device)

    def join(self, numbers: Tensor, places: Tensor, out: Tensor, lse: Tensor) -> None:
        """Write rows of tiles.

        Args:
            numbers, out, lse: as in `JoinedRows.join`.
            places: the numbers of the rows in `rows`, [P]; any number for rows without keys.
        """
        has_none = lse < NO_KEYS
        lse = lse.masked_fill(has_none, -torch.inf)
        if has_none.device.type != "cpu":
            out = out.masked_fill(has_none[:, None], 0.0)
        else:
            # few rows have no keys: only these are touched
            out = out.index_fill_(0, torch.nonzero(has_none)[:, 0], 0.0)
        self.largest.view(-1).scatter_reduce_(0, numbers, lse.to(self.largest.dtype), "amax")
        self.rows.add(places, out)

    def finish(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; see `JoinedRows.finish`."""
        return self.out, self.largest.unflatten(0, heads)


class MeanRows:
    """Like `JoinedRows`, for means: the sum of the outputs of a query's tiles, divided by the number of its places."""

    def __init__(self, divisors: Tensor, width: int) -> None:
        self.divisors = divisors
        self.out = divisors.new_zeros(*divisors.shape, width)

    def join(self, numbers: Tensor, out: Tensor, lse: Tensor, bounds: tuple[int, int]) -> None:
        """Add the outputs of rows; see `JoinedRows.join`."""
        out = out.to(self.out.dtype).masked_fill((lse < NO_KEYS)[:, None], 0.0)
        self.out.view(-1, self.out.shape[2]).index_add_(0, numbers, out)

    def finish(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the output, and zeros for a log-sum-exp that is not used; see `JoinedRows.finish`."""
        out = self.out.div_(self.divisors[..., None])
        return out.unflatten(0, heads), torch.zeros_like(self.divisors).unflatten(0, heads)


# pairs that are computed together: on CPUs few enough for their buffers to stay in a cache, more if there are no
# buffers because the kernel needs no mask, and on other devices enough to be worth a launch
MOST_PAIRS, MOST_BARE_PAIRS, MOST_PAIRS_OFF_CPU = 1 << 20, 1 << 22, 1 << 24
# any number, if neither the pairs nor a mask of them are kept
ANY_PAIRS = 1 << 60
Joined = JoinedRows | SingleRows | MeanRows
Part = tuple[Tiles, Tensor | None, "FusedCPU | Explicit", list[TileTerm]]


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B, H, Nq, Dv] in q's dtype, lse [B, H, Nq], and which queries attend only to themselves [B, H, Nq].

    lse is in float32 or float64; the last tensor is empty unless the selection has `attends_to_self_last`.
    """
    dtype, (q, k, v) = q.dtype, costs_of(call).forward.in_fast_dtype(q, k, v)
    work = Work(q, k, v, call, seed)
    joined = work.joined_rows(q, v)
    for part in work.parts():
        _forward_tiles(work, part, joined)
    alone = torch.zeros(0, dtype=torch.bool, device=q.device)
    if call.chosen.attends_to_self_last and not isinstance(joined, MeanRows):  # type: ignore[union-attr]
        alone = (joined.largest == -torch.inf).view(q.shape[:3])
        for part in work.parts(alone):
            _forward_tiles(work, part, joined)
    rows, lse = joined.finish(q.shape[:2])
    if call.sinks is not None:
        rows, lse = join_sinks(rows, lse, call.sinks)
    is_placed = isinstance(joined, SingleRows) and rows.dtype == dtype and call.sinks is None
    out = joined.out if is_placed else empty_output(q, v, dtype).copy_(rows)
    masked = call.masked_queries
    if masked is not None:
        out.masked_fill_(masked, 0.0)
        lse.masked_fill_(masked[..., 0], -torch.inf)
    return out, lse, alone


def _forward_tiles(work: "Work", part: Part, joined: Joined) -> None:
    """Compute tiles and join them to the rows so far."""
    tiles, mask, kernel, _ = part
    rows = TileRows(tiles, work.call.layout.num_keys)
    q, k, v, _ = work.states(rows)
    out, lse = kernel.forward(q, k, v, mask)
    lse = lse.masked_fill(tiles.queries < 0, -torch.inf)
    numbers, out, lse = work.row_numbers(tiles).flatten(), out.flatten(0, 2), lse.flatten()
    if isinstance(joined, SingleRows):
        joined.join(numbers, rows.query_numbers(joined.rows).flatten(), out, lse)
    else:
        joined.join(numbers, out, lse, (tiles.first_head, tiles.stop_head))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    call: AttentionCall,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and of the values of each term and the sinks.

    If keys are the queries scaled to length 1, the gradient of q is that of both, and that of k is empty.
    """
    dtype, (grad, q, k, v, out) = q.dtype, costs_of(call).backward.in_fast_dtype(grad, q, k, v, out)
    work = Work(q, k, v, call, seed)
    masked = call.masked_queries
    grad = grad if masked is None else grad.masked_fill(masked, 0.0)
    lse = lse_of_weights(lse).contiguous()
    is_shared = work.chosen.unit_keys
    grads = [torch.zeros_like(each, dtype=wide_dtype(q.dtype)) for each in ((q, v) if is_shared else (q, k, v))]
    if any(not _is_dense(each) for each in grads):
        grads = [each.contiguous() for each in grads]
    d_terms = [gradient_rows(term.values) for term in call.terms]
    if call.chosen.join == MEAN:  # type: ignore[union-attr]
        grad = grad / work.divisors().view(*q.shape[:3], 1).to(grad.dtype)
        rows = [rows_of(each) for each in (grad, lse)]
    else:
        rows = [rows_of(each) for each in (grad, out, lse)]
    # rows of dq, dk and dv: dq twice if keys are queries
    targets = [rows_of(each) for each in (grads[0], *grads[-2:])]
    for part in chain(work.parts(), work.parts(alone) if alone.numel() else ()):
        _backward_tiles(work, part, rows, targets, [gradient for _, gradient in d_terms])
    dq, *dk, dv = (total.to(dtype) for total in grads)
    learned = [total.to(term.values.dtype) for (total, _), term in zip(d_terms, call.terms, strict=True)]
    learned = learned if call.sinks is None else [*learned, sink_gradient(call.sinks, grad, out, lse)]
    return dq, dq.new_empty(0) if is_shared else dk[0], dv, learned


def _backward_tiles(work: "Work", part: Part, rows: list[Rows], targets: list[Rows], d_terms: list[Rows]) -> None:
    """Add the gradients of tiles to the targets dq, dk and dv, and to the gradients of the terms."""
    tiles, mask, kernel, terms = part
    own = TileRows(tiles, work.call.layout.num_keys)
    q, k, v, vectors = work.states(own)
    is_empty = tiles.queries < 0
    if len(rows) == 2:
        # every group has its own softmax; the lse of the call says which tokens are masked (+inf): their weights are 0
        grad, joint = (own.of_queries(each) for each in rows)
        out, lse = kernel.forward(q, k, v, mask)
        lse = lse.masked_fill(is_empty | (lse < NO_KEYS) | (joint == torch.inf), torch.inf)
        out = out.to(q.dtype)
    else:
        grad, out, lse = (own.of_queries(each) for each in rows)
        lse = lse.masked_fill(is_empty, torch.inf)
    dq, dk, dv, *d_scores = _gradients(kernel, (grad, q, k, v, out, lse), mask)
    added = [tiles.added_keys(dk), tiles.added_keys(dv)]
    if vectors is not None:
        added[0] = unit_gradient(wide(vectors), wide(added[0]))
    if vectors is not None and tiles.own_place is not None:
        tiles.own_keys(added[0]).add_(dq)
    else:
        targets[0].add(own.query_numbers(targets[0]), dq)
    for target, gradient in zip(targets[1:], added, strict=True):
        target.add(own.key_numbers(target), gradient)
    for term, gradient_of_term in zip(terms, d_terms, strict=True):
        term.add_gradient(gradient_of_term, d_scores[0])


def _gradients(kernel: FusedCPU | Explicit, states: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients that the kernel computes for states [sets, tiles, ...]."""
    grad, q, k, v, out, lse = states
    if isinstance(kernel, Explicit) or q.shape[1] <= q.shape[0]:
        return kernel.backward(grad, q, k, v, out, lse, mask)
    # the fused operator interleaves the rows of an example's heads; if tiles are examples, their rows stay together
    grad, q, k, v, out, lse = (each.transpose(0, 1) for each in states)
    mask = None if mask is None else mask.transpose(0, 1)
    found = kernel.backward(grad, q, k, v, out, lse.contiguous(), mask)
    return tuple(each.transpose(0, 1) for each in found)


class Work:
    """A call with its tensors as rows, and the tiles in which it is computed, the same in both passes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, seed: int) -> None:
        assert call.chosen is not None
        self.call, self.chosen, self.seed = call, call.chosen, seed
        self.device, self.is_fused = q.device, is_fused(call)
        self.q, self.k, self.v = rows_of(q), rows_of(k), rows_of(v)
        self.masks = TileMasks(call, q.device, q.dtype)
        is_bare = self.is_fused and self.chosen.has_full_tiles and self.masks.leave_earlier_keys
        most = MOST_BARE_PAIRS if is_bare else MOST_PAIRS if q.device.type == "cpu" else MOST_PAIRS_OFF_CPU
        if self.is_fused and self.chosen.shares_masks and len(self.masks.groups) == 1:
            most = ANY_PAIRS
        self.sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], most, key_cost(call))
        self.values = [wide_rows(term.values) for term in call.terms]

    def parts(self, alone: Tensor | None = None) -> Iterator[Part]:
        """Yield tiles with their mask, kernel and terms; `alone`: those of queries that attend only to themselves."""
        self_pairs = "only" if alone is not None else "never" if self.chosen.attends_to_self_last else "as all"
        all_tiles = self.chosen.tiles(self.call.layout, self.call.tokens, self.sizes, alone)
        parts = (part for tiles in all_tiles for part in self.masks.split(tiles, self_pairs))
        for number, (tiles, is_full) in enumerate(parts, 1 if alone is None else 1 << 32):
            is_triangle = self.is_fused and self.call.scale > 0 and self.masks.are_triangles(tiles, self_pairs)
            mask = None if is_full or is_triangle else self.masks.of(tiles, self_pairs)
            if self.is_fused:
                yield tiles, mask, FusedCPU(self.call.scale, is_triangle), []
                continue
            terms, call = self.terms(tiles), self.call
            drop = dropper(call.dropout, self.seed + number, self.device)
            scores = [term.scores for term in terms]
            kernel = Explicit(call.scale, scores, drop, call.dropout, call.softcap, call.sinks is not None)
            yield tiles, mask, kernel, terms

    def states(self, rows: TileRows) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values of tiles, and the unscaled keys [sets, places, width] or None."""
        values = rows.of_keys(self.v)
        if not self.chosen.unit_keys:
            return rows.of_queries(self.q), rows.of_keys(self.k), values, None
        vectors, tiles = rows.keys(self.k), rows.tiles
        queries = rows.of_queries(self.q) if tiles.own_place is None else tiles.own_keys(vectors)
        return queries, tiles.of_keys(unit(vectors)), values, vectors

    def terms(self, tiles: Tiles) -> list[TileTerm]:
        """Return the parts of the terms that tiles use."""
        if not self.call.terms:
            return []
        if self.chosen.labels_count == PLACES and tiles.query_places is not None:
            queries, keys = tiles.query_places, torch.arange(tiles.tile_keys, device=self.device)
        else:
            queries, keys = self.masks.queries(tiles).positions, self.masks.keys(tiles).positions
        pairs = queries[..., None], keys[..., None, :]
        return [
            TileTerm(term, values, term.label.of(*pairs), tiles)
            for term, values in zip(self.call.terms, self.values, strict=True)
        ]

    def joined_rows(self, q: Tensor, v: Tensor) -> Joined:
        """Return what joins the rows of tiles."""
        num_heads, dtype = q.shape[0] * q.shape[1], wide_dtype(q.dtype)
        if self.chosen.join == MEAN:
            return MeanRows(self.divisors(), v.shape[3])
        if self.chosen.has_single_rows(self.call.layout):
            return SingleRows(dense_like(q, v), dtype)
        return JoinedRows(num_heads, q.shape[2], v.shape[3], dtype, q.device)

    def divisors(self) -> Tensor:
        """Return the divisors of the sums of the outputs of groups, [heads of all examples, queries]."""
        counts = self.chosen.place_counts(self.call.layout, self.sizes)  # type: ignore[attr-defined]
        return counts.clamp(min=1).to(wide_dtype(self.call.inputs.dtype)) + self.chosen.mean_epsilon  # type: ignore[attr-defined]

    def row_numbers(self, tiles: Tiles) -> Tensor:
        """Return the numbers of the queries among those of all heads of all examples."""
        heads = tiles.examples[:, None, None] * self.sizes.num_heads + tiles.heads
        return heads * self.call.layout.num_queries + tiles.queries.clamp(min=0)


def key_cost(call: AttentionCall) -> float:
    """Return the time of a key of a tile, in scores of its kernel."""
    costs = costs_of(call)
    return costs.tile_key if is_fused(call) else costs.tile_key / costs.forward.explicit


def dense_like(q: Tensor, v: Tensor) -> Tensor:
    """Return an uninitialised output in the dtype of q, whose rows can be written to."""
    out = empty_output(q, v, q.dtype)
    return out if _is_dense(out) else out.contiguous()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the rows of a tensor can be written to through their view."""
    table = rows_of(tensor).table
    return table.data_ptr() == tensor.data_ptr()
