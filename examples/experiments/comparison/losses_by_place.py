"""The loss of each place of texts of equal length, and the picture of models that are compared by it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_efficient_attn.pictures import new_figure


@torch.no_grad()
def losses_by_place(model: PreTrainedModel, texts: Sequence[list[int]]) -> torch.Tensor:
    """Return the nats of the token at each place but the first, which is given: [N - 1], the mean over the texts."""
    model.eval()
    nats = []
    for text in texts:
        ids = torch.tensor([text], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        nats.append(cross_entropy(logits.float(), ids[0, 1:], reduction="none").cpu())
    return torch.stack(nats).mean(0)


def late(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return the last share of the values.

    >>> late(torch.arange(8), 0.25)
    tensor([6, 7])
    """
    return values[len(values) - max(1, round(share * len(values))) :]


def draw_losses(rows: Sequence[Mapping[str, Any]], losses: Mapping[str, Sequence[tuple[int, float]]]) -> Any:
    """Return two panels: training loss per step, and held-out loss by the place in a text."""
    figure = new_figure(11, 4.5)
    training, places = figure.subplots(1, 2)
    for name, points in losses.items():
        training.plot(*zip(*points, strict=True), label=name)
    training.set(xlabel="step of further training", ylabel="cross-entropy (nats per token)")
    for row in rows:
        parts = row["loss_by_place"]
        at = [100 * (index + 0.5) / len(parts) for index in range(len(parts))]
        places.plot(at, parts, marker="o", markersize=3, label=f"trained with {row['trained']}, reads {row['read']}")
    places.set(xlabel="place in a text (%)", ylabel="nats per token of held-out text")
    for panel in (training, places):
        panel.legend()
    figure.suptitle("Chosen blocks of keys against all keys")
    return figure
