"""What the package calls of FlashAttention-4, on plain torch: the same arguments, layouts and results, without a GPU.

It computes all pairs, honours tables of blocks by leaving out blocks that they do not list, and checks what the kernels
assume: shapes, dtypes and contiguous numbers. Written from the signatures and the documented meaning of the functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.backends.flash.library import UNEQUAL, Library

INF = float("inf")


def wide(tensor: Tensor) -> Tensor:
    return tensor.double()


def examples(q: Tensor, k: Tensor, options: dict[str, Any]) -> list[tuple[int, slice, slice, Any]]:
    """Return (batch index, rows, columns, index of the example in a 4-dimensional tensor or None) of each sequence."""
    bounds = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if bounds[0] is None:
        return [(number, slice(None), slice(None), number) for number in range(len(q))]
    for each in bounds:
        assert (each.dtype, int(each[0])) == (torch.int32, 0)
    assert (q.ndim, int(bounds[0][-1]), int(bounds[1][-1])) == (3, len(q), len(k))
    lists = [each.tolist() for each in bounds]
    lengths = [stop - start for start, stop in zip(lists[0], lists[0][1:], strict=False)]
    assert min(lengths) > 0
    assert max(lengths) == options["max_seqlen_q"]
    pairs = zip(lists[0], lists[0][1:], lists[1], lists[1][1:], strict=False)
    return [(number, slice(a, b), slice(c, d), None) for number, (a, b, c, d) in enumerate(pairs)]


def allowed_pairs(
    batch: int, num_heads: int, num_queries: int, num_keys: int, options: dict[str, Any], by_column: bool
) -> Tensor:
    """Return which pairs a kernel counts, bool [heads, queries, keys]."""
    row, column = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None]
    # the last query has the last key
    shift, allowed = num_keys - num_queries, torch.ones(num_heads, num_queries, num_keys, dtype=torch.bool)
    left, right = options.get("window_size_left"), options.get("window_size_right")
    assert all(limit is None or 0 <= limit < 2**31 - num_queries - num_keys for limit in (left, right))
    if left is not None:
        allowed &= column >= row + shift - left
    if right is not None:
        allowed &= column <= row + shift + right
    mask = options.get("mask_mod")
    if mask is None:
        assert options.get("block_sparse_tensors") is None
        return allowed
    assert (left, right) == (None, None)
    assert mask.__cute_hash__
    for each in options["aux_tensors"] or ():
        # the last dimension is found by its stride
        assert [stride for stride in each.stride() if stride == 1] == [each.stride(-1)]
    head = torch.arange(num_heads)[:, None, None]
    indices = (torch.full((), batch), head, row[None], column[None])
    computed = mask(*indices, None, options["aux_tensors"])
    allowed &= computed
    tables = options.get("block_sparse_tensors")
    if tables is not None:
        listed, is_full = listed_blocks(tables, batch, num_heads, num_queries, num_keys, by_column)
        # a full block is computed without asking the function
        assert bool((computed | ~is_full).all())
        assert not bool((allowed & ~listed).any()), "an allowed pair lies in a block that is not listed"
        allowed &= listed
    return allowed


def listed_blocks(
    tables: Any, batch: int, num_heads: int, num_queries: int, num_keys: int, by_column: bool
) -> tuple[Tensor, Tensor]:
    """Return the pairs of listed blocks, and those of full ones, bool [heads, queries, keys]."""
    counts, indices, full_counts, full_indices, (of_queries, of_keys) = tables
    found = []
    for count, index in ((counts, indices), (full_counts, full_indices)):
        assert count.dtype == index.dtype == torch.int32
        assert (count.stride(-1), index.stride(-1)) == (1, 1)
        count, index = (each[min(batch, len(each) - 1)].expand(num_heads, *each.shape[2:]) for each in (count, index))
        is_entry = torch.arange(index.shape[-1]) < count[..., None]
        # the end of the keys is only masked in the last block that is listed
        assert bool(((index[..., 1:] > index[..., :-1]) | ~is_entry[..., 1:]).all())
        size = (of_queries if by_column else of_keys), (num_queries if by_column else num_keys)
        num_listed = -(-size[1] // size[0])
        blocks = torch.zeros(*index.shape[:-1], num_listed + 1, dtype=torch.bool)
        blocks.scatter_(-1, torch.where(is_entry, index.long(), num_listed), True)
        blocks = blocks[..., :num_listed]
        blocks = blocks.transpose(1, 2) if by_column else blocks
        pairs = blocks.repeat_interleave(of_queries, 1).repeat_interleave(of_keys, 2)
        found.append(pairs[:, :num_queries, :num_keys])
    return found[0] | found[1], found[1]


def check(tensors: list[Tensor], is_backward: bool) -> None:
    assert len({each.dtype for each in tensors}) == 1
    assert all(each.stride(-1) == 1 for each in tensors)
    q, k, v = tensors[:3]
    widths, is_grouped = (q.shape[-1], v.shape[-1]), q.shape[-2] > k.shape[-2]
    assert widths[0] == widths[1] or (widths == UNEQUAL and not (is_backward and is_grouped))


def scores_of(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return capped scores [heads, queries, keys], and the derivative of the cap."""
    assert options["softmax_scale"] > 0
    scores = torch.einsum("nhd,mhd->hnm", q, k) * options["softmax_scale"]
    softcap = options.get("softcap")
    if not softcap:
        return scores, torch.ones_like(scores)
    capped = torch.tanh(scores / softcap)
    return capped * softcap, 1 - capped**2


