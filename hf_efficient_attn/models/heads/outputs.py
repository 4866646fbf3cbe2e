"""What backbones and heads return: the outputs of transformers, with an additional field `auxiliary_loss`.

`auxiliary_loss` is a loss that the layers of a backbone add to the task's in training, already weighted: the penalty of
learned spans, the commitment of centroids. It is None in evaluation, and in models that have none. A head adds it to
its `loss` once. Code that computes a loss from the outputs has to add it itself; if it does not, `expect_use` warns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from hf_efficient_attn.messages import warn_once


@dataclass
class BackboneOutput(BaseModelOutputWithPast):
    auxiliary_loss: Tensor | None = None


@dataclass
class CausalLMHeadOutput(CausalLMOutputWithPast):
    auxiliary_loss: Tensor | None = None


@dataclass
class MaskedLMHeadOutput(MaskedLMOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class SequenceClassificationHeadOutput(SequenceClassifierOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class TokenClassificationHeadOutput(TokenClassifierOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class QuestionAnsweringHeadOutput(QuestionAnsweringModelOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class MultipleChoiceHeadOutput(MultipleChoiceModelOutput):
    auxiliary_loss: Tensor | None = None


# the outputs of heads that take `labels`; sentence-transformers reads the fields of an output from annotations
LabelHeadOutput = (
    SequenceClassificationHeadOutput | TokenClassificationHeadOutput | MultipleChoiceHeadOutput | MaskedLMHeadOutput
)

# output class of transformers → its subclass with `auxiliary_loss`
_extended: dict[type, Any] = {}


def with_auxiliary_loss(outputs: Any, auxiliary_loss: Tensor) -> Any:
    """Return outputs of a model of transformers with a field `auxiliary_loss`, like our own.

    A plain attribute would be lost when accelerate's autocast, DDP or FSDP rebuild the outputs.
    """
    kind = type(outputs)
    if kind not in _extended:
        field: Any = ("auxiliary_loss", Tensor | None, None)
        _extended[kind] = make_dataclass(
            kind.__name__, [field], bases=(kind,), namespace={"__module__": kind.__module__}
        )
    return _extended[kind](**outputs, auxiliary_loss=auxiliary_loss)


# The loss that layers add to the task's: how it becomes part of a loss, and the warning if it does not.
#
# `auxiliary_loss` of outputs: the penalty of learned spans, the commitment of centroids, the divergence of indexers.


# transformers' name for the loss of next-token prediction
CAUSAL_LM = "ForCausalLM"
LEFT_OUT = (
    "The training loss does not include auxiliary_loss, which layers add to the task's loss (spans, centroids, "
    "indexers), so nothing learns from it. Add outputs.auxiliary_loss to your own loss, for example in "
    "compute_loss_func. Trainer with a label_smoothing_factor, and the trainers of TRL, compute the loss themselves: "
    "use Trainer with label_smoothing_factor=0."
)
LAYERS_LEFT_OUT = (
    "The training loss does not include auxiliary_loss, the loss of earlier layers (layer_losses=True), which the "
    "model adds if it is called with labels. Trainer with a label_smoothing_factor, and the trainers of TRL, compute "
    "the loss themselves: use Trainer with label_smoothing_factor=0, or set model.config.layer_losses=False."
)


def add_auxiliary_loss(
    loss: Tensor | None, auxiliary_loss: Tensor | None, labels: Tensor | None = None, num_items: Any = None
) -> Tensor | None:
    """Return a loss plus the loss of the layers, if there are both; the latter is scaled for a mean over tokens.

    Trainer divides the sum over the tokens of a batch by the `num_items` of all batches of an optimizer step, in all
    processes. The auxiliary loss of a batch is then weighted by the batch's share of these tokens, so that the weights
    add up to 1.

    Args:
        labels: -100 marks those that do not count.
    """
    if loss is None or auxiliary_loss is None:
        return loss
    if num_items is None or labels is None:
        return loss + auxiliary_loss.to(loss.device)
    share = labels.ne(-100).sum() / num_items
    return loss + (share.to(auxiliary_loss.device) * auxiliary_loss).to(loss.device)


def predicted_labels(labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the labels over which the loss of a decoder is averaged: its `shift_labels`, or all but the first."""
    shifted: Tensor | None = options.get("shift_labels")
    return labels[..., 1:] if shifted is None else shifted


