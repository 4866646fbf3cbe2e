"""Training with learned spans: the penalty, freezing spans, changing the limit, costs, and checkpoints.

The penalty that keeps spans short is λ times the mean span of a layer's heads, summed over layers. It is added to the
loss. Source: Sukhbaatar et al. (arXiv:1905.07799), section 2.2.
"""

from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.sharded.collectives import SumOfProcesses
from hf_efficient_attn.attention.sharded.shards import SequenceShards
from hf_efficient_attn.errors import CheckpointError, ConfigurationError, InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import saved_config
from hf_efficient_attn.models.heads.outputs import expect_use
from hf_efficient_attn.models.spans.module import (
    ADAPTIVE,
    DYNAMIC,
    FROZEN,
    SpanBounds,
    checked,
    known_spans,
    span_modules,
)


def mean_span(spans: Tensor | None, real_tokens: Tensor | None, shards: SequenceShards | None = None) -> Tensor | None:
    """Return the mean of spans [1, H, 1] or [B, H, T] over heads and real tokens, 0-dim; None: there are no spans.

    Args:
        real_tokens: bool [B, T]; None: all.
        shards: the processes that share the texts of these spans; None: this process has whole texts.
    """
    if shards is not None and spans is not None:
        own = spans.mean(1)
        counted = torch.ones_like(own) if real_tokens is None else real_tokens.to(own.dtype)
        total, count = SumOfProcesses.apply(torch.stack(((own * counted).sum(), counted.sum())), shards.group)
        return total / count.clamp(min=1)  # type: ignore[no-any-return]
    if spans is None or spans.shape[2] == 1 or real_tokens is None:
        return None if spans is None else spans.mean()
    return (spans.mean(1) * real_tokens).sum() / real_tokens.sum().clamp(min=1)


def span_penalty(model: nn.Module, spans: list[Tensor | None], states: Tensor) -> Tensor | None:
    """Return λ · Σ over layers of the mean span in tokens, 0-dim; None in evaluation and for spans that do not train.

    Args:
        spans: the mean span of each layer; None: the layer has no spans.
        states: the output of the last layer; see `expect_use`.
    """
    config: Any = model.config
    trained = [span for span in spans if span is not None]
    if not model.training or not trained or config.frozen_spans is not None:
        return None
    total: Tensor = torch.stack([span.to(trained[0].device) for span in trained]).sum()
    return expect_use(config.span_penalty * total, states, config.span_penalty)


# Freezing learned spans, and changing their limit.


Model = TypeVar("Model", bound=nn.Module)


