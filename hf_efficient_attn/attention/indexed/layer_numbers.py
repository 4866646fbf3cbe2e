"""What layers say in a forward pass beside their outputs: the losses of their indexers, and what these recall."""

import torch
from torch import Tensor


class LayerNumbers:
    """Tensors of one shape that layers add, in their order, on whatever devices.

    It travels through a model as a keyword argument. FSDP and accelerate cast and move the tensors in lists, dicts and
    dataclasses, and pass copies of these on; an object of another class they pass on as it is.
    """

    def __init__(self) -> None:
        self.added: list[Tensor] = []
        self.is_open = True

    def add(self, number: Tensor) -> None:
        """Add a tensor, unless all were taken: gradient checkpointing then computes a layer once more."""
        if self.is_open:
            self.added.append(number)

    def take(self) -> Tensor | None:
        """Return them as one tensor, [layers, ...], on the device of the first; None: no layer has added any."""
        added, self.added, self.is_open = self.added, [], False
        return torch.stack([each.to(added[0].device) for each in added]) if added else None