def expect_use(
    auxiliary_loss: Tensor | None, states: Tensor, weight: float = 1.0, left_out: str = LEFT_OUT
) -> Tensor | None:
    """Return the loss of the layers; warn after a backward pass that reaches the states but not this loss.

    Compiled models do not warn.

    Args:
        auxiliary_loss: the loss, or a tensor from which only this loss is computed.
        states: a tensor from which every loss of the task is computed.
        weight: the factor of the loss of the layers; with 0 there is no warning.
        left_out: the warning.
    """
    if auxiliary_loss is None or weight == 0 or torch.compiler.is_compiling():
        return auxiliary_loss
    if not (auxiliary_loss.requires_grad and states.requires_grad):
        return auxiliary_loss
    was_reached: list[bool] = []

    def note(_: Tensor) -> None:
        was_reached.append(True)

    def warn() -> None:
        if not was_reached:
            warn_once(left_out)

    def when_done(_: Tensor) -> None:
        # at the end of the backward pass, which may reach the states before the loss
        torch.autograd.Variable._execution_engine.queue_callback(warn)  # type: ignore[attr-defined]

    auxiliary_loss.register_hook(note)
    states.register_hook(when_done)
    return auxiliary_loss


def with_gradient_of(states: Tensor, others: Tensor) -> Tensor:
    """Return `states` [B, N, X], through which `others` [B, M, X] get a gradient of 0; unchanged without gradients.

    A head may not use `others`, but DDP waits for the gradient of every parameter that they are computed with.
    """
    return states + 0 * others[:, :1] if torch.is_grad_enabled() else states


# The loss of a language model computed from a few tokens at a time, so that no tensor holds all logits.


IGNORED = -100


def sliced_loss(
    head: Callable[[Tensor], Tensor],
    loss_function: Callable[..., Tensor],
    hidden_states: Tensor,
    labels: Tensor,
    slice_tokens: int,
    is_causal: bool,
    num_items: Any = None,
    **options: Any,
) -> Tensor:
    """Return the loss that `loss_function` gives for all logits, up to rounding.

    The logits of a slice are computed twice, in the forward and in the backward pass, and never kept.

    Args:
        head: hidden states → logits.
        loss_function: a loss of transformers, `(logits, labels, vocab_size, num_items_in_batch, ...)`.
        hidden_states: [B, T, width].
        labels: [B, T]; -100, or `ignore_index` of the options, marks those that do not count.
        is_causal: whether each token predicts the next; `labels` are then those of the tokens themselves.
        num_items: the divisor of the sum over tokens; None: the number of labels that count.
        options: further arguments of the loss.
    """
    shifted, ignored = options.pop("shift_labels", None), options.get("ignore_index", IGNORED)
    targets = labels
    if is_causal:
        targets = pad(labels, (0, 1), value=ignored)[..., 1:] if shifted is None else shifted
    total = targets.ne(ignored).sum() if num_items is None else num_items

    def of_slice(states: Tensor, own: Tensor) -> Tensor:
        given = {"shift_labels": own} if is_causal else {}
        return loss_function(logits=head(states), labels=own, num_items_in_batch=total, **given, **options)

    losses = [
        checkpoint(of_slice, states, own.contiguous(), use_reentrant=False)
        for states, own in zip(hidden_states.split(slice_tokens, 1), targets.split(slice_tokens, 1), strict=True)
    ]
    return torch.stack(losses).sum()
