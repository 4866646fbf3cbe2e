"""Checks before every forward pass of models on "efficient", however the models were made.

`from_pretrained`, `from_config` and classes called with a config all go through `PreTrainedModel.__init__`; existing
models change in `set_attn_implementation`. These two methods are replaced because no other code sees all models.
"""

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import CACHE_NAME, OLD_CACHE_NAME, cache_in, enter, leave, with_cache
from hf_efficient_attn.integration.image_grids import check_images
from hf_efficient_attn.integration.layer_patterns import (
    DECODER,
    FIELD,
    KNOWN,
    NAME,
    PART,
    config_patterns,
    is_by_part,
    keep_encoder,
    keep_own_part,
    mark_parts,
    part_of,
    parts_of,
)
from hf_efficient_attn.integration.model_info import check_class, check_home, checked_pattern
from hf_efficient_attn.integration.trial import (
    MATRIX_TRIAL,
    TRIAL,
    base_class,
    copies_of,
    forward_arguments,
    mark_tried,
    try_model,
)
from hf_efficient_attn.integration.unsupported import (
    MARKED,
    check_marked,
    check_mask_values,
    refuse_division,
    refuse_empty,
    refuse_paged,
)
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.messages import shown, warn_once
from hf_efficient_attn.patterns.config_spec import layers_to_dict

# A check after the first forward pass of a sparsified model: every layer that should follow the pattern requested it.
#
# This detects attention that other libraries replaced before that pass, but not what they replace later.


# the attribute in which a part stores the spec that its layers were seen to follow
FOLLOWED = "_followed_attention_pattern"
# the config fields that make training skip layers at random
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def watch(model: Any) -> None:
    """Register a check after the first forward pass of every part of a model that should follow a pattern."""
    parts: list[tuple[str, Any]] = [*parts_of(model).items()]
    # the model below a head may also be called without the head
    parts += [(name, below) for name, part in parts if (below := getattr(part, "base_model", part)) is not part]
    for name, part in parts:
        if FollowCheck(name) not in part._forward_hooks.values():
            part.register_forward_hook(FollowCheck(name))