def repeated(k: Tensor, num_heads: int) -> Tensor:
    return wide(k).repeat_interleave(num_heads // k.shape[-2], -2)


def given(options: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    found = options.get(name)
    if found is None:
        return torch.empty(shape, dtype=dtype)
    assert (tuple(found.shape), found.dtype, found.stride(-1)) == (shape, dtype, 1)
    return found


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, None, None, None]:
    check([q, k, v], is_backward=False)
    num_heads, sinks = q.shape[-2], options.get("learnable_sink")
    out = given(options, "out", (*q.shape[:-1], v.shape[-1]), q.dtype)
    shape = (num_heads, len(q)) if q.ndim == 3 else (len(q), num_heads, q.shape[1])
    lse = given(options, "lse", shape, torch.float32)
    for batch, rows, columns, example in examples(q, k, options):
        own = [each if example is None else each[example] for each in (q, k, v)]
        queries, keys = wide(own[0][rows]), [repeated(each[columns], num_heads) for each in own[1:]]
        scores, _ = scores_of(queries, keys[0], options)
        allowed = allowed_pairs(batch, num_heads, len(queries), len(keys[0]), options, by_column=False)
        scores = scores.masked_fill(~allowed, -INF)
        total = scores.logsumexp(-1)
        if sinks is not None:
            assert (sinks.shape, sinks.dtype in (torch.float16, torch.bfloat16, torch.float32)) == ((num_heads,), True)
            total = torch.logaddexp(total, wide(sinks)[:, None].expand_as(total))
        weights = (scores - total.masked_fill(total == -INF, 0.0)[..., None]).exp()
        result = torch.einsum("hnm,mhd->nhd", weights, keys[1]).to(q.dtype)
        if example is None:
            out[rows], lse[:, rows] = result, total.float()
        else:
            out[example], lse[example] = result, total.float()
    return out, lse, None, None, None


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check([q, k, v, out, grad], is_backward=True)
    num_heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert isinstance(options["softcap"], float)
    # blocks of tables have no order
    assert not (options["deterministic"] and options.get("block_sparse_tensors") is not None)
    states = {"dq": q, "dk": k, "dv": v}
    dq, dk, dv = (given(options, name, tuple(each.shape), each.dtype) for name, each in states.items())
    d_lse = options.get("dlse")
    for batch, rows, columns, example in examples(q, k, options):
        q1, out1, grad1 = (wide((each if example is None else each[example])[rows]) for each in (q, out, grad))
        k1, v1 = (repeated((each if example is None else each[example])[columns], num_heads) for each in (k, v))
        lse1, d_lse1 = (
            None if each is None else wide(each[:, rows] if example is None else each[example]) for each in (lse, d_lse)
        )
        scores, slope = scores_of(q1, k1, options)
        allowed = allowed_pairs(batch, num_heads, len(q1), len(k1), options, by_column=True)
        weights = (scores - lse1[..., None]).exp().masked_fill(~allowed, 0.0)
        delta = torch.einsum("nhd,nhd->hn", grad1, out1)
        delta = delta if d_lse1 is None else delta - d_lse1
        d_scores = weights * (torch.einsum("nhd,mhd->hnm", grad1, v1) - delta[..., None]) * slope
        d_scores = d_scores * options["softmax_scale"]
        found = (
            torch.einsum("hnm,mhd->nhd", d_scores, k1),
            torch.einsum("hnm,nhd->mhd", d_scores, q1).unflatten(1, (-1, group)).sum(2),
            torch.einsum("hnm,nhd->mhd", weights, grad1).unflatten(1, (-1, group)).sum(2),
        )
        for total, each, places in zip((dq, dk, dv), found, (rows, columns, columns), strict=True):
            (total if example is None else total[example])[places] = each.to(total.dtype)
    return dq, dk, dv


def combine(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    assert outs.shape[:-1] == lses.shape
    assert lses.stride(2) == 1
    total = wide(lses).logsumexp(0)
    shares = (wide(lses) - total.masked_fill(total == -INF, 0.0)).exp()
    out.copy_((wide(outs) * shares[..., None]).sum(0))
    lse.copy_(total)


def standin() -> Library:
    """Return the functions of the stand-in."""
    return Library(forward, backward, combine, lambda *tables: tables, lambda each: each, lambda table, *at: table[at])
