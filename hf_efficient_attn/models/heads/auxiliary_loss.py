"""The loss that layers add to the task's: how it becomes part of a loss, and what is said where it does not.

`auxiliary_loss` of outputs: the penalty of learned spans, the commitment of centroids, the divergence of indexers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.notices import warn_once

# what transformers calls the loss of models whose labels are those of the next tokens
CAUSAL_LM = "ForCausalLM"
LEFT_OUT = (
    "The loss that is trained does not contain auxiliary_loss, which layers add to the task's (spans, centroids, "
    "indexers), so that nothing learns from it. Add outputs.auxiliary_loss to a loss of your own, as in "
    "compute_loss_func. Trainer with a label_smoothing_factor and the trainers of TRL compute the loss themselves: use "
    "Trainer with label_smoothing_factor=0."
)
LAYERS_LEFT_OUT = (
    "The loss that is trained does not contain auxiliary_loss, that of earlier layers (layer_losses=True), which the "
    "model adds where it is called with labels. Trainer with a label_smoothing_factor and the trainers of TRL compute "
    "the loss themselves: use Trainer with label_smoothing_factor=0, or set model.config.layer_losses=False."
)


def add_auxiliary_loss(
    loss: Tensor | None, auxiliary_loss: Tensor | None, labels: Tensor | None = None, num_items: Any = None
) -> Tensor | None:
    """Return a loss plus the loss of the layers, if there are both; the latter belongs to a mean over tokens.

    Trainer divides the sum over the tokens of a batch by the `num_items` of all batches of an optimizer step, in all
    processes. A batch then gets the share of the auxiliary loss that its tokens have in the step, so that the shares
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
    """Return the labels that the loss of a decoder is a mean over: its `shift_labels`, or all but the first."""
    shifted: Tensor | None = options.get("shift_labels")
    return labels[..., 1:] if shifted is None else shifted


def expect_use(
    auxiliary_loss: Tensor | None, states: Tensor, weight: float = 1.0, left_out: str = LEFT_OUT
) -> Tensor | None:
    """Return the loss of the layers; warn after a backward pass that reaches the states but not this loss.

    Compiled models do not warn.

    Args:
        auxiliary_loss: the loss, or what nothing but it is computed from.
        states: what any loss of the task is computed from.
        weight: the factor in the loss of the layers; what is 0 anyway may be left out.
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
        # the states may be reached before the loss
        torch.autograd.Variable._execution_engine.queue_callback(warn)  # type: ignore[attr-defined]

    auxiliary_loss.register_hook(note)
    states.register_hook(when_done)
    return auxiliary_loss
