"""Linear attention: products of features take the place of exponentials, and sums over keys that of scores.

    S = Σ φ(k) vᵀ,  z = Σ φ(k),  out = φ(q)ᵀ S / (φ(q)·z + ε)

with the sums over all tokens of a text or, if causal, over those up to the query. A causal layer is so a network whose
state, S and z, has as many numbers after any number of tokens; `generate` keeps that alone. In training, sums over
chunks of `chunk_tokens` are added up, and pairs are computed within chunks only, so that time and memory, those of the
backward pass included, grow as the text does: C scores and (D + 1) · F / C numbers of sums for each token of a head.

Sums are in float32, under autocast, too: they have a term for every token. Attention weights are never there to be
dropped: `attention_dropout` leaves tokens out of S, the same ones for all queries of a head.

Sources: Katharopoulos et al., "Transformers are RNNs" (arXiv:2006.16236); Choromanski et al., "Rethinking Attention
with Performers" (arXiv:2009.14794). What was considered besides plain PyTorch: the kernels of flash-linear-attention
compute causal chunks on GPUs with Triton, without a normaliser or with one of their own, and only for some sizes of
heads; they were not measured here, where no GPU is, and are not called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.notices import warn_of_weights
from hf_efficient_attn.attention.sharded.dealt_heads import DealtHeads
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.autocast import autocast_off

from .feature_maps import ConstantFeatures, EluFeatures, PositiveRandomFeatures, wide
from .mechanism import MechanismAttention
from .texts import TextGroup, Texts

FEATURES: dict[str, Callable[[Any, int], nn.Module]] = {
    "elu": lambda config, layer_idx: EluFeatures(),
    "positive_random": PositiveRandomFeatures,
    "constant": lambda config, layer_idx: ConstantFeatures(),
}


class LinearAttention(MechanismAttention):
    """Attention by sums over keys, bidirectional or causal."""

    reads_tokens = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.features: nn.Module = FEATURES[config.feature_map](config, layer_idx)
        if config.feature_map == "constant":
            self.q_proj = self.k_proj = nn.Identity()

    def forward(
        self, hidden_states: Tensor, texts: Texts, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if texts.is_packed:
            if cache is not None:
                # tokens that come later read all documents
                _, key, value = self.project(hidden_states)
                keys, values = self._summands(self.heads(key), self.heads(value), texts.real)
                self._sums_behind(cache, keys, values)
            return super().forward(hidden_states, texts, **kwargs)
        # sums leave masked tokens out wherever they are
        rows = Texts((TextGroup(None, texts.real),), real=texts.real)
        return super().forward(hidden_states, rows, cache=cache, **kwargs)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        dealt: DealtHeads | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (self.heads(each) for each in states)
        with autocast_off(query.device.type):
            queries = self.features(query, is_query=True)
            keys, values = self._summands(key, value, real)
            before = None if cache is None else self._sums_behind(cache, keys, values)
            if self.is_causal:
                sums = causal_sums(queries, keys, values, before, self.config.chunk_tokens)
            else:
                sums = queries @ (keys.mT @ values)
            out = sums[..., :-1] / (sums[..., -1:] + self.config.normalizer_epsilon)
            weights = self._weights(queries, keys, before, sums[..., -1:]) if need_weights else None
        out = out.to(query.dtype)
        return out.transpose(1, 2).flatten(2), None if weights is None else weights.to(query.dtype)

    def _summands(self, key: Tensor, value: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return φ(k), and the values with a 1 behind them, whose sum is z: [R, H, L, F] and [R, H, L, D + 1]."""
        with autocast_off(key.device.type):
            keys, values = self.features(key, is_query=False), wide(value)
            values = pad(values * self.dropout(torch.ones_like(values[..., :1])), (0, 1), value=1.0)
            if real is not None:
                keys, values = (torch.where(real[:, None, :, None], each, 0) for each in (keys, values))
            return keys, values

    def _sums_behind(self, cache: Cache, keys: Tensor, values: Tensor) -> Tensor | None:
        """Return S and z of the cached tokens, [B, H, F, D + 1], None without any, and add the new tokens to them."""
        with autocast_off(keys.device.type):
            return cache.layers[self.layer_idx].add(keys.mT @ values, keys.shape[2])

    def _weights(self, queries: Tensor, keys: Tensor, before: Tensor | None, normalizer: Tensor) -> Tensor:
        """Return how much each token is read, [R, H, L, L]."""
        if before is not None:
            raise UnsupportedBackendError(
                "output_attentions=True: a layer of linear attention has added up its cached tokens, and cannot say "
                "how much each of them is read. Call the model with the whole text and use_cache=False."
            )
        warn_of_weights()
        scores = queries @ keys.mT
        scores = scores.tril() if self.is_causal else scores
        return scores / (normalizer + self.config.normalizer_epsilon)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        numbers = self.config.features_of_head * (self.head_dim + 1)
        self.costs = (
            f"A layer of linear attention computes no scores of pairs: for {num_keys:,} tokens, a head adds up "
            f"{numbers:,} numbers of each, where full attention computes {num_keys**2:,} scores."
        )
        return super().layer_request(num_keys, task)


def causal_sums(queries: Tensor, keys: Tensor, values: Tensor, before: Tensor | None, chunk_tokens: int) -> Tensor:
    """Return φ(q)ᵀ Σ φ(k) vᵀ over the keys up to each query, [R, H, L, X].

    Args:
        queries, keys: φ(q) and φ(k), [R, H, L, F].
        values: [R, H, L, X].
        before: the sum over keys before all of these, [R, H, F, X]; None: there are none.
    """
    tokens = queries.shape[2]
    num_chunks = (tokens + chunk_tokens - 1) // chunk_tokens
    if num_chunks == 1:
        sums = (queries @ keys.mT).tril() @ values
        return sums if before is None else sums + queries @ before
    room = num_chunks * chunk_tokens - tokens
    queries, keys, values = (
        pad(each, (0, 0, 0, room)).unflatten(2, (num_chunks, chunk_tokens)) for each in (queries, keys, values)
    )
    # the sums before each chunk: those up to the one before it
    up_to = (keys.mT @ values).cumsum(2)
    chunks = torch.arange(num_chunks, device=keys.device)
    earlier = up_to.index_select(2, (chunks - 1).clamp(min=0))
    of_chunks = torch.where((chunks > 0)[:, None, None], earlier, 0)
    of_chunks = of_chunks if before is None else of_chunks + before.unsqueeze(2)
    sums = queries @ of_chunks + (queries @ keys.mT).tril() @ values
    if not torch.compiler.is_compiling():
        return sums.flatten(2, 3)[:, :, :tokens]
    # an exporter would take a slice for a promise that chunks are full
    places = torch.arange(tokens, device=sums.device)
    return sums[:, :, places // chunk_tokens, places % chunk_tokens]
