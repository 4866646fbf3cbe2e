"""The loss of a model's indexers becomes part of the model's own."""

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

# Each indexer has its parameters in shards of its own under FSDP, as the layers of the model have.
#
# The loss of an indexer has a backward pass beside that of its layer: FSDP would gather the parameters of the layer
# only for the latter, and would be done with their gradients when that is over.


# where transformers keeps what is in shards of its own, and how; both by the names of modules
PLAN, FREED = "_fsdp_plan", "free_full_weight"


def name_units(model: Any) -> None:
    """Have accelerate, Trainer and transformers put the indexers of a model in shards of their own."""
    model._no_split_modules = {*(model._no_split_modules or ()), LightningIndexer.__name__}
    plan = getattr(model, PLAN, None)
    if plan:
        base = next(name for name, module in model.named_modules() if module is model.base_model)
        plan[".".join(filter(None, (base, "layers.*.self_attn.indexer")))] = FREED


def refuse_shared_units(model: Any) -> None:
    """Raise UnsupportedBackendError if an indexer is in the shards of its layer."""
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
    """Return the modules within another that hold a module, and the other."""
    return [each for each in outermost.modules() if any(inner is module for inner in each.modules())]


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP, of either version, has parameters of a module in shards of their own."""
    # slow to import, and missing where torch is built without processes
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def forward_with_loss(model: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the outputs of a model; in training, the indexers' loss is `auxiliary_loss`, and part of a `loss`.

    The base of a model with a head gives its layers what the head has for them to add their losses to.

    Args:
        forward: computes the outputs without this loss.

    Raises:
        UnsupportedBackendError: the losses do not arrive, or have no gradient.
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
            "The losses of the indexers have no gradient, as in gradient checkpointing with use_reentrant=True. Give "
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
    """Return the labels of a call that its loss is a mean over."""
    labels: Tensor | None = options.get("labels")
    return labels if labels is None or model.loss_type != CAUSAL_LM else predicted_labels(labels, options)


def of_all_layers(model: Any, numbers: LayerNumbers, what: str) -> Tensor:
    """Return what the layers of a model have added, [layers, ...].

    Raises:
        UnsupportedBackendError: not all have added something.
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
    """Return the loss of a model's task; without a gradient while only its indexers learn, whatever else has one."""
    return loss.detach() if stage_of(config) == WARMUP else loss


def stage_of(config: Any) -> str:
    """Return the stage of the indexers of a model; that of a model without any is "dense"."""
    return str((getattr(config, INDEXER, None) or {"stage": DENSE})["stage"])


def wants_dict(model: Any, options: dict[str, Any]) -> bool:
    """Return whether a caller wants outputs by name."""
    wanted = options.get("return_dict")
    return bool(model.config.return_dict if wanted is None else wanted)


@torch.no_grad()
def index_recall(model: Any, **inputs: Any) -> Tensor:
    """Return how much of the attention the keys selected by the indexers have, 0 to 1, [layers, B, N].

    The model computes in evaluation mode. The attention of a layer is the mean of its heads over all earlier keys, with
    the inputs that it gets from the layers below in the current stage. If a query has at most top_k keys, the value is
    1; for padding it has no meaning.

    Args:
        model: made by `index`, in the stage "warmup" or "sparse".
        inputs: the arguments of its forward.

    Raises:
        ConfigurationError: a model without indexers, or in the stage "dense".
    """
    if stage_of(model.config) == DENSE:
        raise ConfigurationError("index_recall needs indexers that score: hea.index(model, top_k=...) adds them.")
    recalls = LayerNumbers()
    was_training = model.training
    model.eval()
    try:
        model(**inputs, use_cache=False, **{RECALLS: recalls})
    finally:
        model.train(was_training)
    return of_all_layers(model, recalls, "recalls")


# Models whose forward adds the loss of their indexers, whoever else replaces it before or after.


# attributes: of a class, that which it is but for the loss; of a model, the forward that others had put there before
PLAIN_CLASS, FORWARD_BEFORE = "class_without_index_loss", "_forward_before_index_loss"


def add_index_loss(model: Any) -> None:
    """Have the forward of a model add the loss of its indexers, also where PEFT calls it directly.

    A class of its own does that, so that copies, replicas and files of the model have it, and what others put around
    its forward is put around this. What they had put there before hides the class, and is called by a method.
    """
    if not hasattr(type(model), PLAIN_CLASS):
        model.__class__ = class_with_index_loss(type(model))
        if "forward" in model.__dict__:
            setattr(model, FORWARD_BEFORE, model.forward)
            model.forward = MethodType(around_forward_before(type(model)), model)


@functools.lru_cache(maxsize=256)
def class_with_index_loss(plain: Any) -> Any:
    """Return a class of models that is the same to all that ask, but for its forward."""
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: Any = type(plain.__name__, (plain,), {**names, PLAIN_CLASS: plain, "__reduce_ex__": reduced})

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward_with_loss(self, functools.partial(plain.forward, self), inputs, options)

    # accelerate takes a forward out of its wrappers by going on to __wrapped__ for as long as there is one
    made.forward = without_wrapped(forward, plain.forward)
    return made


def around_forward_before(model_class: Any) -> Any:
    """Return the function of a model's own forward, which calls that which was there before."""

    @functools.wraps(model_class.forward)
    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward_with_loss(self, getattr(self, FORWARD_BEFORE), inputs, options)

    # that of the class, for those who take a model out of all that is around its forward
    forward.__wrapped__ = model_class.forward  # type: ignore[attr-defined]
    return forward


def without_wrapped(function: Any, named: Any) -> Any:
    """Return a function with the name, the text and the signature of another, which is not to be found by it."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(named, name):
            setattr(function, name, getattr(named, name))
    function.__signature__ = inspect.signature(named)
    return function


def reduced(model: Any, protocol: Any) -> tuple[Any, ...]:
    """Return how a model is copied and written to files, where its class is not to be found by its name."""
    made, (model_class, *_), *state = object.__reduce_ex__(model, max(protocol, 2))
    return without_state, (getattr(model_class, PLAIN_CLASS),), *state


def without_state(plain: Any) -> Any:
    """Return a model of the class with the loss, before its state is set."""
    made = class_with_index_loss(plain)
    return made.__new__(made)
