"""A trial of a model before it is sparsified: one tiny forward pass on the meta device, without values or memory.

Even if transformers allows setting a model's attention implementation, its layers may not call it. The trial finds out
which layers do, and whether one needs something that the engine cannot compute.
"""

import copy
import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.errors import EfficientAttentionError, UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import (
    DECODER,
    ENCODER,
    FIELD,
    NAME,
    config_patterns,
    is_named_cross,
    layer_pattern,
    mark_parts,
    part_of,
)
from hf_efficient_attn.integration.names import INDEXER, TABLE_DTYPE, is_causal_request, with_kind
from hf_efficient_attn.integration.selected_keys import is_indexed
from hf_efficient_attn.integration.unsupported import refuse_unsupported

# Inputs without values for the trial of any model, by the names of the arguments of its forward method.


SOURCE_TOKENS, TARGET_TOKENS = 7, 5
# one second of sound
WAVE_SAMPLES = 16000
SPECTROGRAM_FRAMES = 64
# for encoder-decoders, passed in addition to the required arguments
TARGET = "decoder_input_ids"


def trial_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs to try in turn: first only the main and the required inputs, then also ids, pixels and encodings.

    Some composite models need only one of their inputs, others need all.
    """
    model_class: Any = type(model)
    names = forward_arguments(model_class)
    main = model.main_input_name
    first = {main} if isinstance(main, str) else set(main)
    first |= {name for name, has_default in names.items() if not has_default}
    first |= {TARGET} if model.config.is_encoder_decoder else set()
    smaller = _made(model, first & names.keys())
    yield smaller
    larger = _made(model, names.keys() & {"input_ids", "pixel_values", "encoder_hidden_states", *first})
    if larger.keys() != smaller.keys():
        yield larger


def _made(model: Any, names: set[str]) -> dict[str, Tensor]:
    dtypes = {True: torch.long, False: model.dtype}
    return {
        name: torch.ones(SHAPES[name](model.config), dtype=dtypes[name.endswith("ids")], device="meta")
        for name in names & SHAPES.keys()
    }


@functools.lru_cache(maxsize=1024)
def forward_arguments(model_class: Any) -> dict[str, bool]:
    """Return the argument names of a forward method in order, and whether each argument has a default."""
    parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]
    return {
        each.name: each.default is not each.empty
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }


def _field(config: Any, name: str, default: Any) -> Any:
    """Return a field of a config, or of the first of its parts that has one."""
    parts = [getattr(config, each, None) for each in config.sub_configs]
    values = (getattr(each, name, None) for each in (config, *parts))
    return next((each for each in values if each is not None), default)


def _image(config: Any) -> tuple[int, ...]:
    size = _field(config, "image_size", 32)
    return 1, _field(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size)


def _features(config: Any) -> tuple[int, ...]:
    """Return the shape of a spectrogram; models like Whisper take two frames per position."""
    bins = _field(config, "num_mel_bins", None)
    if bins is None:
        return 1, SPECTROGRAM_FRAMES, _field(config, "input_feat_per_channel", 80)
    return 1, bins, 2 * _field(config, "max_source_positions", SPECTROGRAM_FRAMES // 2)


def _wave(config: Any) -> tuple[int, ...]:
    bins = _field(config, "num_mel_bins", None)
    return (1, WAVE_SAMPLES) if bins is None else (1, _field(config, "max_length", SPECTROGRAM_FRAMES), bins)


def _embeddings(config: Any) -> tuple[int, ...]:
    return 1, SOURCE_TOKENS, config.get_text_config().hidden_size


def _encoded(config: Any) -> tuple[int, ...]:
    return 1, SOURCE_TOKENS, _field(config, "encoder_hidden_size", config.get_text_config().hidden_size)


# the shapes of inputs by argument name; trials cannot make other inputs
SHAPES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "input_ids": lambda _: (1, SOURCE_TOKENS),
    TARGET: lambda _: (1, TARGET_TOKENS),
    "inputs_embeds": _embeddings,
    "query_embeds": _embeddings,
    "encoder_hidden_states": _encoded,
    "pixel_values": _image,
    "input_features": _features,
    "input_values": _wave,
}


def request_of(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, layer_spec: LayerPattern, options: dict[str, Any]
) -> LayerRequest:
    """Return the request of an attention module of transformers, given the arguments of the attention function."""
    part, config = part_of(module), getattr(module, "config", None)
    own_is_causal = layer_spec.is_own and layer_spec.pattern.is_causal
    # full attention in a decoder is cross-attention
    is_cross = layer_spec.attends_to_all and (part == DECODER or is_named_cross(module))
    return LayerRequest(
        layer_spec,
        num_heads=query.shape[1],
        num_key_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        config=config,
        part=part,
        is_causal=layer_spec.is_causal or own_is_causal,
        is_cross=is_cross,
        layer=getattr(module, "layer_idx", None),
        softcap=options.get("softcap"),
        has_sinks=options.get("s_aux") is not None,
        has_bias=options.get("position_bias") is not None,
        sends_more=getattr(config, "sends_more", False),
    )


# the attention implementation of trials, and one that differs from it only in the masks
TRIAL, MATRIX_TRIAL = "efficient_trial", "efficient_matrix_trial"
# "eager" is also a control because some models compare the name of the implementation
CONTROLS = (MATRIX_TRIAL, "eager")
TORCH = os.path.dirname(torch.__file__) + os.sep
# part of torch's error message if a step depends on values
NO_NUMBERS = "meta tensors"
# on the meta device, torch has Fourier transforms only in float32, and grouped products only in bfloat16
DTYPES = (torch.float32, torch.bfloat16)

# the requests of the layers in the running trial
_requests: ContextVar[list[LayerRequest] | None] = ContextVar("_requests", default=None)


def try_model(model_class: Any, config: PreTrainedConfig) -> bool:
    """Raise if a model would not follow the `attention_pattern` of its config; return whether a trial could be run.

    A model for which no trial can be run (unknown inputs, steps that depend on values) is checked after its first
    forward pass instead (`guard.py`).

    Raises:
        ConfigurationError: a pattern that does not fit a layer.
        UnsupportedBackendError: no layer of a part calls the attention interface, or a layer uses the mask itself or
            needs something that the engine cannot compute.
    """
    if getattr(config.get_text_config(), "follows_patterns", False):
        return True
    requests = trial_requests(model_class, config)
    if requests is not None:
        sparse_layers = {(each.part, each.layer) for each in requests if not each.layer_spec.is_own}
        check_sparse_layers(model_class.__name__, config.get_text_config(), sparse_layers)
    return requests is not None


def trial_requests(model_class: Any, config: PreTrainedConfig) -> list[LayerRequest] | None:
    """Return the requests of a model's layers in order; None: no trial can be run.

    Raises:
        EfficientAttentionError: as in `takes_tables`.
    """
    requests: list[LayerRequest] = []
    token = _requests.set(requests)
    try:
        return requests if takes_tables(model_class, config) else None
    finally:
        _requests.reset(token)


def base_class(config: PreTrainedConfig) -> Any:
    """Return the base model class of a config; None: the Auto classes have none."""
    found = MODEL_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def takes_tables(model_class: Any, config: PreTrainedConfig) -> bool:
    """Return True if a model takes token tables instead of matrices; False if no trial can be run.

    Raises:
        EfficientAttentionError: the engine refuses a layer.
        UnsupportedBackendError: the model runs with mask matrices, but not with token tables.
    """
    for dtype in DTYPES:
        failures = _failures(model_class, config, TRIAL, dtype)
        if not all(failures):
            return True
        for control in CONTROLS:
            for failure, other in zip(failures, _failures(model_class, config, control, dtype), strict=False):
                # if both fail at the same line, or the control lacks values, the masks are not the cause
                if other is None or (_place(other) != _place(failure) and NO_NUMBERS not in str(other)):
                    raise UnsupportedBackendError(
                        f"{model_class.__name__} uses attention masks itself, outside of the attention interface of "
                        f'transformers, so attn_implementation="{NAME}" cannot compute it ({type(failure).__name__}: '
                        f'{str(failure)[:100]}). Use "sdpa" or "eager", without attention_pattern.'
                    ) from failure
    return False


def _place(error: BaseException) -> tuple[str, int]:
    """Return the file and line, outside of torch, that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(each for each in reversed(frames) if not each.filename.startswith(TORCH))
    return frame.filename, frame.lineno or 0


