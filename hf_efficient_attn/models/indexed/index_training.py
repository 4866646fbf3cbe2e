"""Training of indexers: their loss is added to the loss of the model."""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.indexer import (
    DENSE,
    LOSSES,
    RECALLS,
    WARMUP,
    LayerNumbers,
    LightningIndexer,
    indexers_of,
)
from hf_efficient_attn.integration.names import INDEXER
from hf_efficient_attn.models.heads.outputs import (
    CAUSAL_LM,
    add_auxiliary_loss,
    expect_use,
    predicted_labels,
    with_auxiliary_loss,
)

# With FSDP, each indexer is a separate sharding unit, like each layer of the model.
#
# The backward pass of an indexer's loss does not go through its layer. If the indexer were in the unit of the layer,
# FSDP would gather its parameters only for the backward pass of the layer, and would reduce the gradients after it.


# the attribute with the FSDP plan of transformers, which maps module names to strategies, and the strategy for a unit
PLAN, FREED = "_fsdp_plan", "free_full_weight"


def name_units(model: Any) -> None:
    """Make accelerate, Trainer and transformers shard each indexer of a model as a separate FSDP unit."""
    model._no_split_modules = {*(model._no_split_modules or ()), LightningIndexer.__name__}
    plan = getattr(model, PLAN, None)
    if plan:
        base = next(name for name, module in model.named_modules() if module is model.base_model)
        plan[".".join(filter(None, (base, "layers.*.self_attn.indexer")))] = FREED


