"""Checks that a model can compute a part of a text: only its attention may need other tokens."""

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from hf_efficient_attn.attention.sharded.shards import why_whole
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import NAME
from hf_efficient_attn.integration.trial import forward_arguments, trial_requests
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.models.heads.outputs import CAUSAL_LM
from hf_efficient_attn.models.indexed.index_training import PLAIN_CLASS

# the losses that are sums over tokens
LOSSES = (None, CAUSAL_LM, "ForMaskedLM", "ForTokenClassification")
LAYER_KINDS = {"full_attention", "sliding_attention"}
# attributes of transformers modules that make the embedding or scale of a token depend on other tokens → the reason
WHOLE_TEXT_FIELDS = {
    "attn_temperature_tuning": "scales queries by the number of tokens before them, which every process would count "
    "from 0. Load the model with attn_temperature_tuning=False, which changes nothing for texts shorter than "
    "floor_scale.",
    "token_dropout": "scales tokens by the share of mask tokens in the text. Load the model with token_dropout=False.",
    "trigram_input": "uses the embeddings of neighbouring tokens. Use another model, or one with trigram_input=False.",
}
# modules of torch that compute a token from its neighbours
MIXERS = (nn.RNNBase, _ConvNd)


def refuse_wrapped(model: Any) -> None:
    """Raise UnsupportedBackendError for anything but a model of transformers, such as a PEFT model around one."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedBackendError(
            f"shard_sequence takes a PreTrainedModel, not {type(model).__name__}. If it is wrapped around a model of "
            "transformers (PEFT, DistributedDataParallel), shard the model first, then wrap it: "
            "get_peft_model(shard_sequence(model, mesh), config)."
        )


def refuse_model(model: Any) -> None:
    """Raise UnsupportedBackendError for a model that cannot compute a part of a text, with the reason."""
    reason = first_reason(model)
    if reason is not None:
        raise UnsupportedBackendError(
            f"This {type(model).__name__} cannot compute a text that several processes share: {reason}"
        )


def shifts_labels(model: Any) -> bool:
    """Return whether a model shifts its labels, so that each belongs to the token before it."""
    return model.loss_type == CAUSAL_LM or (model.loss_type is None and calls_loss_function(type(model)))


def calls_loss_function(model_class: Any) -> bool:
    """Return whether a model calls `loss_function`, which is the causal loss if transformers knows no other."""
    forward = getattr(model_class, PLAIN_CLASS, model_class).forward
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def first_reason(model: Any) -> str | None:
    """Return why a model cannot compute a part of a text, as the end of a sentence; None: it can."""
    config = model.config
    reason = why_whole(config)
    if reason is not None:
        return reason
    if model.loss_type not in LOSSES:
        return f"its loss, {shown(model.loss_type)}, needs the whole text. Use a language model or a token classifier."
    model_class: Any = type(model)
    is_unnamed = model.loss_type is None and not calls_loss_function(model_class)
    if is_unnamed and "labels" in forward_arguments(model_class):
        return (
            "it is unknown whether its loss is a sum over tokens (loss_type is None). Use a language model or a "
            f"token classifier, or set model.loss_type to one of {', '.join(filter(None, LOSSES))} if that is its "
            "loss."
        )
    if config._attn_implementation != NAME:
        return f'its attention is {shown(config._attn_implementation)}. Load it with attn_implementation="{NAME}".'
    if getattr(model.base_model, "pooler", None) is not None:
        return "its pooler would use the first token of each process. Build it with add_pooling_layer=False."
    if getattr(config, "output_router_logits", False):
        return "the loss of its routers needs all tokens. Set output_router_logits=False."
    return reason_of_family(model) if isinstance(model, FamilyPreTrainedModel) else reason_in_tree(model)


def reason_in_tree(model: Any) -> str | None:
    """Return why a model of transformers cannot compute a part of a text, or None."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) - LAYER_KINDS
    if kinds:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}, which keep a state or cut texts into chunks."
    model_class: Any = type(model)
    if "position_ids" not in forward_arguments(model_class):
        return "it takes no position_ids, so every process would count positions from 0."
    return other_mixer(model)


def other_mixer(model: Any) -> str | None:
    """Return what mixes tokens in a model of transformers other than attention; None: nothing was found.

    The checks use no names of modules. They find states that transformers declares, convolutions and recurrent modules
    of torch, and layers that never call the attention interface.
    """
    for module in model.modules():
        for field, reason in WHOLE_TEXT_FIELDS.items():
            if getattr(module, field, False) is True:
                return f"{field}=True {reason}"
    if model._is_stateful:
        return "it passes a state from token to token."
    mixers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, MIXERS) and getattr(module, "kernel_size", None) != (1,)
    ]
    if mixers:
        return f"{mixers[0]} mixes neighbouring tokens outside of attention."
    model_class: Any = type(model)
    requests = trial_requests(model_class, model.config)
    called = None if requests is None else {each.layer for each in requests}
    missing = set() if called is None or None in called else {*range(model.config.num_hidden_layers)} - called
    if missing:
        return f"layer {min(missing)} does not call the attention interface, so it is unknown which tokens it uses."
    return None


def reason_of_family(model: Any) -> str | None:
    """Return why a model of one of this package's families cannot compute a part of a text, or None."""
    config = model.config

    def field(name: str) -> Any:
        return getattr(config, name, None)

    if field("full_attention_up_to") is not None and not config.is_causal:
        return "full_attention_up_to depends on the length of the whole text. Set it to None."
    if field("random_blocks_in_eval") == "transformers":
        return "random_blocks_in_eval='transformers' attends to the first block instead of random ones. Leave it out."
    return None
