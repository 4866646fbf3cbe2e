"""The loss of a model's indexers becomes part of the model's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.indexed_layer import LOSSES, RECALLS
from hf_efficient_attn.attention.indexed.layer_numbers import LayerNumbers
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE, WARMUP, indexers_of
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.models.heads.auxiliary_loss import CAUSAL_LM, add_auxiliary_loss, expect_use, predicted_labels
from hf_efficient_attn.models.heads.outputs import with_auxiliary_loss
from hf_efficient_attn.models.indexed.shard_units import refuse_shared_units


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
            f"Of the {num_layers} layers of this {type(model).__name__}, {num_added} have told the {what} of their "
            "indexers: something between the model and its attention does not pass keyword arguments on. Leave out "
            'what replaces its layers or their forward, or call hea.index_stage(model, "dense").'
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
    """Return the share of the attention that the keys have which the indexers choose, [layers, B, N], in evaluation.

    The attention of a layer is the mean of its heads over all earlier keys, given what the layers before it read. Where
    a query has at most top_k keys, the share is 1; of padding it means nothing.

    Args:
        model: made by `index`, in the stage "warmup" or "sparse".
        inputs: of its forward.

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
