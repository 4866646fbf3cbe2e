"""Linear attention: products of features replace the exponentials of scores, so keys can be summed before the query.

    S = Σ φ(k) vᵀ,  z = Σ φ(k),  out = φ(q)ᵀ S / (φ(q)·z + ε)

The sums are over all tokens of a sequence or, if causal, over the tokens up to the query. A causal layer is a recurrent
network whose state, S and z, has the same size after any number of tokens; `generate` keeps only this state. In
training, sums are accumulated over chunks of C = `chunk_tokens` tokens, and pairs are computed only within chunks. Time
and memory, including the backward pass, are therefore linear in the length of the sequence: per token and head, C
scores and (D + 1) · F / C elements of sums.

Sums are in float32, also under autocast, because they have a term for every token. ε keeps the sums of "elu" and
"constant" from 0. The sums of random features need no ε: φ(k) has a factor exp(−|k|² / 2), which for long keys is far
below any ε. Their sums are therefore divided by exp of the largest exponent of their keys, which does not change the
quotient. A causal layer divides by the largest exponent so far, which is one more element of its state. If the products
of a query with all its keys are still below 1e-38, its output is 0.

There are no attention weights to drop. Instead, `attention_dropout` leaves tokens out of S, the same tokens for all
queries of a head.

Sources: Katharopoulos et al., "Transformers are RNNs" (arXiv:2006.16236); Choromanski et al., "Rethinking Attention
with Performers" (arXiv:2009.14794). Alternatives to plain PyTorch: flash-linear-attention computes causal chunks on
GPUs with Triton kernels, without a normaliser or with its own, and only for some head sizes. Its speed was not compared
with this code, and it is not used. fast-transformers and causal-dot-product compile C++ when they are installed.
performer-pytorch and linear-attention-transformer compute the same as this file.
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

# Sums over the keys up to each query, in chunks, so that time and memory are linear in the length of the sequence.
#
# A key may have an exponent: the true key is the given one times exp(exponent). Sums are then divided by exp of the
# largest exponent of their keys. This is a running maximum, so sums never overflow, and they are as exact as sums
# without exponents, whatever the chunks. Shapes: R sequences, H heads, L tokens, F features, X elements of a value,
# N chunks of C tokens.


# exponent of a sum without keys: exp of its difference to any other exponent is 0, and the difference is finite
NOTHING = -1e30
# more tokens than any sequence has, because a traced graph does not know the length of its sequences
MOST_TOKENS = 2**24


@dataclass(frozen=True)
class KeySum:
    """A sum over keys, Σ φ(k) vᵀ.

    Attributes:
        sums: [..., F, X], divided by exp(exponent).
        exponent: the largest exponent of the keys, [...]; None: keys have no exponents.
    """

    sums: Tensor
    exponent: Tensor | None = None

    def plus(self, other: "KeySum") -> "KeySum":
        """Return the sum over the keys of both sums."""
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
    """Return φ(q)·φ(k) for each query and the keys up to it, and 0 for later keys, [..., L, L].

    largest: the products of a query are divided by exp of this, [..., L]; at least its largest exponent so far.
    """
    weights = (queries @ keys.mT).tril()
    if exponents is None or largest is None:
        return weights
    # clamped, because exponents of later keys may be larger
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
        before: the sum over earlier keys, [R, H, F, X]; None: there are none.
        exponents: exponents of the keys, [R, H, L]; None: keys have no exponents.
    """
    tokens = queries.shape[2]
    # exported graphs have at least two chunks, because an exporter would specialize on a single one
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
    # no slice, because an exporter would conclude from it that all chunks are full
    places = torch.arange(tokens, device=sums.device)
    return sums[:, :, places // chunk_tokens, places % chunk_tokens]


def _of_chunk(queries: Tensor, keys: Tensor, values: Tensor, exponents: Tensor | None, before: KeySum | None) -> Tensor:
    """Return the sums for the queries of a chunk, [..., C, X], from the pairs in it and the sum before it."""
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
    """Return the sum over all keys before each chunk, [R, H, N, F, X].

    Args:
        own: the sum over each chunk.
        before: the sum over the keys before the first chunk; None: there are none.
        most_chunks: an upper bound of N.
    """
    first = None if before is None else KeySum(before.sums.unsqueeze(2), _unsqueezed(before.exponent, 2))
    if own.exponent is None:
        earlier = _shifted(KeySum(own.sums.cumsum(2)), 1)
        return earlier if first is None else earlier.plus(first)
    # sums over 1, 2, 4, … chunks, each the sum of two sums of the previous step
    up_to, step = own, 1
    while step < most_chunks:
        up_to, step = up_to.plus(_shifted(up_to, step)), 2 * step
    earlier = _shifted(up_to, 1)
    return earlier if first is None else earlier.plus(first)


def _shifted(chunks: KeySum, step: int) -> KeySum:
    """Return for each chunk the sum of the chunk `step` places before it, [R, H, N, F, X], or 0."""
    index = torch.arange(chunks.sums.shape[2], device=chunks.sums.device) - step
    sums = chunks.sums.index_select(2, index.clamp(min=0))
    sums = torch.where((index >= 0)[:, None, None], sums, 0)
    if chunks.exponent is None:
        return KeySum(sums)
    exponent = chunks.exponent.index_select(2, index.clamp(min=0))
    return KeySum(sums, torch.where(index >= 0, exponent, NOTHING))


def _unsqueezed(states: Tensor | None, axis: int) -> Tensor | None:
    return None if states is None else states.unsqueeze(axis)


# Feature maps of queries and keys: the product of two features replaces the exponential of a score.
#
# Features are at least 0 and in float32 or wider, so that the sums over a sequence neither overflow nor lose small
# terms. A map returns the features and either None or an exponent for each token, [R, H, L]: the true features are the
# returned ones times exp(exponent). Shapes: R sequences, H heads, L places, D head size, F features.


class EluFeatures(nn.Module):
    """elu(x) + 1, with D features. Source: Katharopoulos et al. (arXiv:2006.16236), section 3.3."""

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """Return the features, [R, H, L, D] → the same, without exponents."""
        states = wide(states)
        # not torch's elu, because compiled, its gradients have other strides than the graph expects
        return states.clamp(max=0).exp() + relu(states), None


class ConstantFeatures(nn.Module):
    """The feature 1 for every token, so that all allowed keys have the same weight: average attention.

    Zhang et al., "Accelerating Neural Transformer via an Average Attention Network" (arXiv:1805.00631), section 3.1,
    without their feed-forward network and gate; Lin et al. (arXiv:2106.04554), section 4.5.4.
    """

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """Return the feature, [R, H, L, D] → [R, H, L, 1], without exponents."""
        return torch.ones_like(wide(states[..., :1])), None


class PositiveRandomFeatures(KeptInFloat32):
    """exp(w·x − |x|² / 2) / √F for F random vectors w, where x is the state divided by D^¼.

    The expected product of two features is exp(q·k / √D). The vectors w are orthogonal in blocks of D and have the
    lengths of normal vectors, so the error is smaller than with independent vectors. They are not parameters, but are
    saved with the model. `redraw` replaces them. A draw depends only on the seed, the layer and the number of the draw,
    so all processes draw the same vectors.

    Source: Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794), lemma 1 and section 2.4.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.head_dim, self.seed = config.head_dim, config.feature_seed + 1_000_003 * layer_idx
        self.register_buffer("vectors", torch.zeros(config.features_of_head, self.head_dim, dtype=torch.float32))

    def initialize(self) -> None:
        """Set the vectors of the first draw."""
        init.copy_(self.vectors, self.drawn(0).to(self.vectors.device))

    def drawn(self, number: int) -> Tensor:
        """Return the vectors of a draw, [F, D]."""
        generator = torch.Generator().manual_seed(self.seed + 7_919 * number)
        size = self.head_dim
        num_blocks = -(-self.vectors.shape[0] // size)
        normal = torch.randn(num_blocks, size, size, generator=generator, dtype=torch.float64)
        lengths = torch.randn(num_blocks * size, size, generator=generator, dtype=torch.float64).norm(dim=1)
        columns, upper = torch.linalg.qr(normal)
        # makes all directions equally likely
        columns = columns * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
        directions = columns.mT.flatten(0, 1)
        return (directions * lengths[:, None])[: self.vectors.shape[0]].float()

    @torch.no_grad()
    def redraw(self, number: int) -> None:
        """Replace the vectors by those of draw `number`; the first draw is number 0."""
        self.vectors.copy_(self.drawn(number))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, [R, H, L, D] → [R, H, L, F], divided by each token's largest one, and its exponent.

        The division keeps the features of a token from underflowing all at once, whatever its length. Exponents have no
        gradient, because their factor cancels in the quotient of attention.
        """
        states = wide(states) * self.head_dim**-0.25
        exponents = states @ self.vectors.to(states.dtype).mT - states.square().sum(-1, keepdim=True) / 2
        largest = exponents.detach().amax(-1, keepdim=True)
        return (exponents - largest).exp(), largest.squeeze(-1) - math.log(self.vectors.shape[0]) / 2


def wide(states: Tensor) -> Tensor:
    """Return states in float32, or unchanged if their dtype is wider."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


FEATURES: dict[str, Callable[[Any, int], nn.Module]] = {
    "elu": lambda config, layer_idx: EluFeatures(),
    "positive_random": PositiveRandomFeatures,
    "constant": lambda config, layer_idx: ConstantFeatures(),
}


class LinearAttention(MechanismAttention):
    """Attention by sums over keys, bidirectional or causal. [B, T, hidden_size] → the same, and the weights or None."""

    reads_tokens = True
    # its cache layers are `SummaryLayer`s, which keep sums instead of keys
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
                # later tokens attend to all documents
                _, key, value = self.project(states)
                self._sum_behind(cache, *self._summands(self.heads(key), self.heads(value), sequences.real))
            return super().read_sequences(states, sequences, **kwargs)
        # sums leave out masked tokens at any place, so rows need not be rearranged
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
        """Return φ(k), the values with a 1 appended, whose sum is z, and the exponents of φ(k).

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
        """Return S and z of the cached tokens, [B, H, F, D + 1], or None, and add the new tokens to the cache."""
        with autocast_off(keys.device.type):
            return cache.layers[self.layer_idx].add(key_sum(keys, values, exponents), keys.shape[2])

    def _divided(self, sums: Tensor, normalizer: Tensor) -> Tensor:
        """Return sums [R, H, L, X] divided by the sums of weights, [R, H, L, 1]; 0 for queries without weights."""
        if self.config.feature_map != "positive_random":
            return sums / (normalizer + self.config.normalizer_epsilon)
        has_weights = normalizer >= torch.finfo(normalizer.dtype).tiny
        return torch.where(has_weights, sums / torch.where(has_weights, normalizer, 1), 0)

    def _weights(
        self, queries: Tensor, keys: Tensor, exponents: Tensor | None, before: KeySum | None, normalizer: Tensor
    ) -> Tensor:
        """Return the attention weights, [R, H, L, L]."""
        if before is not None:
            raise UnsupportedBackendError(
                "output_attentions=True: a layer of linear attention keeps only sums over cached tokens, so it has no "
                "weights for each of them. Call the model with the whole text and use_cache=False."
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
            f"A layer of linear attention computes no scores: for {num_keys:,} tokens, a head adds up {numbers:,} "
            f"numbers per token (full attention computes {num_keys**2:,} scores)."
        )