def check_sparse_layers(name: str, config: Any, sparse_layers: set[tuple[str, int | None]]) -> None:
    """Raise UnsupportedBackendError if layers with a pattern did not call the attention function."""
    for part in (ENCODER, DECODER) if config.is_encoder_decoder else (ENCODER,):
        patterns = config_patterns(config.attention_pattern, config, part) or ()
        expected = {layer for layer, pattern in enumerate(patterns) if pattern is not None}
        layers = {layer for each, layer in sparse_layers if each == part or not config.is_encoder_decoder}
        # without layer_types, some layers may have no attention; a module without layer_idx counts as all layers
        known = getattr(config, "layer_types", None) is not None and None not in layers
        if expected and (not layers or (known and not expected <= layers)):
            missing = f"layer {min(expected - layers)}" if layers else f"no layer of its {part}"
            what = "does not call" if layers else "calls"
            raise UnsupportedBackendError(
                f"{name} does not use the attention interface of transformers in every layer: {missing} {what} it, so "
                "attention_pattern would be ignored there. model_cards/engine.md lists models that can follow a "
                "pattern."
            )


def trial_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record the request of a layer, and return an output of the right shape.

    Raises:
        ConfigurationError: a pattern that does not fit the layer or its heads.
    """
    refuse_unsupported(module, query, kwargs)
    layer_spec = layer_pattern(module, kwargs, attention_mask)
    # raises if the patterns cannot be divided among the heads
    layer_spec.pattern.heads(query.shape[1])
    requests = _requests.get()
    if requests is not None:
        requests.append(request_of(module, query, key, value, layer_spec, kwargs))
    return matrix_trial_attention(module, query, key, value)


def matrix_trial_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return an output of the right shape."""
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def trial_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return a token table without rows, or a matrix for layers with an indexer."""
    if not kwargs.get("allow_is_causal_skip", True) and is_indexed(kwargs.get("config")):
        return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    table = torch.empty(batch_size, 1, 0, kv_length, dtype=TABLE_DTYPE, device="meta")
    return with_kind(table, is_causal_request(kwargs))


def matrix_trial_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return a mask matrix like those that eager attention adds to scores."""
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=kwargs.get("dtype", torch.float32), device="meta")


