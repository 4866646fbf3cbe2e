"""Locality-sensitive hashing: random rotations that are a pure function of numbers, and the buckets of vectors.

Source: Kitaev et al. (arXiv:2001.04451), section 2; Andoni et al. (arXiv:1509.02897).
"""

import math

import torch
from torch import Tensor

from hf_efficient_attn.layout.tracing import autocast_off

MASK = 0xFFFFFFFF
# odd numbers below 2³¹, so that products with 32-bit numbers fit into 63 bits on every device
FIRST, SECOND, STEP = 0x21F0AAAD, 0x735A2D97, 0x1E3779B1
# numbers that stay in the cache of a CPU
CACHED_NUMBERS = 1 << 18


def mixed(numbers: Tensor) -> Tensor:
    """Return 32-bit numbers, as int64, whose bits depend on all bits of the given ones; equal on every device."""
    numbers = numbers & MASK
    numbers = ((numbers ^ (numbers >> 16)) * FIRST) & MASK
    numbers = ((numbers ^ (numbers >> 15)) * SECOND) & MASK
    return numbers ^ (numbers >> 15)


def normals(shape: tuple[int, ...], seed: int, layer: int, step: Tensor) -> Tensor:
    """Return numbers from N(0, 1) as a pure function of the arguments, float32, on the device of `step`.

    They do not depend on the random state of torch, and do not change it. A compiler can trace this, unlike generators.
    """
    key = mixed(mixed(step + seed * STEP) + layer * STEP + 1)
    count = math.prod(shape)
    places = 2 * torch.arange(count, device=step.device)
    first, second = (mixed(mixed(places + part) + key) >> 8 for part in (0, 1))
    # Box and Muller; 24 bits are what float32 can hold
    radius = (-2.0 * ((first + 1).float() * 2.0**-24).log()).sqrt()
    return (radius * (second.float() * (2.0**-24 * 2.0 * math.pi)).cos()).view(shape)


def draw_rotations(
    num_heads: int, head_dim: int, num_hashes: int, factors: tuple[int, ...], seed: int, layer: int, step: Tensor
) -> Tensor:
    """Return the rotations of a layer, [H, D, r, Σ factors / 2], for an integer tensor `step`."""
    return normals((num_heads, head_dim, num_hashes, sum(factors) // 2), seed, layer, step)


@torch.no_grad()
def hash_vectors(vectors: Tensor, rotations: Tensor, factors: tuple[int, ...]) -> Tensor:
    """Return the bucket of every vector in every round, int32 [B, H, r, N]; it is computed in float32 at least.

    A bucket is argmax([xR, −xR]); of several factors, the first counts ones, the second multiples of the first, ….
    What is compared are products of one vector with different directions, of which no two are equal: equal tokens are
    no ties here, and are in the same bucket. Rounding decides where the two largest lie within it of each other.

    Shapes: vectors [B, H, N, D], rotations [H, D, r, Σ factors / 2].

    >>> vectors = torch.tensor([[[[1.0, 0.0], [-2.0, 0.1]]]])
    >>> hash_vectors(vectors, torch.eye(2).view(1, 2, 1, 2), (4,)).tolist()
    [[[[0, 2]]]]
    """
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    rounds = []
    with autocast_off(vectors.device.type):
        vectors, rotations = vectors.detach().to(dtype), rotations.to(dtype)
        # one by one, and some tokens at a time: the rotated vectors may be larger than the vectors
        for rotation in rotations.unbind(2):
            parts = _parts(vectors, rotation)
            found = [_bucket(part @ rotation, factors) for part in parts]
            rounds.append(found[0] if len(found) == 1 else torch.cat(found, 2))
    return torch.stack(rounds, 2)


def _parts(vectors: Tensor, rotation: Tensor) -> tuple[Tensor, ...]:
    """Return vectors of some tokens at a time, whose rotated ones stay in a cache; all at once off CPUs or compiled."""
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
    """Return argmax([rotated, -rotated]) over the last dimension, without laying the two side by side.

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
    """Return argmax over the last dimension, which is kept, overwriting the numbers: in a fifth of its time on CPUs.

    >>> _place_of_largest(torch.tensor([[1.0, 2.0, 2.0], [float("nan"), 0.0, 0.0]])).tolist()
    [[1], [2]]
    """
    count = sizes.shape[-1]
    is_largest = sizes.eq_(sizes.amax(-1, keepdim=True))
    # of equal ones the first counts; of vectors with NaN none is the largest
    from_last = torch.arange(count, 0, -1, dtype=sizes.dtype, device=sizes.device)
    return (count - is_largest.mul_(from_last).amax(-1, keepdim=True).long()).clamp_(max=count - 1)