@dataclass(frozen=True)
class FollowCheck:
    """A forward hook of a part of a model ("encoder" or "decoder") that checks that its layers follow the pattern."""

    part: str

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Raise UnsupportedBackendError if a layer of the part has not requested its pattern."""
        run_untraced(check_pattern_requested, module, self.part)


def check_pattern_requested(module: Any, part: str) -> None:
    """Raise UnsupportedBackendError if a layer of a part has not requested its pattern; skipped once all have."""
    config = module.config.get_text_config()
    spec = getattr(config, FIELD, None)
    if spec is None or module.__dict__.get(FOLLOWED) is spec:
        return
    patterns = config_patterns(spec, config, part) or ()
    layers = layers_of(module)
    requested = {getattr(each, "layer_idx", None) for each in layers.values() if requested_pattern(each) is not None}
    # the cross-attention of a layer may be of the same class as its self-attention
    expected = {number for each in layers.values() if (number := patterned_layer(each, part, patterns)) is not None}
    missing = set() if None in requested else expected - requested
    if module.training and any(getattr(config, name, None) for name in LAYER_DROPS):
        return
    if missing or (not requested and any(each is not None for each in patterns)):
        which = f"layer {min(missing)} does not call" if requested else "none of its layers calls"
        raise UnsupportedBackendError(
            f"{type(module).__name__} has computed without its attention_pattern: {which} the attention interface of "
            "transformers. Do not use the library that replaces its attention, or remove the pattern with "
            "sparsify(model, None)."
        )
    module.__dict__[FOLLOWED] = spec


def layers_of(module: nn.Module) -> dict[str, Any]:
    """Return the modules that have requested a pattern, and all other modules of their classes, by name."""
    kinds = {type(each) for each in module.modules() if KNOWN in each.__dict__}
    return {name: each for name, each in module.named_modules() if type(each) in kinds}


def requested_pattern(module: nn.Module) -> Any:
    """Return the pattern that a module has requested; None: it requested none, or computes its own attention."""
    return module.__dict__.get(KNOWN, (None, None, None))[2]


def patterned_layer(module: Any, part: str, patterns: Any) -> int | None:
    """Return the index of the layer to which an attention module belongs, if that layer has a pattern, else None."""
    layer = getattr(module, "layer_idx", None)
    is_layer = layer is not None and layer < len(patterns) and part_of(module) == part
    return layer if is_layer and patterns[layer] is not None else None


# Models built from one config object share it, so a pattern written into the config of one changes all of them.


# all models that transformers has built, including those that are parts of other models
_models: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
_lock = Lock()


def note_model(model: PreTrainedModel) -> None:
    """Record that a model exists."""
    with _lock:
        _models.add(model)


def _noted() -> list[PreTrainedModel]:
    with _lock:
        return list(_models)


def leave_shared_configs(model: PreTrainedModel) -> None:
    """Give a model copies of its configs if an unrelated model holds one of them, so that the other does not change.

    Models are related if they are parts of one model. A model that contains this one gets the same copies.
    """
    whole = _whole(model)
    own = set(whole.modules())
    held = {id(config) for module in own for config in _configs_of(module).values()}
    others = [other for other in _noted() if other not in own]
    if not any(id(config) in held for other in others for config in _configs_of(other).values()):
        return
    # the memo makes one copy of each config, so that shared configs stay shared
    memo: dict[int, Any] = {}
    for module in own:
        for name, config in _configs_of(module).items():
            module.__dict__[name] = copy.deepcopy(config, memo)


def _whole(model: PreTrainedModel) -> PreTrainedModel:
    """Return the largest model that contains a model, or the model itself if it is not a part of another."""
    holders = [other for other in _noted() if other is not model and any(part is model for part in other.modules())]
    return max([model, *holders], key=lambda each: sum(1 for _ in each.modules()))


def _configs_of(module: nn.Module) -> dict[str, PreTrainedConfig]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PreTrainedConfig)}


# A warning about adapters whose base model is saved without a pattern.


# the attribute in which a model that was sparsified after loading stores the name from which it was loaded
BASE = "_name_without_pattern"


def warn_of_base(model: Any, inputs: Mapping[str, Any]) -> None:
    """Warn that a PEFT adapter that is trained on this model will name a base model without its pattern.

    inputs: the arguments of a call. If virtual tokens are trained, inputs of the frozen model require a gradient.
    """
    base = model.__dict__.get(BASE)
    if base and torch.is_grad_enabled() and is_adapted(model, inputs):
        warn_once(
            f"An adapter that is trained on this model will name {base} as its base model, which is saved without "
            "this pattern: loading it by that name gives the base model's own attention. Save the sparsified model "
            "(save_pretrained) and train from that folder, or sparsify the base model again wherever the adapter is "
            "loaded."
        )


def watch_reference(model: PreTrainedModel) -> None:
    """Have a model warn when it is called, if TRL may have loaded it as the reference of a sparsified model."""
    if "trl" in sys.modules and has_sparse_twin(model) and warn_of_reference not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(warn_of_reference)


def has_sparse_twin(model: PreTrainedModel) -> bool:
    """Return whether another model that was loaded by the same name was sparsified afterwards."""
    name = getattr(model.config, "_name_or_path", "")
    return bool(name) and any(each.__dict__.get(BASE) == name for each in _noted() if each is not model)


def warn_of_reference(model: Any, inputs: tuple[Any, ...]) -> None:
    """Warn that a model has no pattern, although another model of its name was sparsified."""
    if not has_pattern(model.config) and has_sparse_twin(model):
        warn_once(
            f"{model.config._name_or_path} is loaded with full attention, and another model of that name was "
            "sparsified after it was loaded. As the reference model of TRL (DPO, GRPO) it computes other outputs than "
            "the model: save the sparsified model (save_pretrained), and start TRL from that folder."
        )


def is_adapted(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether a call trains an adapter, within the model or as inputs or cached keys of a frozen model."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    if learns:
        return "peft_config" in model.__dict__
    cache = cache_in(inputs)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    given = [inputs.get("inputs_embeds"), *(getattr(layer, "keys", None) for layer in layers)]
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)


GUARDED = ("__init__", "set_attn_implementation")
MARK = "_guards_models"
# the attribute in which a model stores the spec that it was found able to follow
CHECKED = "_checked_attention_pattern"
# the attribute in which a model stores the spec with which its layers have used marked tokens
TAKES_MARKED = "_takes_global_tokens"
MASKS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
# ids, and the embeddings that replace them: `generate` passes empty ids with embeddings
EMBEDDED = {"input_ids": "inputs_embeds", "decoder_input_ids": "decoder_inputs_embeds"}
INPUTS = (*EMBEDDED, *EMBEDDED.values(), "pixel_values", "input_features", "input_values")

_first_forward = threading.Lock()


def guard_models() -> None:
    """Guard every model that transformers builds or switches to "efficient"; may be called repeatedly."""
    for name in GUARDED:
        method = getattr(PreTrainedModel, name)
        marked = getattr(method, MARK, None)
        if marked is not guard:
            # this replaces the guard of a copy of these sources (`hub`)
            setattr(PreTrainedModel, name, with_guard(method if marked is None else method.__wrapped__))


def with_guard(method: Any) -> Any:
    """Return a model method that also guards the model afterwards."""

    @functools.wraps(method)
    def guarding(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(model, *args, **kwargs)
        guard(model)
        return result

    setattr(guarding, MARK, guard)
    return guarding


def guard(model: PreTrainedModel) -> None:
    """Register checks before every forward pass of a model and its parts that have a pattern or run on "efficient"."""
    note_model(model)
    watch_reference(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and needs_guard(module):
            keep_own_part(module)
            if before_forward not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(before_forward, with_kwargs=True)
                module.register_forward_hook(after_forward, with_kwargs=True, always_call=True)
            if has_pattern(module.config):
                check_readable(module)
                # older versions of transformers have no such flag and allow context parallelism with sdpa only
                module._supports_context_parallel = False


def needs_guard(model: PreTrainedModel) -> bool:
    """Return whether a model has a pattern or runs on "efficient", and its family does not check its own inputs.

    The config holds this flag (`checks_inputs`), because other models may hold a backbone of such a family under the
    same config.
    """
    implementation = model.config._attn_implementation
    if getattr(model.config, "checks_inputs", False) or implementation in (TRIAL, MATRIX_TRIAL):
        return False
    return has_pattern(model.config) or implementation == NAME


def has_pattern(config: PreTrainedConfig) -> bool:
    """Return whether a config has a pattern."""
    return getattr(config, FIELD, None) is not None


def check_readable(model: PreTrainedModel) -> None:
    """Raise ConfigurationError if a model's pattern cannot be parsed, for example because its class is not imported."""
    spec = getattr(model.config, FIELD)
    for each in spec.values() if is_by_part(spec) else [spec]:
        if each is not None:
            layers_to_dict(each)


