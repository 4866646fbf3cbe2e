"""Locality-sensitive hashing: random rotations that are a pure function of integers, and the buckets of vectors.

Source: Kitaev et al. (arXiv:2001.04451), section 2; Andoni et al. (arXiv:1509.02897).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.grouped_keys import ChunkedOrder
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.layout.transfer import derived, on_host

MASK = 0xFFFFFFFF
# odd numbers below 2³¹, so that products with 32-bit numbers fit into 63 bits on every device
FIRST, SECOND, STEP = 0x21F0AAAD, 0x735A2D97, 0x1E3779B1
# how many numbers stay in the cache of a CPU
CACHED_NUMBERS = 1 << 18


def mixed(numbers: Tensor) -> Tensor:
    """Return 32-bit hashes, as int64, in which every bit depends on all bits of the number; equal on every device."""
    numbers = numbers & MASK
    numbers = ((numbers ^ (numbers >> 16)) * FIRST) & MASK
    numbers = ((numbers ^ (numbers >> 15)) * SECOND) & MASK
    return numbers ^ (numbers >> 15)


def normals(shape: tuple[int, ...], seed: int, layer: int, step: Tensor) -> Tensor:
    """Return numbers from N(0, 1) as a pure function of the arguments, float32, on the device of `step`.

    They do not depend on the random state of torch, and do not change it. A compiler can trace this, but no generator.
    """
    key = mixed(mixed(step + seed * STEP) + layer * STEP + 1)
    count = math.prod(shape)
    places = 2 * torch.arange(count, device=step.device)
    first, second = (mixed(mixed(places + part) + key) >> 8 for part in (0, 1))
    # Box-Muller transform; float32 holds 24 bits
    radius = (-2.0 * ((first + 1).float() * 2.0**-24).log()).sqrt()
    return (radius * (second.float() * (2.0**-24 * 2.0 * math.pi)).cos()).view(shape)


def draw_rotations(
    num_heads: int, head_dim: int, num_hashes: int, factors: tuple[int, ...], seed: int, layer: int, step: Tensor
) -> Tensor:
    """Return the rotations of a layer, [H, D, r, Σ factors / 2], for an integer tensor `step`."""
    return normals((num_heads, head_dim, num_hashes, sum(factors) // 2), seed, layer, step)


@torch.no_grad()
def hash_vectors(vectors: Tensor, rotations: Tensor, factors: tuple[int, ...]) -> Tensor:
    """Return the bucket of every vector in every round, int32 [B, H, r, N], computed at least in float32.

    A bucket is argmax([xR, −xR]). With several factors, the bucket's number has a digit for each factor, the lowest
    digit first. The products of one vector with different directions are compared, and no two directions are equal, so
    equal tokens cause no ties and are in the same bucket. If the two largest products are almost equal, rounding
    decides.

    Shapes: vectors [B, H, N, D], rotations [H, D, r, Σ factors / 2].

    >>> vectors = torch.tensor([[[[1.0, 0.0], [-2.0, 0.1]]]])
    >>> hash_vectors(vectors, torch.eye(2).view(1, 2, 1, 2), (4,)).tolist()
    [[[[0, 2]]]]
    """
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    rounds = []
    with autocast_off(vectors.device.type):
        vectors, rotations = vectors.detach().to(dtype), rotations.to(dtype)
        # one round and some tokens at a time, because the rotated vectors may be larger than the vectors
        for rotation in rotations.unbind(2):
            parts = _parts(vectors, rotation)
            found = [_bucket(part @ rotation, factors) for part in parts]
            rounds.append(found[0] if len(found) == 1 else torch.cat(found, 2))
    return torch.stack(rounds, 2)


def _parts(vectors: Tensor, rotation: Tensor) -> tuple[Tensor, ...]:
    """Return the vectors in parts that, rotated, fit into the CPU's cache; one part on other devices or compiled."""
    if vectors.device.type != "cpu" or torch.compiler.is_compiling():
        return (vectors,)
    per_token = max(1, vectors.shape[0] * vectors.shape[1] * rotation.shape[2])
    return vectors.split(max(1, CACHED_NUMBERS // per_token), 2)


def _bucket(rotated: Tensor, factors: tuple[int, ...]) -> Tensor:
    """Return the bucket of every rotated vector, int32 [B, H, N]."""
    bucket, first, product = torch.zeros_like(rotated[..., 0], dtype=torch.int32), 0, 1
    for factor in factors:
        bucket = bucket + _highest(rotated[..., first : first + factor // 2]).int() * product
        first, product = first + factor // 2, product * factor
    return bucket


def _highest(rotated: Tensor) -> Tensor:
    """Return argmax([rotated, -rotated]) over the last dimension, without concatenating the two.

    >>> _highest(torch.tensor([[1.0, -2.0], [3.0, -2.0]])).tolist()
    [3, 0]
    """
    sizes = rotated.abs()
    if rotated.device.type != "cpu" or torch.compiler.is_compiling():
        place = sizes.argmax(-1, keepdim=True)
    else:
        place = _place_of_largest(sizes)
    is_negative = rotated.gather(-1, place) < 0
    return (place + is_negative * rotated.shape[-1])[..., 0]


def _place_of_largest(sizes: Tensor) -> Tensor:
    """Return argmax over the last dimension, which is kept; 5 times as fast as torch's on CPUs, overwrites `sizes`.

    >>> _place_of_largest(torch.tensor([[1.0, 2.0, 2.0], [float("nan"), 0.0, 0.0]])).tolist()
    [[1], [2]]
    """
    count = sizes.shape[-1]
    is_largest = sizes.eq_(sizes.amax(-1, keepdim=True))
    # the first of equal numbers is taken; a vector with NaN has no largest number
    from_last = torch.arange(count, 0, -1, dtype=sizes.dtype, device=sizes.device)
    return (count - is_largest.mul_(from_last).amax(-1, keepdim=True).long()).clamp_(max=count - 1)


# From buckets to chunks: which tokens are in a chunk, and which chunks a chunk attends to.
#
# Every document (a row of the batch, or one of several packed in a row) is sorted, split into chunks and closed to a
# ring as if it were alone, so that padding, packing and other examples change nothing.
#
# Shapes: B batch, H heads, r rounds, N keys, c tokens of a chunk, M chunks of a round.


@dataclass(frozen=True)
class LSHRule:
    """How tokens are put into chunks; see also the config.

    Attributes:
        num_buckets: b, the number of buckets of a round.
        chunk_tokens, before, after: c, and the number of chunks before and after its own that a chunk attends to.
    """

    num_buckets: int
    chunk_tokens: int
    before: int
    after: int
    attend_across_buckets: bool
    count_duplicates: bool
    chunk_by_bucket: bool


@dataclass(frozen=True)
class Places:
    """Where tokens are in the chunks; every group of tokens starts a new chunk.

    Attributes:
        order: the tokens in the order of the chunks, [..., M·c]; -1: an empty place.
        chunks: how many chunks each group has, [..., G].
        first_chunk: the index of the first chunk of each group, [..., G].
    """

    order: Tensor
    chunks: Tensor
    first_chunk: Tensor


def chunk_order(buckets: Tensor, rule: LSHRule, real: Tensor | None, documents: Tensor | None) -> ChunkedOrder:
    """Return the order in which the tokens of a layer form chunks.

    Args:
        buckets: int [B, H, r, N].
        real: bool [B, N], False = padding, or an empty place of a cache; None: all are tokens.
        documents: [B, N], neighbours with equal numbers form a document; None: every example is one.
    """
    numbers, num_documents = numbered(documents)
    tokens = buckets.shape[-1]
    size = rule.chunk_tokens
    document = torch.zeros_like(buckets[:, :1, :1]) if numbers is None else numbers[:, None, None]
    bucket = document.long() * rule.num_buckets + buckets
    num_groups = num_documents * (rule.num_buckets if rule.chunk_by_bucket else 1)
    group = bucket if rule.chunk_by_bucket else document.long()
    if real is not None:
        is_real = real[:, None, None]
        # padding comes last, and is in no group
        group = torch.where(is_real, group, num_groups)
        bucket = torch.where(is_real, bucket, num_documents * rule.num_buckets)
    most = min(tokens, tokens // size + num_groups) if num_groups > 1 else (tokens + size - 1) // size
    places = place(bucket, group, num_groups, size, most)
    order, rounds = places.order, buckets.shape[2]
    reads, num_chunks = None, order.shape[-1] // size
    if rule.chunk_by_bucket:
        # enough empty chunks that the ring of all chunks never connects both ends of a bucket
        empty = max(rule.before, rule.after) - (rounds - 1)
        order = torch.nn.functional.pad(order, (0, max(0, empty) * size), value=-1)
    elif not is_one_ring(real, documents, rounds, num_chunks, rule):
        reads = neighbours(places, rounds, num_chunks, rule)
    shared = None
    if rule.chunk_by_bucket or not rule.attend_across_buckets:
        # buckets of different rounds have different numbers
        of_round = torch.arange(rounds, device=buckets.device)[:, None] * (num_documents * rule.num_buckets)
        shared = torch.where(order < 0, -1, bucket.gather(-1, order.clamp(min=0)) + of_round)
    return ChunkedOrder(
        order,
        size,
        rule.before,
        rule.after,
        buckets=shared,
        counts_duplicates=rule.count_duplicates,
        reads=reads,
    )


def place(keys: Tensor, groups: Tensor, num_groups: int, size: int, most: Any) -> Places:
    """Return where tokens are in chunks, sorted by (key, position); every group starts a new chunk.

    Args:
        keys: the sort keys of the tokens, [B, H, r, N]; tokens of a group have neighbouring keys.
        groups: the group of every token, [B, 1 or H, 1 or r, N], ascending with the keys; `num_groups`: no group.
        most: an upper limit for the number of chunks of all groups together.
    """
    counts = torch.zeros((*groups.shape[:-1], num_groups + 1), dtype=torch.long, device=keys.device)
    counts = counts.scatter_add(-1, groups, torch.ones_like(groups))
    chunks = (counts + size - 1) // size
    first_chunk, first_rank = chunks.cumsum(-1) - chunks, counts.cumsum(-1) - counts
    # stable: within a bucket, tokens keep their order on every device
    order = keys.argsort(stable=True, dim=-1)
    found = groups.expand_as(keys).gather(-1, order)
    wide = (*keys.shape[:-1], num_groups + 1)
    slots = torch.arange(keys.shape[-1], device=keys.device) - first_rank.expand(wide).gather(-1, found)
    slots = slots + first_chunk.expand(wide).gather(-1, found) * size
    if is_known(keys) and num_groups > 1:
        most = max(1, int(chunks[..., :-1].sum(-1).max()))
    slots = torch.where(found < num_groups, slots, most * size)
    placed = torch.full((*keys.shape[:-1], most * size + 1), -1, dtype=torch.long, device=keys.device)
    placed = placed.scatter(-1, slots, order)[..., :-1]
    return Places(placed, chunks[..., :-1], first_chunk[..., :-1])


def is_one_ring(real: Tensor | None, documents: Tensor | None, rounds: int, num_chunks: Any, rule: LSHRule) -> bool:
    """Return whether all chunks of every example form one ring, which is the default of `ChunkedOrder`.

    False while compiling, because a compiler cannot compare the number of chunks.
    """
    if real is not None or documents is not None or torch.compiler.is_compiling():
        return False
    return num_chunks > 1 and rule.before + 1 + rule.after <= rounds * num_chunks


def neighbours(places: Places, rounds: int, num_chunks: Any, rule: LSHRule) -> Tensor:
    """Return which chunks each chunk attends to, as indices of chunks of all rounds: [B, 1, r·M, before + 1 + after].

    The chunks of a document, one round after the other, form a ring, as in the authors' code: the first chunk attends
    to the last chunk of the last round. If a document has one chunk, this attends only to itself, in every round.
    """
    chunks, first_chunk = places.chunks[:, 0, 0], places.first_chunk[:, 0, 0]
    device, batch_size = chunks.device, chunks.shape[0]
    # one axis for all rounds, because a compiler cannot join the axes of rounds and chunks for every length
    on_axis = torch.arange(rounds * num_chunks, device=device)
    number = (on_axis % num_chunks).expand(batch_size, -1)
    last = chunks.cumsum(-1)
    document = torch.searchsorted(last, number.contiguous(), right=True).clamp(max=chunks.shape[1] - 1)
    count, first = chunks.gather(1, document)[..., None], first_chunk.gather(1, document)[..., None]
    is_chunk = (number < last[:, -1:])[..., None]
    steps = torch.arange(-rule.before, rule.after + 1, device=device)
    on_ring = (on_axis // num_chunks)[:, None] * count + number[..., None] - first
    on_ring = (on_ring + steps) % (rounds * count).clamp(min=1)
    read = on_ring // count.clamp(min=1) * num_chunks + first + on_ring % count.clamp(min=1)
    return torch.where(is_chunk & ((count > 1) | (steps == 0)), read, -1)[:, None]


def numbered(documents: Tensor | None) -> tuple[Tensor | None, Any]:
    """Return the documents of each example, numbered from 0, and an upper limit for their number per example."""
    if documents is None:
        return None, 1
    numbers = derived(lambda each: (each[:, 1:] != each[:, :-1]).cumsum(1), documents)
    numbers = derived(lambda each: torch.nn.functional.pad(each, (1, 0)), numbers)
    if torch.compiler.is_compiling():
        return numbers, documents.shape[1]
    return numbers, int(on_host(numbers).max()) + 1


def is_known(tensor: Tensor) -> bool:
    """Return whether the contents of a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
