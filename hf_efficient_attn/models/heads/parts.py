"""Parts of task heads: dense maps before the last one, pooling, and the names of inputs that only one family has."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_efficient_attn.attention.layer_attention import readable_keys
from hf_efficient_attn.attention.table_form import is_table
from hf_efficient_attn.models.parts.blocks import build_norm


def output_width(config: Any) -> int:
    """Return the width of the backbone's last hidden state: `hidden_size`, if the config says nothing else."""
    return getattr(config, "output_width", config.hidden_size)


class PredictionTransform(nn.Module):
    """A dense map, an activation and a norm, as in BERT before the vocabulary. [..., hidden_size] → the same.

    The activation is the config's `transform_activation`, or that of its MLPs if it has none.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=getattr(config, "lm_transform_bias", True))
        self.act_fn = ACT2FN[getattr(config, "transform_activation", config.hidden_act)]
        self.norm = build_norm(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(hidden_states)))


class DenseClassifier(nn.Module):
    """A dense map, `classifier_activation`, dropout and a map to labels, as in RoBERTa. [..., width] → [..., labels].

    They are one module, as RoBERTa's: PEFT trains and saves what is called `classifier`, and nothing beside it.
    """

    def __init__(self, config: Any, num_outputs: int, width: int, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, inner)
        self.act_fn = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(inner, num_outputs)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.dropout(self.act_fn(self.dense(pooled))))


def build_classifier(
    config: Any, num_outputs: int, is_dense: bool, width: int | None = None, inner: int | None = None
) -> nn.Module:
    """Return what maps features [..., width] to labels; width, inner: None: `output_width` and `hidden_size`."""
    width = output_width(config) if width is None else width
    if is_dense:
        return DenseClassifier(config, num_outputs, width, config.hidden_size if inner is None else inner)
    return nn.Linear(width, num_outputs)


class ResidualMLP(nn.Module):
    """Norm(x + MLP(x)), as in transformers' BigBird before the answer's ends. [B, T, hidden_size] → same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.up_proj(self.dropout(hidden_states)))
        return self.norm(hidden_states + self.dropout(self.down_proj(inner)))


def exclude_question(
    logits: torch.Tensor, input_ids: torch.Tensor, real: torch.Tensor, sep_token_id: int
) -> torch.Tensor:
    """Return the logits [B, T, 2] with the question excluded: the tokens up to the first separator, except token 0."""
    is_separator = (input_ids == sep_token_id) & real
    last = torch.where(is_separator.any(1), is_separator.int().argmax(1), -1)
    index = torch.arange(input_ids.shape[1], device=input_ids.device)
    in_question = (index <= last[:, None]) & (index > 0)
    return logits.masked_fill(in_question.unsqueeze(-1), torch.finfo(logits.dtype).min)


def own_inputs(family: type) -> tuple[str, ...]:
    """Return the names of the inputs that only the family of a class has: of its backbone, or of its decoder."""
    return (*getattr(family, "extra_inputs", ()), *getattr(family, "decoder_inputs", ()))


def name_inputs(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `forward` with these keyword arguments added to its signature; it receives them as `**kwargs`.

    Trainer drops the columns of a dataset that the signature does not name.
    """
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())
    # a class derived from this one, as by sharding, has them already
    missing = [name for name in names if name not in signature.parameters]
    new = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in missing]

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = signature.replace(parameters=[*parameters[:-1], *new, parameters[-1]])  # type: ignore[attr-defined]
    return named


def real_tokens(
    hidden: torch.Tensor, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> torch.Tensor:
    """Return which tokens are not padding, by the mask or, without one, by `pad_token_id`: bool [B, T].

    attention_mask: [B, T], or a matrix [B or 1, 1, T, K], of whose keys it is padding what no token may read.
    """
    if attention_mask is not None and attention_mask.ndim == 2:
        return attention_mask.to(hidden.device).bool()
    if attention_mask is not None and attention_mask.ndim == 4 and not is_table(attention_mask):
        # cached keys come first
        return readable_keys(attention_mask.to(hidden.device), hidden.shape[0])[:, -hidden.shape[1] :]
    if input_ids is not None and pad_token_id is not None:
        return (input_ids != pad_token_id).to(hidden.device)
    return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)


def pool(hidden: torch.Tensor, real: torch.Tensor, how: str | None, is_causal: bool) -> torch.Tensor:
    """Return one vector per sequence: its `first` or `last` real token or the `mean` of all of them.

    By default this is the last if causal (the only one that has seen everything), otherwise the mean.
    Shapes: hidden [B, T, hidden_size], real [B, T] → [B, hidden_size].
    """
    how = how or ("last" if is_causal else "mean")
    if how == "mean":
        # fp16 would overflow
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        total = torch.where(real.unsqueeze(-1), wide, 0).sum(1)
        return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden.dtype)
    tokens = torch.arange(hidden.shape[1], device=hidden.device)
    index = torch.where(real, tokens, 0).argmax(-1) if how == "last" else real.int().argmax(-1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]
