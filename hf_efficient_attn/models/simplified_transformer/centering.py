"""The centring term C of shaped attention: the mean of the values a query may attend to.

C is the softmax matrix at equal logits, so C·V is the mean of the values over the allowed keys: a running mean if
causal, the mean of the real tokens if bidirectional, within each packed document. No [T, T] matrix is built unless the
caller passes one as a mask.

Source: He & Hofmann (arXiv:2311.01906), section 4.1, after Noci et al. (arXiv:2306.17759). The paper defines C without
padding; here it is renormalised over the allowed keys, so that A = C at zero logits under any mask.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, packed_sequence_mask_function

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import takes_cache
from hf_efficient_attn.integration.indexer import DENSE, LOSSES, RECALLS
from hf_efficient_attn.integration.interface import efficient_attention_forward
from hf_efficient_attn.integration.layer_patterns import NAME, module_pattern
from hf_efficient_attn.integration.names import INDEXER
from hf_efficient_attn.models.inputs import documents_of_keys, step_documents, step_table
from hf_efficient_attn.models.mechanisms.linear import wide
from hf_efficient_attn.models.parts.blocks import append_to_cache
from hf_efficient_attn.models.prologue import PreparedCall, lengths

from .configuration_simplified_transformer import SimplifiedTransformerConfig

SCAN_TOKENS = 16


class Centering(NamedTuple):
    """What is needed for the mean over allowed values; computed once per forward pass and shared by all layers.

    Shapes: B batch, T new tokens, K cached and new tokens.
        weights [B, T, 1]: True for a real token, False for padding; None if all are real.
        counts [B or 1, T or 1, 1]: number of keys each query may attend to, at least 1.
        past_weights [B, K - T, 1]: `weights` of cached tokens; None if all are real or nothing is cached.
        bounds ([B, T, 1], [B, T, 1]): first and last token a query sees of its packed document; None if not packed.
        matrix [B, T, K]: C itself, from a mask that the caller passed; the other fields are then unused.
        shared_tokens: the length of texts that several processes share, each with some of the tokens; T is then this
            length. None: this process has whole texts.
    """

    is_causal: bool
    counts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    past_weights: torch.Tensor | None = None
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None
    matrix: torch.Tensor | None = None
    shared_tokens: int | None = None

    def mean(self, values: torch.Tensor, past_sum: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Return C·V.

        Shapes: values [B, T, hidden_size] (with `matrix`: [B, K, hidden_size]), past_sum [B, 1, hidden_size], at least
        in float32 → [B, T, hidden_size], or [B, 1, hidden_size] if all queries share one mean.
        """
        if self.matrix is not None:
            return torch.matmul(self.matrix.to(values.dtype), values)
        weighted = self.weighted(values)
        if self.bounds is not None:
            # document sums are differences of prefix sums: float64 keeps them exact to float32
            total = prefix_sum(weighted.double())
            total = nn.functional.pad(total, (0, 0, 1, 0))
            first, last = (bound.expand_as(values) for bound in self.bounds)
            mean = (total.gather(1, last + 1) - total.gather(1, first)) / self.counts
        elif self.is_causal:
            mean = prefix_mean(wide(weighted), self.counts, past_sum)
        else:
            mean = wide(weighted).sum(1, keepdim=True) / self.counts
        return mean.to(values.dtype)

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values with padding set to zero. Shapes as `values`."""
        return values if self.weights is None else torch.where(self.weights, values, 0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum, in float32 or wider, of the real values. Shape [B, 1, hidden_size]."""
        return wide(self.weighted(values)).sum(1, keepdim=True)

    def sum_past(self, cached: torch.Tensor) -> torch.Tensor:
        """Return the sum, in float32 or wider, of the real cached values.

        Shapes: [B, K - T, hidden_size] → [B, 1, hidden_size].
        """
        if self.past_weights is not None:
            cached = torch.where(self.past_weights, cached[:, : self.past_weights.shape[1]], 0)
        return wide(cached).sum(1, keepdim=True)