def before_forward(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Check a model, once per pattern, and its inputs; a hook before every forward pass.

    If two caches are given (see `cache_in`), the model gets one of them.

    Raises:
        ConfigurationError, UnsupportedBackendError: `sparsify` would refuse the model and pattern, or the model runs on
            another attention implementation, or is divided among processes in a way that fails.
        InputError: there are no tokens, or a padding mask on the CPU has values other than 0 and 1.
    """
    refuse_other_attention(model, options)
    if has_pattern(model.config):
        check_images(model, inputs, options)
    if model.config._attn_implementation != NAME:
        return None
    if torch.compiler.is_compiling():
        run_untraced(enter, model)
        return None
    current = getattr(PreTrainedModel.__init__, MARK, guard)
    if current is not guard:
        hand_over(model, current, inputs, options)
        return None
    model_class: Any = type(model)
    names = forward_arguments(model_class)
    given = {**dict(zip(names, inputs, strict=False)), **options}
    are_known = len(inputs) <= len(names)
    cache = cache_in(given)
    refuse_paged(cache)
    enter(model, given.get("position_ids"), are_known, cache)
    # checks must not become part of a traced graph
    if not is_tracing():
        if has_pattern(model.config):
            warn_of_base(model, given)
            refuse_division(model)
            check_once(model)
        check_inputs(given)
    has_two = options.get(OLD_CACHE_NAME) is not None and options.get(CACHE_NAME) is not None
    return (inputs, with_cache(options)) if has_two else None


def after_forward(model: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """Leave the context of a forward pass; a hook after every forward pass, even a failed one.

    Raises:
        InputError: the call marked global tokens, and none of the layers with a pattern got them.
    """
    # the output of a failed forward pass is None
    run_untraced(leave_forward, model, options.get(MARKED) is not None and output is not None)


def leave_forward(model: Any, is_marked: bool) -> None:
    """Leave the context of a forward pass, and refuse marked tokens that reached no layer."""
    context, spec = leave(model), getattr(model.config, FIELD, None)
    if not is_marked or context is None or spec is None:
        return
    if context.has_marked:
        # remembered, because layers that are compiled on their own record it only while they are traced
        model.__dict__[TAKES_MARKED] = spec
    elif model.__dict__.get(TAKES_MARKED) is not spec and getattr(model, PART, None) != DECODER:
        raise InputError(
            f"{MARKED} has no effect in this {type(model).__name__}, which does not pass it on to layers that follow "
            "attention_pattern. Leave it out, and write the positions into the pattern: band(...) | global(...)."
        )


def hand_over(model: Any, current: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Hand a model that a copy of these sources (`hub`) guards over to the guard of the package, imported later.

    Args:
        current: the `guard` of the package.
    """
    hooks = model._forward_pre_hooks
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is before_forward]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        # these hold objects of the copy's classes
        module.__dict__.pop(KNOWN, None)
        module.__dict__.pop(CHECKED, None)
    known = set(hooks)
    current(model)
    # torch has already collected the hooks of this call, so the new ones are called here
    for key in hooks.keys() - known:
        hooks[key](model, inputs, options)


