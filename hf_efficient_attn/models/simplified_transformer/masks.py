"""The masks of a call as layers need them: which tokens a query may attend to, and what the centring term averages."""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, packed_sequence_mask_function

from hf_efficient_attn.attention.cache_argument import takes_cache
from hf_efficient_attn.models.inputs.masks import documents_of_keys, step_documents, step_table
from hf_efficient_attn.models.prologue import PreparedCall, lengths

from .centering import Centering, build_centering
from .configuration_simplified_transformer import SimplifiedTransformerConfig
from .pattern_mean import uses_indexer
from .running_sum_cache import attach_running_sums


def block_masks(config: SimplifiedTransformerConfig, call: PreparedCall, is_shared: bool = False) -> dict[str, Any]:
    """Return `attention_mask` and `centering` for the layers; it gives the cache running sums if C needs them.

    is_shared: whether processes share the texts, of which C is then made whole.
    """
    given = call.attention_mask
    # which compute C themselves
    if config.span is not None:
        return {**call.masks(config), "centering": None}
    # with indexers, whose keys a cache keeps, too, C has no running sum
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
        tokens = call.masks(config)["token_mask"]
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