def prefix_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the inclusive cumulative sum along dimension 1, in the precision of `x`. Shapes: [B, T, D] → the same."""
    return x.cumsum(1) if _scans_natively(x) else prefix_mean(x, torch.ones_like(x[:1, :, :1]), 0.0)


def prefix_mean(x: torch.Tensor, counts: torch.Tensor, past_sum: torch.Tensor | float) -> torch.Tensor:
    """Return (cumulative sum along dimension 1 + past_sum) / counts, in the precision of `x`.

    On CPUs, `torch.cumsum` along a strided dimension is slow. There, blocks of `SCAN_TOKENS` are averaged by a small
    triangular matrix with the counts folded in, and the totals of the previous blocks are added.
    Shapes: x [B, T, D], counts [B or 1, T, 1], past_sum [B, 1, D] → [B, T, D].
    """
    batch, tokens, width = x.shape
    if tokens == 1 and torch.compiler.is_compiling() and x.device.type == "cpu" and torch.is_tensor(past_sum):
        # torch's compiler for CPUs (2.13) raises KeyError if the input of a norm is a sum with a buffer that is written
        # in the same step (the running sum of a static cache), without an operator between (pytorch/pytorch#188228)
        return torch.cat((past_sum, x), 1).cumsum(1)[:, 1:] / counts
    if tokens == 1:
        return (x + past_sum) / counts
    if _scans_natively(x):
        return (x.cumsum(1) + past_sum) / counts
    padding = -tokens % SCAN_TOKENS
    x = nn.functional.pad(x, (0, 0, 0, padding)).view(batch, -1, SCAN_TOKENS, width)
    inverse = nn.functional.pad(counts, (0, 0, 0, padding), value=1.0).reciprocal().to(x.dtype)
    inverse = inverse.view(counts.shape[0], -1, SCAN_TOKENS, 1)
    with torch.autocast("cpu", enabled=False):  # it would round the sums to its own precision
        mean = torch.matmul(inverse * torch.ones(SCAN_TOKENS, SCAN_TOKENS, dtype=x.dtype).tril(), x)
        if tokens > SCAN_TOKENS or torch.is_tensor(past_sum):
            totals = x.sum(2)
            before = prefix_sum(totals) - totals + past_sum
            mean = torch.addcmul(mean, before.unsqueeze(2), inverse)
    return mean.view(batch, -1, width)[:, :tokens]


def _scans_natively(x: torch.Tensor) -> bool:
    # in a compiled graph, blocks would fix the length
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def build_centering(
    tokens: int,
    past_tokens: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: torch.Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> Centering:
    """Return the centring term for one forward.

    Args:
        tokens, past_tokens: lengths of the new and of the cached part.
        attention_mask: None, [B, K or more] (1 = real token) or [B, 1, T, K] (True or 0.0 = allowed).
        documents: [B, T], equal numbers for tokens of one packed document, ascending; None if not packed.
        is_causal, device: those of the model.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return Centering(is_causal, matrix=_matrix(attention_mask))
    if documents is not None:
        return _packed(documents, attention_mask, is_causal)
    if attention_mask is None:
        counts = torch.full((1, 1, 1), tokens, dtype=torch.float32, device=device)
        if is_causal:
            counts = (torch.arange(1, tokens + 1, device=device) + past_tokens).view(1, -1, 1).float()
        return Centering(is_causal, counts)
    mask = attention_mask.to(device).bool().unsqueeze(-1)
    new = torch.arange(tokens, device=device) + past_tokens
    seen = mask.float().cumsum(1).index_select(1, new) if is_causal else mask.float().sum(1, keepdim=True)
    past_weights = mask & (torch.arange(mask.shape[1], device=device) < past_tokens).unsqueeze(-1)
    if isinstance(past_tokens, int):
        past_weights = past_weights[:, :past_tokens]
    return Centering(is_causal, seen.clamp(min=1), mask.index_select(1, new), past_weights)


def _matrix(mask: torch.Tensor) -> torch.Tensor:
    if mask.shape[1] != 1:
        raise InputError(
            f"A 4-D attention_mask of shape {tuple(mask.shape)} has one mask per head, but the centring term is shared "
            "by the heads of a layer. Pass [batch, 1, query_tokens, key_tokens]."
        )
    allowed = (mask if mask.dtype == torch.bool else mask == 0).squeeze(1).float()
    return allowed / allowed.sum(-1, keepdim=True).clamp(min=1)


def _packed(documents: torch.Tensor, attention_mask: torch.Tensor | None, is_causal: bool) -> Centering:
    documents = documents.contiguous()
    first = torch.searchsorted(documents, documents, right=False)
    last = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    if not is_causal:
        last = torch.searchsorted(documents, documents, right=True) - 1
    if attention_mask is None:
        counts, weights = last - first + 1, None
    else:
        weights = attention_mask.to(documents.device).bool()
        real = nn.functional.pad(weights.long().cumsum(1), (1, 0))
        counts, weights = real.gather(1, last + 1) - real.gather(1, first), weights.unsqueeze(-1)
    bounds = (first.unsqueeze(-1), last.unsqueeze(-1))
    return Centering(is_causal, counts.clamp(min=1).unsqueeze(-1).float(), weights, bounds=bounds)


# Cache layers that also keep the running sum of their values, so that C·V costs O(1) per generated token.
#
# The sum is state besides keys and values: it is reordered with beams, and dropped by cropping (assisted decoding),
# after which the next forward pass rebuilds it from the cached values. `attach_running_sums` turns the plain layers of
# any transformers cache into these; layers of other kinds (quantised) keep working without the sum.


