"""What the numbers of a source are: weights that are no fractions cannot be converted, and NaN is said."""

import torch
from transformers import PreTrainedModel

from hf_efficient_attn.convert.notes import summarize
from hf_efficient_attn.errors import CheckpointError


def check_numbers(model: PreTrainedModel) -> list[str]:
    """Return a note on weights that are NaN or infinite.

    Raises:
        CheckpointError: weights that are integers, as quantization leaves them, or that were not loaded.
    """
    weights = dict(model.named_parameters())
    for kind, found in {
        "no numbers, as the model is on the meta device": [name for name, each in weights.items() if each.is_meta],
        "integers": [name for name, each in weights.items() if not each.is_floating_point()],
    }.items():
        if found:
            raise CheckpointError(
                f"These weights are {kind}: {summarize(found)}. Convert a checkpoint of floating-point weights."
            )
    bad = [name for name, each in weights.items() if not bool(torch.isfinite(each.detach()).all())]
    return [f"Not finite (NaN or infinite), and converted as they are: {summarize(bad)}."] if bad else []