def _failures(model_class: Any, config: PreTrainedConfig, implementation: str, dtype: torch.dtype) -> list[Any]:
    """Run a model on the meta device with each input until one works; return each input's exception, None for success.

    Raises:
        EfficientAttentionError: the engine refuses the model.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    if getattr(config.get_text_config(), "use_cache", None) is False:
        # Trainer leaves use_cache=False; without a cache, models look for packed documents in the values of positions
        config.get_text_config().use_cache = True
    # indexers refuse trials, which do not test them
    config.get_text_config().__dict__.pop(INDEXER, None)
    if implementation != TRIAL:
        # with a pattern, a model would refuse any other attention
        config.get_text_config().__dict__.pop(FIELD, None)
    failures: list[Exception | None] = []
    with torch.device("meta"), torch.no_grad():
        try:
            model = model_class(config).to(dtype).eval()
            mark_parts(model)
            for inputs in trial_inputs(model):
                # forget the requests of an earlier input, which failed
                (_requests.get() or []).clear()
                failures.append(_stopped_by(model, inputs))
                if failures[-1] is None:
                    break
        except EfficientAttentionError:
            raise
        # a model may raise anything
        except Exception as error:
            failures.append(error)
    return failures


def _stopped_by(model: Any, inputs: dict[str, Tensor]) -> Exception | None:
    try:
        model(**inputs)
    except EfficientAttentionError:
        raise
    # a model may raise anything
    except Exception as error:
        return error
    return None


# registered in transformers: names, attention functions, mask functions
TRIALS = (
    (TRIAL, trial_attention, trial_mask),
    (MATRIX_TRIAL, matrix_trial_attention, matrix_trial_mask),
)


# A trial that finds out whether the layers of a model pass keyword arguments on to their attention.


def passes_on(model_class: Any, config: PreTrainedConfig, name: str) -> bool:
    """Return whether the attention of every layer gets a keyword argument of the model; True if the trial fails before.

    Args:
        model_class: the class of a decoder whose base model has `layers`, each with `self_attn`.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = TRIAL
    # without a cache, models look for packed documents in the values of positions
    config.use_cache = True
    got: list[bool] = []

    def note(_: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        got.append(name in options)

    # a model may raise anything
    with suppress(Exception), torch.device("meta"), torch.no_grad():
        model = model_class(config).eval()
        for layer in model.base_model.layers:
            layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        model(**next(trial_inputs(model)), **{name: None})
    return all(got)


# Models that use masks outside the attention interface would take numbers in a token table for a mask; refused here.


# the configs whose models were tried; configs have no hash
_tried: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refuse_mask_user(config: Any) -> None:
    """Raise UnsupportedBackendError if the base model of a config uses masks itself; one trial per config."""
    if config in _tried:
        return
    model_class = base_class(config)
    if model_class is not None and not getattr(config, "follows_patterns", False):
        takes_tables(model_class, config)
    mark_tried(config)


def mark_tried(config: Any) -> None:
    """Record that the models of a config do not use masks themselves, or that no trial can tell."""
    _tried[config] = True


def copies_of(config: Any, model: Any) -> list[Any]:
    """Return all configs of this class in the modules of a model: encoder-decoders such as T5 have a copy per part."""
    found = (getattr(module, "config", None) for module in model.modules())
    return [*{id(each): each for each in found if type(each) is type(config)}.values()]