class RunningSumDynamicLayer(DynamicLayer):
    """A `DynamicLayer` with `value_sum`: [B, 1, hidden_size] in float32 or wider, or None if it must be rebuilt."""

    value_sum: torch.Tensor | None = None

    def advance(self, centering: Centering, values: torch.Tensor) -> torch.Tensor | float:
        """Return the sum over the cached values and add the new ones to it. Shape of `values`: [B, T, hidden_size]."""
        past_sum: torch.Tensor | float = 0.0
        if self.get_seq_length() > 0:
            past_sum = self.value_sum if self.value_sum is not None else centering.sum_past(merge_heads(self.values))
        self.value_sum = past_sum + centering.sum(values)
        return past_sum

    def forget_sum(self) -> None:
        """Have the next `advance` rebuild the sum from the cached values."""
        self.value_sum = None

    def reset(self) -> None:
        super().reset()
        self.forget_sum()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove != 0:
            self.forget_sum()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.value_sum is not None:
            self.value_sum = self.value_sum[beam_idx.to(self.value_sum.device)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.value_sum is not None:
            self.value_sum = self.value_sum[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.value_sum is not None:
            self.value_sum = self.value_sum.repeat_interleave(repeats, dim=0)


class RunningSumStaticLayer(StaticLayer):
    """A `StaticLayer` with `value_sum`, [B, 1, hidden_size] in float32 or wider, held at a fixed address."""

    value_sum: torch.Tensor | None = None
    is_stale = False

    def advance(self, centering: Centering, values: torch.Tensor) -> torch.Tensor:
        """Do as `RunningSumDynamicLayer.advance`, in place."""
        if self.value_sum is None:
            self.value_sum = torch.zeros_like(values[:, :1], dtype=torch.promote_types(values.dtype, torch.float32))
            self.is_stale = self.is_initialized
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.value_sum)
        if self.is_stale:
            self.value_sum.copy_(centering.sum_past(merge_heads(self.values)))  # unused slots hold zeros
            self.is_stale = False
        past_sum = self.value_sum.clone()
        self.value_sum.add_(centering.sum(values))
        return past_sum

    def forget_sum(self) -> None:
        """Have the next `advance` rebuild the sum from the cached values."""
        self.is_stale = True

    def reset(self) -> None:
        super().reset()
        self.is_stale = False
        if self.value_sum is not None:
            self.value_sum.zero_()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.value_sum is not None:
            self.value_sum = self.value_sum[beam_idx.to(self.value_sum.device)]


ADOPTED_BY: dict[type, type] = {DynamicLayer: RunningSumDynamicLayer, StaticLayer: RunningSumStaticLayer}


def attach_running_sums(cache: Cache, num_layers: int) -> None:
    """Turn the plain layers of `cache` into layers that keep the running sum, in place; a second call does nothing."""
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = RunningSumDynamicLayer
        while len(cache.layers) < num_layers:
            cache.layers.append(RunningSumDynamicLayer())
    for index, layer in enumerate(cache.layers):
        if type(layer) in ADOPTED_BY:
            adopted = ADOPTED_BY[type(layer)].__new__(ADOPTED_BY[type(layer)])
            adopted.__dict__.update(layer.__dict__)
            cache.layers[index] = adopted


def append_and_sum(
    cache: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    centering: Centering | None,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return keys and values of cached and new tokens, [B, H, K, D], and the sum of the cached values, [B, 1, H·D].

    Args:
        key, value: states of the new tokens, [B, H, T, D]; `values` are the same values as [B, T, H·D].
        centering: None: no sum is needed, and 0.0 is returned for it.
    """
    if centering is None:
        return *append_to_cache(cache, key, value, layer_idx), 0.0
    layer, past_sum = cache.layers[layer_idx], 0.0
    keeps_sum = hasattr(layer, "advance")
    if centering.matrix is None:
        past_sum = layer.advance(centering, values) if keeps_sum else None
    elif keeps_sum:
        layer.forget_sum()
    key, value = append_to_cache(cache, key, value, layer_idx)
    if past_sum is None:
        past_sum = centering.sum_past(merge_heads(value[:, :, : -values.shape[1]]))
    return key, value, past_sum


def merge_heads(values: torch.Tensor) -> torch.Tensor:
    """Return [B, H, K, D] as [B, K, H·D]."""
    return values.transpose(1, 2).flatten(2)


# The centring term C under an `attention_pattern` or an indexer: the mean of the values that A attends to.
#
# C is A at equal logits, so it averages over the keys that the pattern allows or, if keys are selected by content, over
# those that the layer's own queries (`BlockTopK`) or its indexer (`index`) selected. Shaped attention then starts as
# the identity for every selection (He & Hofmann, arXiv:2311.01906, section 4.1), and padding, packing and caches change
# nothing. A mean over all tokens would be wrong: it would subtract the mean of keys that a token does not attend to.
# C takes as long as A here, because selected keys have no running mean.


# arguments of attention for the scores of A and for losses; they do not change which keys are attended to
OF_SCORES = ("position_bias", "position_terms", "output_attentions", LOSSES, RECALLS)


def uses_indexer(config: Any) -> bool:
    """Return whether indexers select the keys of a model's layers, or learn to."""
    field = getattr(config, INDEXER, None)
    return field is not None and field["stage"] != DENSE


def reads_selected(attention: Any) -> bool:
    """Return whether an attention module follows an `attention_pattern` of its config, or has an active indexer."""
    if attention.config._attn_implementation != NAME:
        return False
    return uses_indexer(attention.config) or module_pattern(attention, attention.is_causal) is not None


def mean_of_read(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """Return C·V, [B, T, H, D]; no gradient reaches queries and keys.

    Args:
        query, key, value: [B, H, T or K, D]; the queries select keys as in A.
        attention_mask, options: those of the attention function.
    """
    kept = {name: each for name, each in options.items() if name not in OF_SCORES}
    states = (query.detach(), key.detach(), value)
    mean, _ = efficient_attention_forward(attention, *states, attention_mask, scaling=0.0, **kept)
    return mean


# The masks of a call as layers need them: which tokens a query may attend to, and what the centring term averages.


def block_masks(config: SimplifiedTransformerConfig, call: PreparedCall, is_shared: bool = False) -> dict[str, Any]:
    """Return `attention_mask` and `centering` for the layers, and add running sums to the cache if C needs them.

    is_shared: whether several processes share the texts; C is then built for whole texts.
    """
    given = call.attention_mask
    # with indexers, whose keys are also cached, C has no running sum
    if call.cache is not None and config.is_centered and not uses_indexer(config):
        attach_running_sums(call.cache, config.num_hidden_layers)
    if isinstance(given, dict):
        # made by `MaskGeneration`
        first, last = given["firsts"], given["lasts"]
        bounds = None if first is None else (first, last)
        return {
            "attention_mask": given["attention"],
            "centering": Centering(True, given["counts"], given["weights"], bounds=bounds),
        }
    mask, centering = attention_allowed(config, call.embedded, given, call.cache, call.documents), None
    if config.is_centered and is_shared:
        tokens = call.masks(config).token_mask
        where = (tokens.shape[1], 0, tokens.key_mask, tokens.segment_ids)
        centering = build_centering(*where, config.is_causal, call.embedded.device)
        centering = centering._replace(shared_tokens=tokens.shape[1])
    elif config.is_centered:
        where = (call.tokens, call.past_tokens, given, call.documents)
        centering = build_centering(*where, config.is_causal, call.embedded.device)
    return {"attention_mask": mask, "centering": centering}


def attention_allowed(
    config: SimplifiedTransformerConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    documents: torch.Tensor | None,
) -> Any:
    """Return the mask in the form that the chosen attention implementation needs, or None if it needs none."""
    overlay = None
    if documents is not None:
        num_keys = lengths(cache, inputs_embeds.shape[1])[1]
        overlay = packed_sequence_mask_function(documents_of_keys(documents, num_keys))
    if config.is_causal:
        return create_causal_mask(config, inputs_embeds, attention_mask, cache, and_mask_function=overlay)
    return create_bidirectional_mask(config, inputs_embeds, attention_mask, and_mask_function=overlay)


class MaskGeneration:
    """Mixin for the causal model: the masks that `generate` prepares with a static cache."""

    @staticmethod
    @takes_cache
    def create_masks_for_generate(
        config: SimplifiedTransformerConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the masks of one step with a static cache, in shapes that do not grow, as compilation needs."""
        if config.span is not None:
            return step_table(config, inputs_embeds, attention_mask, cache, config.is_causal, position_ids)
        documents = step_documents(config, position_ids, attention_mask, inputs_embeds, cache)
        mask = attention_allowed(config, inputs_embeds, attention_mask, cache, documents)
        if not config.is_centered:
            return mask
        past_tokens = cache.get_seq_length()
        tokens, device = inputs_embeds.shape[1], inputs_embeds.device
        centering = build_centering(tokens, past_tokens, attention_mask, documents, True, device)
        firsts, lasts = centering.bounds or (None, None)
        # `generate` passes on tensors only
        own = {"counts": centering.counts, "weights": centering.weights, "firsts": firsts, "lasts": lasts}
        return {"attention": mask, **own}
