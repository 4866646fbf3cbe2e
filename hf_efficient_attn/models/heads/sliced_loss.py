"""The loss of a language model computed from a few tokens at a time, so that no tensor holds the logits of all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

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
        loss_function: of transformers, `(logits, labels, vocab_size, num_items_in_batch, ...)`.
        hidden_states: [B, T, width]. labels: [B, T], -100, or `ignore_index` of the options, where they do not count.
        is_causal: labels are those of the tokens themselves; each token is to predict the next.
        num_items: what the sum over tokens is divided by; None: the number of labels.
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
