"""What the layers of a model or config ask the engine for, found without computing anything."""

import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE, WARMUP
from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.model_check import check_class
from hf_efficient_attn.attention.model_parts import ENCODER, PARTS
from hf_efficient_attn.attention.saved_architectures import stock_name
from hf_efficient_attn.attention.trial import base_class, trial_requests
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.messages import shown


def layer_request(
    model_or_config: PreTrainedModel | PreTrainedConfig, layer: int, part: str | None, num_keys: int
) -> tuple[LayerRequest, str, dict[int, LayerRequest]]:
    """Return what a layer of self-attention asks for, a line that names it, and what all layers of its part ask for.

    Args:
        layer: its index in its part; in a composite model (vision and language) a layer of the text part.
        part: "encoder" (None) or "decoder", for an encoder-decoder.
        num_keys: the length of the text in tokens, on which the attention of some models depends.

    Raises:
        ConfigurationError: no such part or layer.
        UnsupportedBackendError: the model does not use the attention interface of transformers, or no trial of it can
            be run.
    """
    name, config, numbered = numbered_requests(model_or_config, part, num_keys, layer)
    if layer not in numbered:
        said = f" of its {part or ENCODER}" if config.get_text_config().is_encoder_decoder else ""
        raise ConfigurationError(
            f"layer={shown(layer)} of {name} has no attention; the layers with attention{said} are "
            f"{shown(sorted(numbered))}."
        )
    request = numbered[layer]
    line = _line(name, config, request, layer, len(numbered))
    notes = (*request.notes, *_others(numbered, layer), *_beyond(config, num_keys), *_runs(model_or_config, request))
    return replace(request, notes=notes), line, numbered


def numbered_requests(
    model_or_config: PreTrainedModel | PreTrainedConfig, part: str | None, num_keys: int, layer: int | None = None
) -> tuple[str, PreTrainedConfig, dict[int, LayerRequest]]:
    """Return the name of a model, its config, and what every layer of self-attention of a part asks for, by its index.

    Arguments and errors are those of `layer_request`; with a layer, others may ask for nothing.
    """
    config = model_or_config if isinstance(model_or_config, PreTrainedConfig) else model_or_config.config
    text_config = config.get_text_config()
    if text_config is not config and config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(config).__name__} joins two models, each with a config of its own. Explain model.encoder or "
            "model.decoder."
        )
    part = _checked_part(part, text_config)
    model_class = saved_class(config) if model_or_config is config else type(model_or_config)
    name = type(config).__name__ if model_class is None else model_class.__name__
    asked = [] if model_class is None else _requests(model_or_config, model_class, config, num_keys, layer)
    asked = [each for each in asked if not each.is_cross and type(each.config) is type(text_config)]
    if not asked:
        raise UnsupportedBackendError(
            f"Nothing is known about the attention of {name}: no trial of it can be run, or it does not call the "
            "attention interface of transformers. Explain its pattern, with num_heads and head_dim."
        )
    if text_config.is_encoder_decoder:
        asked = [each for each in asked if each.part == part]
    # modules that do not know their index are counted
    are_counted = any(each.layer is None for each in asked)
    return name, config, {index if are_counted else each.layer: each for index, each in enumerate(asked)}  # type: ignore[misc]


def saved_class(config: PreTrainedConfig) -> Any:
    """Return the class of the model that was saved with a config, or else its base class; None: neither is known."""
    base = base_class(config)
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    return base if base is None or name is None else getattr(sys.modules[base.__module__], stock_name(name), base)


def _checked_part(part: str | None, config: Any) -> str:
    if part is not None and not (part in PARTS and config.is_encoder_decoder):
        raise ConfigurationError(
            f"part={shown(part)} is for an encoder-decoder, {' or '.join(map(repr, sorted(PARTS)))}; "
            f"{type(config).__name__} is {'one' if config.is_encoder_decoder else 'none: leave it out'}."
        )
    return part or ENCODER


