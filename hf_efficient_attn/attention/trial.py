"""A trial of a model before it is sparsified: one tiny forward on the meta device, without numbers or memory.

That transformers offers to set a model's attention is no proof that its layers call it. The trial finds out which do,
and whether one needs what the engine cannot compute.
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

from hf_efficient_attn.attention.layer_patterns import DECODER, ENCODER, NAME, config_patterns, layer_pattern, part_of
from hf_efficient_attn.attention.refusals import refuse_unsupported
from hf_efficient_attn.attention.table_form import TABLE_DTYPE, is_causal_request, with_kind
from hf_efficient_attn.errors import EfficientAttentionError, UnsupportedBackendError

# the attention implementation of trials
TRIAL = "efficient_trial"
TORCH = os.path.dirname(torch.__file__) + os.sep
# torch knows grouped products without numbers only of the second, and Fourier transforms only of the first
DTYPES = (torch.float32, torch.bfloat16)
SOURCE_TOKENS, TARGET_TOKENS = 7, 5

# the parts and layers that followed a pattern in the trial that runs
_followed: ContextVar[set[tuple[str, int | None]] | None] = ContextVar("_followed", default=None)


def try_model(model_class: Any, config: PreTrainedConfig) -> None:
    """Raise if a model whose config has an `attention_pattern` would not follow it.

    A model that no trial can run (inputs of an unknown kind, steps that depend on values) is left to the check after
    its first forward (`follow_check`).

    Raises:
        ConfigurationError: a pattern that a layer cannot have.
        UnsupportedBackendError: no layer of a part calls the attention interface, a layer needs what the engine cannot
            compute, or uses the mask itself.
    """
    if getattr(model_class, "follows_patterns", False):
        return
    followed: set[tuple[str, int | None]] = set()
    token = _followed.set(followed)
    try:
        is_run = takes_tables(model_class, config)
    finally:
        _followed.reset(token)
    if is_run:
        check_followed(model_class.__name__, config.get_text_config(), followed)


def base_class(config: PreTrainedConfig) -> Any:
    """Return the base model of a config; None: the auto classes know none."""
    return MODEL_MAPPING.get(type(config), None)


def takes_tables(model_class: Any, config: PreTrainedConfig) -> bool:
    """Return True if a model takes token tables in place of masks; False: no trial can be run.

    Raises:
        EfficientAttentionError: a layer refuses.
        UnsupportedBackendError: the model runs on eager attention, but not with token tables.
    """
    for dtype in DTYPES:
        failure = _failure(model_class, config, TRIAL, dtype)
        if failure is None:
            return True
        other = _failure(model_class, config, "eager", dtype)
        # what stops both at the same place (a step that depends on values) has nothing to do with masks
        if other is None or _place(other) != _place(failure):
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
        # without kinds of layers, some may have no attention; modules that do not know their layer count as all
        known = getattr(config, "layer_types", None) is not None and None not in layers
        if expected and (not layers or (known and not expected <= layers)):
            missing = f"layer {min(expected - layers)}" if layers else f"no layer of its {part}"
            what = "does not call" if layers else "calls"
            raise UnsupportedBackendError(
                f"{name} does not use the attention interface of transformers everywhere: {missing} {what} it, so "
                "attention_pattern would be ignored there. The README lists models that can follow a pattern."
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
    """Note what a layer would follow, and return an output of the right shape."""
    refuse_unsupported(module, query, kwargs)
    followed = layer_pattern(module, kwargs, attention_mask)
    noted = _followed.get()
    if not followed.is_own and noted is not None:
        noted.add((part_of(module), getattr(module, "layer_idx", None)))
    shape = query.shape[0], query.shape[2], query.shape[1], value.shape[3]
    return query.new_empty(shape), None


def trial_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return a token table without rows."""
    table = torch.empty(batch_size, 1, 0, kv_length, dtype=TABLE_DTYPE, device="meta")
    return with_kind(table, is_causal_request(kwargs))


def _failure(model_class: Any, config: PreTrainedConfig, implementation: str, dtype: torch.dtype) -> Exception | None:
    """Run a model without weights; return what stopped it.

    Raises:
        EfficientAttentionError: the engine refuses it.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    try:
        with torch.device("meta"), torch.no_grad():
            model = model_class(config).to(dtype).eval()
            model(**_inputs(model))
    except EfficientAttentionError:
        raise
    # a model that is not ours may be stopped by anything
    except Exception as error:
        return error
    return None


def _inputs(model: Any) -> dict[str, Any]:
    """Return inputs by the kind that the model reads first."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.empty(1, getattr(config, "num_channels", 3), height, width, device="meta")}
    inputs: dict[str, Any] = {"input_ids": torch.ones(1, SOURCE_TOKENS, dtype=torch.long, device="meta")}
    if config.is_encoder_decoder and "decoder_input_ids" in model.forward.__code__.co_varnames:
        inputs["decoder_input_ids"] = torch.ones(1, TARGET_TOKENS, dtype=torch.long, device="meta")
    return inputs