def check_inputs(given: dict[str, Any]) -> None:
    """Raise InputError for inputs without tokens, and for masks with values other than 0 and 1.

    Masks on accelerators are not checked, because that would synchronize with the device.
    """
    for name in INPUTS:
        if given.get(EMBEDDED.get(name, "")) is None:
            refuse_empty(name, given.get(name), num_axes=2)
    for name in MASKS:
        mask = given.get(name)
        if isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and not is_tracing(mask):
            check_mask_values(mask)
    marked, mask = given.get(MARKED), given.get(MASKS[0])
    if isinstance(marked, torch.Tensor) and marked.device.type == "cpu" and not is_tracing(marked):
        is_padding = isinstance(mask, torch.Tensor) and mask.shape == marked.shape
        check_marked(marked, mask if is_padding else None)


def refuse_other_attention(model: Any, options: dict[str, Any]) -> None:
    """Raise UnsupportedBackendError if a model with a pattern would compute without it.

    If a call asks for attention weights, "eager" is changed to "efficient", which also returns them: Whisper's
    `generate` with `return_token_timestamps=True` writes "eager" into the config and leaves it there.
    """
    implementation = model.config._attn_implementation
    if has_pattern(model.config) and implementation != NAME:
        if implementation == "eager" and options.get("output_attentions"):
            model.config._attn_implementation = NAME
            return
        raise UnsupportedBackendError(
            f"This {type(model).__name__} has an attention_pattern, but its attn_implementation is "
            f"{shown(implementation)}, "
            f'which ignores patterns and would compute other outputs. Call model.set_attn_implementation("{NAME}"), '
            "or sparsify(model, None) for the model's own attention."
        )


def check_once(model: Any) -> None:
    """Run the checks of `sparsify` at a model's first forward pass, if `sparsify` was not called.

    Raises:
        ConfigurationError, UnsupportedBackendError: as in `sparsify`.
    """
    spec = getattr(model.config, FIELD)
    if model.__dict__.get(CHECKED) is spec:
        return
    with _first_forward:
        if model.__dict__.get(CHECKED) is spec:
            return
        check_home(model.config)
        # transformers cannot read the source of a model from a notebook; then the models that it holds decide
        can = (each._can_set_attn_implementation() for each in model.modules() if isinstance(each, PreTrainedModel))
        if not any(can):
            check_class(type(model), model.config)
        keep_encoder(model)
        if not has_pattern(model.config):
            return
        checked_pattern(getattr(model.config, FIELD), model.config)
        # `generate` calls the encoder before the whole model
        is_part = model.config.is_encoder_decoder and model in parts_of(model).values()
        if try_model((is_part and base_class(model.config)) or type(model), model.config):
            for config in copies_of(model.config, model):
                mark_tried(config)
        mark_parts(model)
        watch(model)
        mark_checked(model)


def mark_checked(model: PreTrainedModel) -> None:
    """Record that a model and its parts can follow the patterns of their configs."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and has_pattern(module.config):
            module.__dict__[CHECKED] = getattr(module.config, FIELD)
