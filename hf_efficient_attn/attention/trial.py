"""A trial of a model before it is sparsified: one tiny forward pass on the meta device, without values or memory.

That transformers lets a model's attention be set does not prove that its layers call it. The trial finds out which
layers do, and whether one needs something that the engine cannot compute.
"""

import copy
import os
import traceback
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_efficient_attn.attention.given_choice import is_indexed
from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.layer_patterns import FIELD, NAME, config_patterns, layer_pattern
from hf_efficient_attn.attention.layer_request import LayerRequest, asked_by
from hf_efficient_attn.attention.model_parts import DECODER, ENCODER, mark_parts
from hf_efficient_attn.attention.refusals import refuse_unsupported
from hf_efficient_attn.attention.table_form import TABLE_DTYPE, is_causal_request, with_kind
from hf_efficient_attn.attention.trial_inputs import trial_inputs
from hf_efficient_attn.errors import EfficientAttentionError, UnsupportedBackendError

# the attention implementation of trials, and one that differs from it in the masks only
TRIAL, MATRIX_TRIAL = "efficient_trial", "efficient_matrix_trial"
# some models know implementations of transformers by name
CONTROLS = (MATRIX_TRIAL, "eager")
TORCH = os.path.dirname(torch.__file__) + os.sep
# part of torch's message where a step depends on values
NO_NUMBERS = "meta tensors"
# on the meta device torch has grouped products only for the second, and Fourier transforms only for the first
DTYPES = (torch.float32, torch.bfloat16)

# what the layers have asked for in the running trial
_asked: ContextVar[list[LayerRequest] | None] = ContextVar("_asked", default=None)


def try_model(model_class: Any, config: PreTrainedConfig) -> bool:
    """Raise if a model whose config has an `attention_pattern` would not follow it; return whether it could be run.

    A model that no trial can run (unknown inputs, steps that depend on values) is checked after its first forward pass
    instead (`follow_check`).

    Raises:
        ConfigurationError: a pattern that does not fit a layer.
        UnsupportedBackendError: no layer of a part calls the attention interface, or a layer uses the mask itself or
            needs something that the engine cannot compute.
    """
    if getattr(config.get_text_config(), "follows_patterns", False):
        return True
    asked = trial_requests(model_class, config)
    if asked is not None:
        followed = {(each.part, each.layer) for each in asked if not each.followed.is_own}
        check_followed(model_class.__name__, config.get_text_config(), followed)
    return asked is not None


def trial_requests(model_class: Any, config: PreTrainedConfig) -> list[LayerRequest] | None:
    """Return what the layers of a model ask the attention function for, in their order; None: no trial can be run.

    Raises:
        EfficientAttentionError: as `takes_tables`.
    """
    asked: list[LayerRequest] = []
    token = _asked.set(asked)
    try:
        return asked if takes_tables(model_class, config) else None
    finally:
        _asked.reset(token)


def base_class(config: PreTrainedConfig) -> Any:
    """Return the base model class of a config; None: the Auto classes have none."""
    found = MODEL_MAPPING.get(type(config), None)
    # the first of several
    return found[0] if isinstance(found, tuple) else found


def takes_tables(model_class: Any, config: PreTrainedConfig) -> bool:
    """Return True if a model takes token tables instead of matrices; False if no trial can be run.

    Raises:
        EfficientAttentionError: a layer refuses.
        UnsupportedBackendError: the model runs with matrices, but not with token tables.
    """
    for dtype in DTYPES:
        failures = _failures(model_class, config, TRIAL, dtype)
        if not all(failures):
            return True
        for control in CONTROLS:
            for failure, other in zip(failures, _failures(model_class, config, control, dtype), strict=False):
                # a failure of both at the same line, or one for lack of values, has nothing to do with masks
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


def check_followed(name: str, config: Any, followed: set[tuple[str, int | None]]) -> None:
    """Raise UnsupportedBackendError if layers that have a pattern did not call the attention function."""
    for part in (ENCODER, DECODER) if config.is_encoder_decoder else (ENCODER,):
        patterns = config_patterns(config.attention_pattern, config, part) or ()
        expected = {layer for layer, pattern in enumerate(patterns) if pattern is not None}
        layers = {layer for each, layer in followed if each == part or not config.is_encoder_decoder}
        # without types of layers, some may have no attention; modules that do not know their layer count as all layers
        known = getattr(config, "layer_types", None) is not None and None not in layers
        if expected and (not layers or (known and not expected <= layers)):
            missing = f"layer {min(expected - layers)}" if layers else f"no layer of its {part}"
            what = "does not call" if layers else "calls"
            raise UnsupportedBackendError(
                f"{name} does not use the attention interface of transformers everywhere: {missing} {what} it, so "
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
    """Record what a layer would follow, and return an output of the right shape.

    Raises:
        ConfigurationError: a pattern that does not fit the layer or its heads.
    """
    refuse_unsupported(module, query, kwargs)
    followed = layer_pattern(module, kwargs, attention_mask)
    # refuses heads that cannot share the patterns
    followed.pattern.heads(query.shape[1])
    asked = _asked.get()
    if asked is not None:
        asked.append(asked_by(module, query, key, value, followed, kwargs))
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
    """Return a matrix as eager attention adds it to scores."""
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=kwargs.get("dtype", torch.float32), device="meta")


def _failures(model_class: Any, config: PreTrainedConfig, implementation: str, dtype: torch.dtype) -> list[Any]:
    """Run a model without weights on one input after another; return the exception of each, None for one that works.

    Raises:
        EfficientAttentionError: the engine refuses it.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    if getattr(config.get_text_config(), "use_cache", None) is False:
        # as after a Trainer; without a cache, models look for packed documents in positions, which have no values here
        config.get_text_config().use_cache = True
    # indexers refuse trials, which say nothing about them
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
                # what an input asked for that did not work does not count
                (_asked.get() or []).clear()
                failures.append(_stopped_by(model, inputs))
                if failures[-1] is None:
                    break
        except EfficientAttentionError:
            raise
        # code of other models may raise anything
        except Exception as error:
            failures.append(error)
    return failures


def _stopped_by(model: Any, inputs: dict[str, Tensor]) -> Exception | None:
    try:
        model(**inputs)
    except EfficientAttentionError:
        raise
    # as above, anything
    except Exception as error:
        return error
    return None


# what is registered in transformers: names, attention functions, mask functions
TRIALS = (
    (TRIAL, trial_attention, trial_mask),
    (MATRIX_TRIAL, matrix_trial_attention, matrix_trial_mask),
)
