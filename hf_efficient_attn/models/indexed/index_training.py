"""The loss of a model's indexers becomes part of the model's own."""

import functools
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.indexed_layer import LOSSES, RECALLS
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE, WARMUP, indexers_of
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.models.heads.auxiliary_loss import add_auxiliary_loss, expect_use
from hf_efficient_attn.models.heads.outputs import with_auxiliary_loss


def add_index_loss(model: Any) -> None:
    """Have the forward of a model add the loss of its indexers, also where PEFT calls it directly."""
    if "forward" not in model.__dict__:
        forward = functools.partial(forward_with_loss, model)
        model.forward = functools.update_wrapper(forward, type(model).forward.__get__(model))


def forward_with_loss(model: Any, *inputs: Any, **options: Any) -> Any:
    """Return the outputs of a model; in training, the indexers' loss is `auxiliary_loss`, and part of a `loss`.

    The base of a model with a head gives its layers the list of the head, which adds up what they put there.
    """
    forward, stage = type(model).forward, getattr(model.config, INDEXER)["stage"]
    if not model.training or not torch.is_grad_enabled() or stage == DENSE or LOSSES in options:
        return forward(model, *inputs, **options)
    losses: list[Tensor] = []
    outputs = forward(model, *inputs, **{**options, LOSSES: losses, "return_dict": True})
    total = torch.stack([each.to(losses[0].device) for each in losses]).sum()
    if not total.requires_grad and any(next(each.parameters()).requires_grad for each in indexers_of(model)):
        raise UnsupportedBackendError(
            "The losses of the indexers have no gradient, as in gradient checkpointing with use_reentrant=True. Give "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    if getattr(outputs, "loss", None) is not None:
        own = own_loss(model.config, outputs.loss)
        outputs.loss = add_auxiliary_loss(own, total, options.get("labels"), options.get("num_items_in_batch"))
    else:
        total = expect_use(total, outputs[0])
    outputs = with_auxiliary_loss(outputs, total)
    return outputs if wants_dict(model, options) else outputs.to_tuple()


def own_loss(config: Any, loss: Tensor) -> Tensor:
    """Return the loss of a model's task; without a gradient while only its indexers learn, whatever else has one."""
    is_warmup = (getattr(config, INDEXER, None) or {"stage": DENSE})["stage"] == WARMUP
    return loss.detach() if is_warmup else loss


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
    if (getattr(model.config, INDEXER, None) or {"stage": DENSE})["stage"] == DENSE:
        raise ConfigurationError("index_recall needs indexers that score: hea.index(model, top_k=...) adds them.")
    recalls: list[Tensor] = []
    was_training = model.training
    model.eval()
    try:
        model(**inputs, use_cache=False, **{RECALLS: recalls})
    finally:
        model.train(was_training)
    return torch.stack([each.to(recalls[0].device) for each in recalls])
