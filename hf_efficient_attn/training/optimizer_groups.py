"""Parameter groups for optimizers: with and without weight decay, and with a separate learning rate for spans."""

from math import inf
from typing import Any

from torch import nn

from hf_efficient_attn.attention.build_call import is_number
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.spans.module import span_modules


def optimizer_groups(model: nn.Module, weight_decay: float, span_lr: float | None = None) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: matrices with weight decay, all others, and learned spans.

    The others are trainable vectors and scalars: gains, norm scales, biases. They have no weight decay, because weight
    decay of a gain pulls its branch to zero. Without these groups, `Trainer` would decay gains, because it recognises
    only norms and biases, by name. Spans have no weight decay either, because `span_penalty` already shortens them;
    they have their own group if the model learns any. Pass the groups to Trainer with `Trainer(...,
    optimizers=(torch.optim.AdamW(optimizer_groups(model, 0.1), lr=1e-3), None))`. Under FSDP, Trainer refuses
    optimizers; pass `optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": optimizer_groups(model, 0.1), "lr":
    1e-3})` instead.

    Args:
        weight_decay: weight decay of the first group.
        span_lr: learning rate of the spans; None: the optimizer's learning rate. Spans are stored as fractions of the
            span limit, so a step of AdamW changes a span by about span_lr · span_limit tokens.

    Raises:
        InputError: a weight decay or learning rate that is negative or not a finite number, a model without trainable
            parameters, or `span_lr` for a model without trainable spans.

    Source: He & Hofmann (arXiv:2311.01906), appendix D and the authors' code; spans: Sukhbaatar et al.
    (arXiv:1905.07799).
    """
    for option, value in (("weight_decay", weight_decay), ("span_lr", 0.0 if span_lr is None else span_lr)):
        if not (is_number(value) and 0 <= value < inf):
            raise InputError(f"{option}={shown(value)} must be a finite number of at least 0.")
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError(f"{type(model).__name__} has no trainable parameter: every requires_grad is False.")
    of_spans = {id(parameter) for module in span_modules(model) for parameter in module.parameters()}
    spans = [parameter for _, parameter in trainable if id(parameter) in of_spans]
    if span_lr is not None and not spans:
        raise InputError(
            f"span_lr={span_lr}: {type(model).__name__} has no trainable span. Leave span_lr out, or build the model "
            "with span='adaptive' or 'dynamic'."
        )
    rest = [(name, parameter) for name, parameter in trainable if id(parameter) not in of_spans]
    decayed = [parameter for name, parameter in rest if _is_decayed(name, parameter)]
    others = [parameter for name, parameter in rest if not _is_decayed(name, parameter)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    if spans:
        own_rate = {} if span_lr is None else {"lr": span_lr}
        groups.append({"params": spans, "weight_decay": 0.0, **own_rate})
    return groups


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and "gain" not in name.rsplit(".", 1)[-1]
