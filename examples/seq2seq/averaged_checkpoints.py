"""The mean of a run's last checkpoints, which translates better than the last; Vaswani et al. 2017, section 6.1."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel


def average_checkpoints(model: PreTrainedModel, checkpoints: Sequence[Path]) -> None:
    """Set the parameters of `model` to their means over the checkpoints of its training.

    Args:
        checkpoints: folders of `Trainer`, each with a model.safetensors.
    """
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints]
    means = {name: torch.stack([one[name].float() for one in weights]).mean(0) for name in weights[0]}
    # a tied weight is stored once
    missing, unexpected = model.load_state_dict(means, strict=False)
    tied = set(model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise ValueError(f"{checkpoints[-1]} is not of this model: {unexpected} unknown, {missing} missing.")
