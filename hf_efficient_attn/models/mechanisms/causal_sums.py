"""Sums over the keys up to each query, in chunks, so that time and memory grow as the text does.

Sums are added up over chunks of tokens, and pairs are computed within chunks only.

Keys may be given with an exponent each, by whose exp they are larger. Sums then are divided by exp of the largest
exponent of the keys that they have: a running maximum, as exact as sums without exponents, whatever the chunks, which
never overflows. Shapes: R texts, H heads, L tokens, F features, X numbers of a value, N chunks of C tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.tracing import is_exporting

# exponent of a sum without keys: its exp is 0 beside that of any other, and their difference is finite
NOTHING = -1e30
# more than any text has: a graph that is traced does not know the length of its texts
MOST_TOKENS = 2**24


@dataclass(frozen=True)
class KeySum:
    """A sum over keys, Σ φ(k) vᵀ.

    Attributes:
        sums: [..., F, X], divided by exp(exponent).
        exponent: the largest of the keys, [...]; None: they have none.
    """

    sums: Tensor
    exponent: Tensor | None = None

    def plus(self, other: "KeySum") -> "KeySum":
        """Return the sum over the keys of both."""
        if self.exponent is None or other.exponent is None:
            return KeySum(self.sums + other.sums)
        largest = torch.maximum(self.exponent, other.exponent)
        own, others = (
            each.sums * (each.exponent - largest).exp()[..., None, None]  # type: ignore[operator]
            for each in (self, other)
        )
        return KeySum(own + others, largest)


def key_sum(keys: Tensor, values: Tensor, exponents: Tensor | None) -> KeySum:
    """Return the sum over all keys, [..., L, F] with values [..., L, X] and exponents [..., L]."""
    if exponents is None:
        return KeySum(keys.mT @ values)
    largest = exponents.amax(-1)
    scaled = values * (exponents - largest.unsqueeze(-1)).exp().unsqueeze(-1)
    return KeySum(keys.mT @ scaled, largest)


def pair_weights(queries: Tensor, keys: Tensor, exponents: Tensor | None, largest: Tensor | None) -> Tensor:
    """Return φ(q)·φ(k) of each query and the keys up to it, 0 of others, [..., L, L].

    largest: by exp of what the products of a query are divided, [..., L], at least the largest exponent up to it.
    """
    weights = (queries @ keys.mT).tril()
    if exponents is None or largest is None:
        return weights
    # those of later keys may be larger
    return weights * (exponents.unsqueeze(-2) - largest.unsqueeze(-1)).clamp(max=0).exp()


def causal_sums(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    before: KeySum | None,
    chunk_tokens: int,
    exponents: Tensor | None = None,
) -> Tensor:
    """Return φ(q)ᵀ Σ φ(k) vᵀ over the keys up to each query, [R, H, L, X], divided by exp of the largest exponent.

    Args:
        queries, keys: φ(q) and φ(k), [R, H, L, F].
        values: [R, H, L, X].
        before: the sum over keys before all of these, [R, H, F, X]; None: there are none.
        exponents: of the keys, [R, H, L]; None: they have none.
    """
    tokens = queries.shape[2]
    # an exporter takes one chunk for a special case, and never sees fewer than two
    spare = chunk_tokens if is_exporting() and tokens > 1 else 0
    num_chunks = (tokens + spare + chunk_tokens - 1) // chunk_tokens
    if num_chunks == 1:
        return _of_chunk(queries, keys, values, exponents, before)
    room = num_chunks * chunk_tokens - tokens
    queries, keys, values = (
        pad(each, (0, 0, 0, room)).unflatten(2, (num_chunks, chunk_tokens)) for each in (queries, keys, values)
    )
    if exponents is not None:
        exponents = pad(exponents, (0, room), value=NOTHING).unflatten(2, (num_chunks, chunk_tokens))
    most_chunks = MOST_TOKENS // chunk_tokens if torch.compiler.is_compiling() else num_chunks
    earlier = _before_chunks(key_sum(keys, values, exponents), before, most_chunks)
    sums = _of_chunk(queries, keys, values, exponents, earlier)
    if not torch.compiler.is_compiling():
        return sums.flatten(2, 3)[:, :, :tokens]
    # an exporter would take a slice for a promise that chunks are full
    places = torch.arange(tokens, device=sums.device)
    return sums[:, :, places // chunk_tokens, places % chunk_tokens]


def _of_chunk(queries: Tensor, keys: Tensor, values: Tensor, exponents: Tensor | None, before: KeySum | None) -> Tensor:
    """Return the sums of queries of a chunk, [..., C, X], from its pairs and what is before it."""
    largest = None if exponents is None else exponents.cummax(-1).values
    if largest is not None and before is not None:
        largest = torch.maximum(largest, before.exponent.unsqueeze(-1))  # type: ignore[union-attr]
    sums = pair_weights(queries, keys, exponents, largest) @ values
    if before is None:
        return sums
    earlier = queries @ before.sums
    if largest is not None:
        earlier = earlier * (before.exponent.unsqueeze(-1) - largest).exp().unsqueeze(-1)  # type: ignore[union-attr]
    return sums + earlier


def _before_chunks(own: KeySum, before: KeySum | None, most_chunks: int) -> KeySum:
    """Return the sums of all before each chunk, [R, H, N, F, X], from those of chunks and of what is before all.

    most_chunks: at least N.
    """
    first = None if before is None else KeySum(before.sums.unsqueeze(2), _unsqueezed(before.exponent, 2))
    if own.exponent is None:
        earlier = _shifted(KeySum(own.sums.cumsum(2)), 1)
        return earlier if first is None else earlier.plus(first)
    # sums over 1, 2, 4, … chunks, each of two of those before
    up_to, step = own, 1
    while step < most_chunks:
        up_to, step = up_to.plus(_shifted(up_to, step)), 2 * step
    earlier = _shifted(up_to, 1)
    return earlier if first is None else earlier.plus(first)


def _shifted(chunks: KeySum, step: int) -> KeySum:
    """Return for each chunk the sum of the one that is so many before it, [R, H, N, F, X]; none: 0."""
    index = torch.arange(chunks.sums.shape[2], device=chunks.sums.device) - step
    sums = chunks.sums.index_select(2, index.clamp(min=0))
    sums = torch.where((index >= 0)[:, None, None], sums, 0)
    if chunks.exponent is None:
        return KeySum(sums)
    exponent = chunks.exponent.index_select(2, index.clamp(min=0))
    return KeySum(sums, torch.where(index >= 0, exponent, NOTHING))


def _unsqueezed(states: Tensor | None, axis: int) -> Tensor | None:
    return None if states is None else states.unsqueeze(axis)
