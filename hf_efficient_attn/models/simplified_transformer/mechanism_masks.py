"""The masks of a call for layers of which some have a mechanism, the same for all of them."""

from typing import Any

from transformers.cache_utils import Cache

from hf_efficient_attn.attention.layer_attention import readable_keys
from hf_efficient_attn.models.mechanisms.state_cache import StateLayer, attach_states
from hf_efficient_attn.models.mechanisms.texts import find_texts, of_queries
from hf_efficient_attn.models.prologue import PreparedCall

from .centering import Centering, build_centering
from .config_checks import LINEAR
from .linear_reading import CentredStateLayer
from .running_sum_cache import attach_running_sums


def mechanism_masks(config: Any, call: PreparedCall, is_shared: bool) -> dict[str, Any]:
    """Return masks, texts and `centering` for all layers; it gives the cache layers for sums.

    is_shared: whether processes share the texts, of which C is then made whole.
    """
    if call.cache is not None:
        attach_sums(config, call.cache)
    masks = {**call.masks(config), "centering": None}
    if config.layers_with(LINEAR):
        masks["texts"] = find_texts(call, masks, config.is_causal, is_shared)
    # layers with a prior compute C themselves
    if config.is_centered and (config.layers_with(LINEAR) or config.layers_with(None)):
        masks["centering"] = centering_of(config, call, masks, is_shared)
    return masks


def attach_sums(config: Any, cache: Cache) -> None:
    """Give layers of linear attention a cache layer of their sums, and those of softmax one with that of values."""
    linear = config.layers_with(LINEAR)
    if linear:
        make = CentredStateLayer if config.is_centered else StateLayer
        attach_states(cache, config.num_hidden_layers, dict.fromkeys(linear, make))
    if config.is_centered and config.layers_with(None):
        attach_running_sums(cache, config.num_hidden_layers)


def centering_of(config: Any, call: PreparedCall, masks: dict[str, Any], is_shared: bool) -> Centering:
    """Return C over all tokens that a query may read, given the masks of a call."""
    tokens, matrix, device = masks["token_mask"], masks["attention_mask"], call.embedded.device
    real, documents = tokens.key_mask, tokens.segment_ids
    if matrix is not None:
        # which sums take if it leaves out padding alone
        real = readable_keys(matrix, call.batch_size) if config.layers_with(LINEAR) else matrix
    if is_shared:
        centering = build_centering(tokens.shape[1], 0, real, documents, config.is_causal, device)
        return centering._replace(shared_tokens=tokens.shape[1])
    if documents is not None:
        real, documents = (None if each is None else of_queries(each, call) for each in (real, documents))
    return build_centering(call.tokens, call.past_tokens, real, documents, config.is_causal, device)
