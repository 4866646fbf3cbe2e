"""Linear attention: products of features take the place of exponentials, and sums over keys that of scores.

    S = Σ φ(k) vᵀ,  z = Σ φ(k),  out = φ(q)ᵀ S / (φ(q)·z + ε)

with the sums over all tokens of a text or, if causal, over those up to the query. A causal layer is so a network whose
state, S and z, has as many numbers after any number of tokens; `generate` keeps that alone. In training, sums over
chunks of `chunk_tokens` are added up, and pairs are computed within chunks only, so that time and memory, those of the
backward pass included, grow as the text does: C scores and (D + 1) · F / C numbers of sums for each token of a head.

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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.notices import warn_of_weights
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.models.mechanisms.causal_sums import NOTHING, KeySum, causal_sums, key_sum, pair_weights
from hf_efficient_attn.models.mechanisms.feature_maps import ConstantFeatures, EluFeatures, PositiveRandomFeatures, wide
from hf_efficient_attn.models.mechanisms.text_reading import TextReading
from hf_efficient_attn.models.mechanisms.texts import TextGroup, Texts

FEATURES: dict[str, Callable[[Any, int], nn.Module]] = {
    "elu": lambda config, layer_idx: EluFeatures(),
    "positive_random": PositiveRandomFeatures,
    "constant": lambda config, layer_idx: ConstantFeatures(),
}


class LinearReading(TextReading):
    """Attention by sums over keys, bidirectional or causal."""

    reads_tokens = True
    # instead of keys in a cache, see `SummaryLayer`
    keeps_sums = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.features: nn.Module = FEATURES[config.feature_map](config, layer_idx)

    def read_texts(
        self, states: Tensor, texts: Texts, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if texts.is_packed:
            if cache is not None:
                # tokens that come later read all documents
                _, key, value = self.project(states)
                self._sum_behind(cache, *self._summands(self.heads(key), self.heads(value), texts.real))
            return super().read_texts(states, texts, **kwargs)
        # sums leave masked tokens out wherever they are
        rows = Texts((TextGroup(None, texts.real),), real=texts.real)
        return super().read_texts(states, rows, cache=cache, **kwargs)

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
                "output_attentions=True: a layer of linear attention has added up its cached tokens, and cannot say "
                "how much each of them is read. Call the model with the whole text and use_cache=False."
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
