"""Linear attention: products of features take the place of exponentials, and sums over keys that of scores.

    S = Σ φ(k) vᵀ,  z = Σ φ(k),  out = φ(q)ᵀ S / (φ(q)·z + ε)

with the sums over all tokens of a sequence or, if causal, over those up to the query. A causal layer is so a network
whose state, S and z, has as many numbers after any number of tokens; `generate` keeps that alone. In training, sums
over chunks of `chunk_tokens` are added up, and pairs are computed within chunks only, so that time and memory, those of
the backward pass included, grow as the sequence does: C scores and (D + 1) · F / C numbers of sums for each token of a
head.

Sums are in float32, under autocast, too: they have a term for every token. ε keeps those of "elu" and "constant" from
0. Those of random features need none: φ(k) has a factor exp(−|k|² / 2), which for long keys is far below any ε, so that
sums are divided by exp of the largest exponent of their keys, and the quotient is the same. A causal layer divides by
the largest so far, one more number of its state. A query whose products with all its keys are below 1e-38 even so has
output 0.

Attention weights are never there to be dropped: `attention_dropout` leaves tokens out of S, the same ones for all
queries of a head.

Sources: Katharopoulos et al., "Transformers are RNNs" (arXiv:2006.16236); Choromanski et al., "Rethinking Attention
with Performers" (arXiv:2009.14794). What was considered besides plain PyTorch: the kernels of flash-linear-attention
compute causal chunks on GPUs with Triton, without a normaliser or with one of their own, and only for some sizes of
heads; they were not measured beside these sums, and are not called. fast-transformers and causal-dot-product compile
C++ at their installation, and performer-pytorch and linear-attention-transformer compute what stands here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu
from transformers import initialization as init
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.layer import warn_of_weights
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.tracing import autocast_off, is_exporting
from hf_efficient_attn.models.mechanisms.sequences import MechanismAttention, SequenceGroup, Sequences
from hf_efficient_attn.models.parts.blocks import KeptInFloat32

# Sums over the keys up to each query, in chunks, so that time and memory grow as the sequence does.
#
# Sums are added up over chunks of tokens, and pairs are computed within chunks only.
#
# Keys may be given with an exponent each, by whose exp they are larger. Sums then are divided by exp of the largest
# exponent of the keys that they have: a running maximum, as exact as sums without exponents, whatever the chunks,
# which never overflows. Shapes: R sequences, H heads, L tokens, F features, X numbers of a value, N chunks of C tokens.


# exponent of a sum without keys: its exp is 0 beside that of any other, and their difference is finite
NOTHING = -1e30
# more than any sequence has: a graph that is traced does not know the length of its sequences
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


# What queries and keys are mapped to, so that a product of features takes the place of the exponential of a score.
#
# Features are at least 0 and in float32 or wider, so that the sums over a sequence neither overflow nor lose small
# terms. A map returns them with an exponent for each token, [R, H, L], or None: those of the token are exp(exponent)
# times as large. Shapes: R sequences, H heads, L places, D head size, F features.


class EluFeatures(nn.Module):
    """elu(x) + 1: as many features as the head has numbers. Katharopoulos et al. (arXiv:2006.16236), section 3.3."""

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """Return the features, [R, H, L, D] → the same, as large as they are."""
        states = wide(states)
        # torch's elu, compiled, has gradients of other strides than its graph was made for
        return states.clamp(max=0).exp() + relu(states), None


class ConstantFeatures(nn.Module):
    """1 for every token, so that all that may be read is read alike: average attention.

    Zhang et al., "Accelerating Neural Transformer via an Average Attention Network" (arXiv:1805.00631), section 3.1,
    without their feed-forward network and gate; Lin et al. (arXiv:2106.04554), section 4.5.4.
    """

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """Return the feature, [R, H, L, D] → [R, H, L, 1], as large as it is."""
        return torch.ones_like(wide(states[..., :1])), None


class PositiveRandomFeatures(KeptInFloat32):
    """exp(w·x − |x|² / 2) / √F with x the state / D^¼ and F random w: the mean over w of a product is exp(q·k / √D).

    The w are orthogonal in blocks of D, and as long as normal vectors, which makes the error smaller than that of
    independent ones. They are no parameters, but saved with the model. `redraw` replaces them; what is drawn depends on
    the seed, the layer and the number of the draw alone, so that all processes draw the same.

    Source: Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794), lemma 1 and section 2.4.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.head_dim, self.seed = config.head_dim, config.feature_seed + 1_000_003 * layer_idx
        self.register_buffer("vectors", torch.zeros(config.features_of_head, self.head_dim, dtype=torch.float32))

    def initialize(self) -> None:
        """Set the first draw."""
        init.copy_(self.vectors, self.drawn(0).to(self.vectors.device))

    def drawn(self, number: int) -> Tensor:
        """Return the vectors of a draw, [F, D]."""
        generator = torch.Generator().manual_seed(self.seed + 7_919 * number)
        size = self.head_dim
        num_blocks = -(-self.vectors.shape[0] // size)
        normal = torch.randn(num_blocks, size, size, generator=generator, dtype=torch.float64)
        lengths = torch.randn(num_blocks * size, size, generator=generator, dtype=torch.float64).norm(dim=1)
        columns, upper = torch.linalg.qr(normal)
        # so that every direction is as likely as any other
        columns = columns * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
        directions = columns.mT.flatten(0, 1)
        return (directions * lengths[:, None])[: self.vectors.shape[0]].float()

    @torch.no_grad()
    def redraw(self, number: int) -> None:
        """Replace the vectors by those of a draw; the first is number 0."""
        self.vectors.copy_(self.drawn(number))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, [R, H, L, D] → [R, H, L, F], divided by the largest of each token, and its exponent.

        So they cannot all underflow, however long the token's vector is. Exponents have no gradient: attention divides
        by what they multiply.
        """
        states = wide(states) * self.head_dim**-0.25
        exponents = states @ self.vectors.to(states.dtype).mT - states.square().sum(-1, keepdim=True) / 2
        largest = exponents.detach().amax(-1, keepdim=True)
        return (exponents - largest).exp(), largest.squeeze(-1) - math.log(self.vectors.shape[0]) / 2


def wide(states: Tensor) -> Tensor:
    """Return states in float32, or as they are if they are wider."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


FEATURES: dict[str, Callable[[Any, int], nn.Module]] = {
    "elu": lambda config, layer_idx: EluFeatures(),
    "positive_random": PositiveRandomFeatures,
    "constant": lambda config, layer_idx: ConstantFeatures(),
}


class LinearAttention(MechanismAttention):
    """Attention by sums over keys, bidirectional or causal. [B, T, hidden_size] → the same, and the weights or None."""

    reads_tokens = True
    # instead of keys in a cache, see `SummaryLayer`
    keeps_sums = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.features: nn.Module = FEATURES[config.feature_map](config, layer_idx)
        if config.feature_map == "constant":
            self.q_proj = self.k_proj = nn.Identity()

    def read_sequences(
        self, states: Tensor, sequences: Sequences, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if sequences.is_packed:
            if cache is not None:
                # tokens that come later read all documents
                _, key, value = self.project(states)
                self._sum_behind(cache, *self._summands(self.heads(key), self.heads(value), sequences.real))
            return super().read_sequences(states, sequences, **kwargs)
        # sums leave masked tokens out wherever they are
        rows = Sequences((SequenceGroup(None, sequences.real),), real=sequences.real)
        return super().read_sequences(states, rows, cache=cache, **kwargs)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (self.heads(each) for each in states)
        with autocast_off(query.device.type):
            queries, _ = self.features(query)
            keys, values, exponents = self._summands(key, value, real)
            before = None if cache is None else self._sum_behind(cache, keys, values, exponents)
            if self.is_causal:
                sums = causal_sums(queries, keys, values, before, self.config.chunk_tokens, exponents)
            else:
                sums = queries @ key_sum(keys, values, exponents).sums
            normalizer = sums[..., -1:]
            out = self._divided(sums[..., :-1], normalizer)
            weights = self._weights(queries, keys, exponents, before, normalizer) if need_weights else None
        out = out.to(query.dtype)
        return out.transpose(1, 2).flatten(2), None if weights is None else weights.to(query.dtype)

    def _summands(self, key: Tensor, value: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return φ(k), the values with a 1 behind them, whose sum is z, and exponents of φ(k).

        Shapes: [R, H, L, F], [R, H, L, D + 1], [R, H, L] or None.
        """
        with autocast_off(key.device.type):
            (keys, exponents), values = self.features(key), wide(value)
            values = pad(values * self.dropout(torch.ones_like(values[..., :1])), (0, 1), value=1.0)
            if real is not None:
                keys, values = (torch.where(real[:, None, :, None], each, 0) for each in (keys, values))
                exponents = None if exponents is None else torch.where(real[:, None], exponents, NOTHING)
            return keys, values, exponents

    def _sum_behind(self, cache: Cache, keys: Tensor, values: Tensor, exponents: Tensor | None) -> KeySum | None:
        """Return S and z of the cached tokens, [B, H, F, D + 1], None without any, and add the new tokens to them."""
        with autocast_off(keys.device.type):
            return cache.layers[self.layer_idx].add(key_sum(keys, values, exponents), keys.shape[2])

    def _divided(self, sums: Tensor, normalizer: Tensor) -> Tensor:
        """Return sums [R, H, L, X] divided by those of weights, [R, H, L, 1]; 0 where a query has no weights."""
        if self.config.feature_map != "positive_random":
            return sums / (normalizer + self.config.normalizer_epsilon)
        has_weights = normalizer >= torch.finfo(normalizer.dtype).tiny
        return torch.where(has_weights, sums / torch.where(has_weights, normalizer, 1), 0)

    def _weights(
        self, queries: Tensor, keys: Tensor, exponents: Tensor | None, before: KeySum | None, normalizer: Tensor
    ) -> Tensor:
        """Return how much each token is read, [R, H, L, L]."""
        if before is not None:
            raise UnsupportedBackendError(
                "output_attentions=True: a layer of linear attention keeps only sums over its cached tokens, so it has "
                "no weights of single tokens. Call the model with the whole text and use_cache=False."
            )
        warn_of_weights()
        if self.is_causal:
            largest = None if exponents is None else exponents.cummax(-1).values
            return self._divided(pair_weights(queries, keys, exponents, largest), normalizer)
        if exponents is not None:
            keys = keys * (exponents - exponents.amax(-1, keepdim=True)).exp().unsqueeze(-1)
        return self._divided(queries @ keys.mT, normalizer)

    def costs(self, num_keys: int) -> str:
        numbers = self.config.features_of_head * (self.head_dim + 1)
        return (
            f"A layer of linear attention computes no scores of pairs: for {num_keys:,} tokens, a head adds up "
            f"{numbers:,} numbers of each, where full attention computes {num_keys**2:,} scores."
        )