def refuse_shared_units(model: Any) -> None:
    """Raise UnsupportedBackendError if FSDP shards an indexer together with its layer."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for layer in model.base_model.layers:
        indexer = layer.self_attn.indexer
        if not any(map(is_unit, indexer.modules())) and any(map(is_unit, modules_around(indexer, layer))):
            raise UnsupportedBackendError(
                f"FSDP has sharded the indexers of this {type(model).__name__} together with their layers, so they "
                "would not learn. Shard each indexer before its layer with fully_shard(layer.self_attn.indexer), or "
                "name both in fsdp_transformer_layer_cls_to_wrap, "
                f"as in LlamaDecoderLayer,{LightningIndexer.__name__}; accelerate does so by default."
            )


def modules_around(module: nn.Module, outermost: nn.Module) -> list[nn.Module]:
    """Return `outermost` and those of its submodules that contain a module."""
    return [each for each in outermost.modules() if any(inner is module for inner in each.modules())]


def is_unit(module: nn.Module) -> bool:
    """Return whether a module is a unit of FSDP, of either version."""
    # slow to import, and missing if torch is built without torch.distributed
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def forward_with_loss(model: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the outputs of a model; in training, with the indexers' loss as `auxiliary_loss` and added to `loss`.

    In a model with a head, the head collects the losses of the layers, and the backbone only passes the collector on.

    Args:
        forward: computes the outputs without this loss.

    Raises:
        UnsupportedBackendError: the losses of some layers are missing, or have no gradient.
    """
    learns = model.training and torch.is_grad_enabled() and stage_of(model.config) != DENSE
    if not learns or LOSSES in options:
        return forward(*inputs, **options)
    refuse_shared_units(model)
    losses = LayerNumbers()
    outputs = forward(*inputs, **{**options, LOSSES: losses, "return_dict": True})
    total = of_all_layers(model, losses, "losses").sum()
    is_thawed = any(parameter.requires_grad for each in indexers_of(model) for parameter in each.parameters())
    if is_thawed and not total.requires_grad:
        raise UnsupportedBackendError(
            "The losses of the indexers have no gradient, as with gradient checkpointing and use_reentrant=True. Set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    if getattr(outputs, "loss", None) is not None:
        own = own_loss(model.config, outputs.loss)
        labels = counted_labels(model, options)
        outputs.loss = add_auxiliary_loss(own, total, labels, options.get("num_items_in_batch"))
    else:
        total = expect_use(total, outputs[0])
    outputs = with_auxiliary_loss(outputs, total)
    return outputs if wants_dict(model, options) else outputs.to_tuple()


def counted_labels(model: Any, options: dict[str, Any]) -> Tensor | None:
    """Return the labels over which the loss of a call is averaged."""
    labels: Tensor | None = options.get("labels")
    return labels if labels is None or model.loss_type != CAUSAL_LM else predicted_labels(labels, options)


def of_all_layers(model: Any, numbers: LayerNumbers, what: str) -> Tensor:
    """Return the values that the layers of a model have added, [layers, ...].

    Raises:
        UnsupportedBackendError: some layers have added nothing.
    """
    num_added, num_layers = len(numbers.added), len(model.base_model.layers)
    taken = numbers.take()
    if taken is None or num_added < num_layers:
        raise UnsupportedBackendError(
            f"Only {num_added} of the {num_layers} layers of this {type(model).__name__} have passed on the {what} of "
            "their indexers: something between the model and its attention does not pass keyword arguments on. Remove "
            'what replaces its layers or their forward, or call hea.training.index_stage(model, "dense").'
        )
    return taken


def own_loss(config: Any, loss: Tensor) -> Tensor:
    """Return the loss of a model's task, detached in the stage "warmup", in which only the indexers are trained."""
    return loss.detach() if stage_of(config) == WARMUP else loss


def stage_of(config: Any) -> str:
    """Return the stage of the indexers in a config, or "dense" if there are none."""
    return str((getattr(config, INDEXER, None) or {"stage": DENSE})["stage"])


def wants_dict(model: Any, options: dict[str, Any]) -> bool:
    """Return whether the caller wants a `ModelOutput` instead of a tuple."""
    wanted = options.get("return_dict")
    return bool(model.config.return_dict if wanted is None else wanted)


@torch.no_grad()
def index_recall(model: Any, **inputs: Any) -> Tensor:
    """Return the share of the attention on the keys selected by the indexers, 0 to 1, [layers, B, N].

    The model runs in evaluation mode. The attention of a layer is the mean of its heads over all earlier keys, with the
    inputs that it gets from the layers below in the current stage. If a query has at most top_k keys, the value is 1;
    for padding it has no meaning.

    Args:
        model: made by `index`, in the stage "warmup" or "sparse".
        inputs: the arguments of the model's forward.

    Raises:
        ConfigurationError: a model without indexers, or in the stage "dense".
    """
    if stage_of(model.config) == DENSE:
        raise ConfigurationError(
            'index_recall needs indexers in the stage "warmup" or "sparse"; hea.index(model, top_k=...) adds them.'
        )
    recalls = LayerNumbers()
    was_training = model.training
    model.eval()
    try:
        model(**inputs, use_cache=False, **{RECALLS: recalls})
    finally:
        model.train(was_training)
    return of_all_layers(model, recalls, "recalls")


# Models whose forward adds the loss of their indexers, even if other libraries replace the forward before or after.


# attribute of a class: the class without the loss; attribute of a model: a forward that was set on it before
PLAIN_CLASS, FORWARD_BEFORE = "class_without_index_loss", "_forward_before_index_loss"


def add_index_loss(model: Any) -> None:
    """Make the forward of a model add the loss of its indexers, even if PEFT calls the forward directly.

    The model gets a subclass, so copies, replicas and pickled models also add the loss, and wrappers that other
    libraries set later wrap this forward. A forward that was set on the model before would hide that of the subclass,
    so a new method calls it and adds the loss.
    """
    if not hasattr(type(model), PLAIN_CLASS):
        model.__class__ = class_with_index_loss(type(model))
        if "forward" in model.__dict__:
            setattr(model, FORWARD_BEFORE, model.forward)
            model.forward = MethodType(around_forward_before(type(model)), model)


@functools.lru_cache(maxsize=256)
def class_with_index_loss(plain: Any) -> Any:
    """Return a subclass of a model class with the same name and module, whose forward adds the loss."""
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: Any = type(plain.__name__, (plain,), {**names, PLAIN_CLASS: plain, "__reduce_ex__": reduced})

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward_with_loss(self, functools.partial(plain.forward, self), inputs, options)

    # accelerate unwraps a forward by following __wrapped__, so this forward must not have it
    made.forward = without_wrapped(forward, plain.forward)
    return made


def around_forward_before(model_class: Any) -> Any:
    """Return a forward that calls the forward which was set on the model before, and adds the loss."""

    @functools.wraps(model_class.forward)
    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward_with_loss(self, getattr(self, FORWARD_BEFORE), inputs, options)

    # libraries that unwrap a forward by __wrapped__ get the forward of the class
    forward.__wrapped__ = model_class.forward  # type: ignore[attr-defined]
    return forward


def without_wrapped(function: Any, named: Any) -> Any:
    """Give a function the name, docstring and signature of another, without a `__wrapped__` attribute; return it."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(named, name):
            setattr(function, name, getattr(named, name))
    function.__signature__ = inspect.signature(named)
    return function


def reduced(model: Any, protocol: Any) -> tuple[Any, ...]:
    """Implement `__reduce_ex__` for a model whose class cannot be found by its name, for copies and pickles."""
    made, (model_class, *_), *state = object.__reduce_ex__(model, max(protocol, 2))
    return without_state, (getattr(model_class, PLAIN_CLASS),), *state


def without_state(plain: Any) -> Any:
    """Return a model of the subclass with the loss, before its state is set."""
    made = class_with_index_loss(plain)
    return made.__new__(made)