def _requests(
    model_or_config: Any, model_class: Any, config: PreTrainedConfig, num_keys: int, layer: int | None
) -> list[LayerRequest]:
    model: Any = model_or_config
    if model is config:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config)).eval()
    # the layers of our families that do not call the attention interface say it themselves
    own: list[Any] = [module for module in model.modules() if hasattr(module, "layer_request")]
    text_config = config.get_text_config()
    field = getattr(text_config, INDEXER, None)
    if own:
        own_requests = _own_requests(own, num_keys, getattr(model, "task", None), layer)
        return [with_indexer(each, field) for each in own_requests]
    check_class(model_class, config)
    asked = trial_requests(model_class, config) or []
    notes = getattr(text_config, "attention_notes", ())
    # trials leave indexers out
    found = [with_indexer(each, field) for each in asked]
    return [replace(each, notes=(*each.notes, *notes)) for each in found]


def _own_requests(own: list[Any], num_keys: int, task: str | None, layer: int | None) -> list[LayerRequest]:
    """Return what modules ask for, with a note on those that ask for nothing.

    Raises:
        UnsupportedBackendError: one with this index does, or one with any (None).
    """
    asked: list[LayerRequest] = []
    silent: dict[int, UnsupportedBackendError] = {}
    for module in own:
        try:
            asked.append(module.layer_request(num_keys, task))
        except UnsupportedBackendError as refusal:
            if layer in (None, module.layer_idx):
                raise
            silent[module.layer_idx] = refusal
    if not asked:
        raise next(iter(silent.values()))
    which = f"layer {next(iter(silent), 0)} asks" if len(silent) == 1 else f"layers {shown([*silent])} ask"
    notes = (f"{which} the engine for nothing, and no cost here is of what is computed there.",) if silent else ()
    return [replace(each, notes=(*each.notes, *notes)) for each in asked]


def with_indexer(asked: LayerRequest, field: dict[str, Any] | None) -> LayerRequest:
    """Return what a layer asks for with the indexer that the config has, which `index` gave it; None: it has none."""
    if field is None or field["stage"] == DENSE:
        return asked
    top_k = field["top_k"]
    what = f"An indexer of {field['num_heads']} heads of {field['head_dim']} dimensions"
    asked = replace(asked, sends_more=True)
    if field["stage"] == WARMUP:
        return replace(asked, notes=(*asked.notes, f"{what} learns which {top_k:,} keys are worth reading."))
    note = f"{what} chooses up to {top_k:,} keys for a query; the time of its scores is left out."
    return replace(asked, most_keys=top_k, notes=(*asked.notes, note))


def _others(numbered: Mapping[Any, LayerRequest], layer: int) -> tuple[str, ...]:
    """Return a note on the layers that read otherwise, if there are any."""
    pattern = numbered[layer].followed.pattern
    others = [number for number, each in numbered.items() if each.followed.pattern != pattern]
    if not others:
        return ()
    which = f"layer {others[0]} reads" if len(others) == 1 else f"layers {shown(others)} read"
    return (f"{which} otherwise: layer={others[0]} explains the first of them.",)


def _beyond(config: PreTrainedConfig, num_keys: int) -> tuple[str, ...]:
    """Return a note on the positions of a model that has fewer than the text, if it says how many."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or not 0 < limit < num_keys:
        return ()
    return (f"The model is made for {limit:,} positions, and the text has {num_keys:,} tokens.",)


def _runs(model_or_config: PreTrainedModel | PreTrainedConfig, request: LayerRequest) -> tuple[str, ...]:
    """Return a note on a model whose own attention is computed by something else than the engine."""
    implementation = (
        model_or_config.config._attn_implementation if isinstance(model_or_config, PreTrainedModel) else None
    )
    if implementation in (None, NAME) or not request.followed.is_own:
        return ()
    return (
        f"The model runs on attn_implementation={shown(implementation)} now; this is what "
        f'model.set_attn_implementation("{NAME}") makes it run.',
    )


def _line(name: str, config: PreTrainedConfig, request: LayerRequest, layer: int, num_layers: int) -> str:
    where = f"layer {layer} of {num_layers} with attention"
    if config.get_text_config().is_encoder_decoder:
        where = f"{request.part} {where}"
    follows = "its own attention" if request.followed.is_own else "attention_pattern"
    return f"{name} ({config.model_type}), {where}, {'causal' if request.is_causal else 'bidirectional'}, {follows}"
