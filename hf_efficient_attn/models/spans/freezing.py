"""Making learned spans constant, and moving them to another limit."""

from typing import Any, TypeVar

import torch
from torch import nn

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.spans.bounds import SpanBounds, checked
from hf_efficient_attn.models.spans.module import ADAPTIVE, DYNAMIC, FROZEN, known_spans

Model = TypeVar("Model", bound=nn.Module)


def freeze_spans(model: Model) -> Model:
    """Make the learned spans of a model constants of its config, in place, and return the model.

    It computes the same function, ramp included, by one static pattern per head, which can be compiled and exported.
    The spans are saved in `config.frozen_spans`, in tokens; the parameters and the penalty are removed. Spans that are
    already frozen stay as they are.

    Raises:
        InputError: the model has no spans that are learned once for all texts, or its spans are offloaded or not
            numbers.
    """
    found = known_spans(model)
    if found[0].kind == FROZEN:
        return model
    if found[0].kind != ADAPTIVE:
        reason = "its tokens choose their spans" if found[0].kind == DYNAMIC else "all its heads read the limit"
        raise InputError(
            f"freeze_spans needs span='adaptive', but this model has span={shown(found[0].kind)}: {reason}, so there "
            "are no numbers to keep."
        )
    tokens = [spans.head_spans().tolist() for spans in found]
    for spans, its_tokens in zip(found, tokens, strict=True):
        checked(SpanBounds(tuple(its_tokens), tuple(its_tokens)), spans.layer_idx)
    change_config(model.config, frozen_spans=tokens, span_penalty=0.0)
    for spans, its_tokens in zip(found, tokens, strict=True):
        spans.freeze(its_tokens)
    return model


def set_span_limit(model: Model, span_limit: int) -> Model:
    """Give the spans of a model another limit, in place, and return the model.

    Spans keep their length in tokens, up to the limit: saved as shares of it, they become min(1, share · old limit /
    new limit). A table of relative positions loses its farthest rows, or gets new ones, initialised as the others were.
    Dynamic spans, which are shares by nature, become longer or shorter.

    Raises:
        ConfigurationError: a limit below 1, or below a frozen span.
        InputError: the model has no spans, or offloaded ones.
    """
    found = known_spans(model)
    change_config(model.config, span_limit=span_limit)
    for spans in found:
        spans.set_limit(span_limit)
    for module in model.modules():
        if hasattr(module, "set_distances"):
            module.set_distances(span_limit)
    return model


def change_config(config: Any, **fields: Any) -> None:
    """Set fields of a config; if one is refused, all stay as they were.

    Raises:
        ConfigurationError: `config.check()` refuses them.
    """
    before = {name: getattr(config, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(config, name, value)
        config.check()
    except ConfigurationError:
        for name, value in before.items():
            setattr(config, name, value)
        raise


def fit_rows(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a table [rows, width] cut to this many rows, or extended to them with N(0, 1)."""
    missing = max(0, num_rows - len(table))
    new = torch.randn(missing, table.shape[1], dtype=table.dtype, device=table.device)
    return torch.cat((table[:num_rows], new))