def freeze_spans(model: Model) -> Model:
    """Turn the learned spans of a model into constants of its config, in place, and return the model.

    The outputs stay the same, ramp included: each head then has a static pattern, which can be compiled and exported.
    The spans are saved in `config.frozen_spans`, in tokens; the parameters and the penalty are removed. Spans that are
    already frozen stay as they are.

    Raises:
        InputError: the model has no spans of kind "adaptive", or its spans are offloaded or not finite.
    """
    found = known_spans(model)
    if found[0].kind == FROZEN:
        return model
    if found[0].kind != ADAPTIVE:
        reason = "every token has its own span" if found[0].kind == DYNAMIC else "all spans equal span_limit"
        raise InputError(
            f"freeze_spans needs span='adaptive', but this model has span={shown(found[0].kind)}: {reason}, so there "
            "are no learned spans to freeze."
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

    Spans keep their length in tokens, up to the limit: they are saved as fractions of the limit, and become min(1,
    fraction · old limit / new limit). A table of relative positions loses its farthest rows, or gets new ones,
    initialised as the others were. Dynamic spans are predicted as fractions of the limit, so they become longer or
    shorter.

    Raises:
        ConfigurationError: a limit below 1, or below a frozen span.
        InputError: the model has no spans, or they are offloaded.
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
    """Return a table [rows, width] with `num_rows` rows: cut, or extended with samples of N(0, 1)."""
    missing = max(0, num_rows - len(table))
    new = torch.randn(missing, table.shape[1], dtype=table.dtype, device=table.device)
    return torch.cat((table[:num_rows], new))


# The cost of spans, in the figures by which the authors compare models.


def average_span(model: nn.Module) -> float:
    """Return the average span in tokens as the authors report it: per layer ⌈mean span⌉ + ramp, at most the limit.

    Raises:
        InputError: the model has no spans, or they are offloaded.
    """
    spans = known_spans(model)
    per_layer = [min(each.limit, ceil(float(each.head_spans().mean())) + each.ramp) for each in spans]
    return sum(per_layer) / len(per_layer)


def max_span(model: nn.Module) -> int:
    """Return how many keys the head with the longest span attends to, ramp included.

    For dynamic spans, this is the maximum over the heads and tokens of the last forward pass.

    Raises:
        InputError: the model has no spans, or they are offloaded.
    """
    return max(min(each.limit, ceil(float(each.longest_spans().max())) + each.ramp) for each in known_spans(model))


def span_flops(config: Any, span: float) -> float:
    """Return the multiply-adds of one token: L · (4d² + 2·d·d_ff + 2·span·d), with 3·d·d_ff for a gated MLP.

    Encoders attend to a span on both sides: 4·span·d. Simplified blocks have fewer than four projections, and if they
    subtract the mean over the soft mask, the term of the span counts twice. As in the paper's figures, embeddings,
    norms, softmax, the output layer and positions are not counted.

    Args:
        span: average span in tokens, ramp included.

    >>> from hf_efficient_attn.models.adaptive_span.configuration_adaptive_span import AdaptiveSpanConfig
    >>> span_flops(AdaptiveSpanConfig.text8_small(), 314)
    41607168

    Source: the paper (arXiv:1905.07799) prints no formula; this one gives the figures of its tables.
    """
    width, inner, num_layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    maps = config.num_attention_maps * width * width + num_layers * (3 if config.gated_mlp else 2) * width * inner
    reads = (1 if config.is_causal else 2) * (2 if getattr(config, "is_centered", False) else 1)
    return maps + num_layers * 2 * reads * span * width  # type: ignore[no-any-return]


# Checks of a checkpoint with spans, before and after its weights are loaded.


# fields that must not change, because the meaning of trained spans depends on them
MEANING = ("span", "span_ramp", "frozen_spans")


class SpanCheckpoints:
    """Mixin of models with spans: checks that a checkpoint has the same kind of spans, and that they are valid."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as `PreTrainedModel.from_pretrained` does, and check its spans.

        Raises:
            CheckpointError: a checkpoint of another family, span fields that differ from the saved ones, or spans
                outside of 0 … limit.
        """
        check_saved_spans(saved_config(pretrained_model_name_or_path, kwargs), kwargs)
        return checked_spans_of(super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs))


def check_saved_spans(saved: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Raise CheckpointError if the requested span fields differ from the saved ones.

    Args:
        saved: the config of the checkpoint.
        kwargs: keyword arguments of `from_pretrained`.
    """

    def requested(name: str) -> Any:
        return kwargs.get(name, getattr(kwargs.get("config"), name, saved.get(name)))

    is_trained = saved.get("span") in (ADAPTIVE, DYNAMIC)
    changed = [name for name in MEANING if is_trained and name in saved and requested(name) != saved[name]]
    if changed:
        raise CheckpointError(
            f"The checkpoint was saved with {', '.join(f'{name}={shown(saved[name])}' for name in changed)}, but "
            f"{', '.join(f'{name}={shown(requested(name))}' for name in changed)} was requested: its learned spans "
            "would be lost or get another meaning. Load it as it was saved; freeze_spans(model) makes its spans "
            "constant."
        )
    wanted = requested("span_limit")
    old = saved.get("span_limit")
    if wanted is None or old is None or wanted == old:
        return
    raise CheckpointError(
        f"The checkpoint has span_limit={old}, but span_limit={wanted} was requested. Spans are saved as fractions of "
        f"the limit, so all spans would become {wanted}/{old} = {wanted / old:g} times as long. Load it as it was "
        f"saved, and call set_span_limit(model, {wanted}): it sets every fraction to min(1, fraction * {old} / "
        f"{wanted}) and resizes the table of positions."
    )


def checked_spans_of(loaded: Any) -> Any:
    """Return the result of `from_pretrained` after checking its spans.

    Raises:
        CheckpointError: spans outside of 0 … limit.
    """
    for spans in span_modules(loaded[0] if isinstance(loaded, tuple) else loaded):
        spans.check()
    return loaded
