"""One tiny model of each family, and sparsified models of transformers, as their sender has them."""

from typing import Any

import pytest
import torch
from families import OURS, SPARSIFIED
from sharing.compared import SIZES, scatter

# by name: ours by that of their family
MODELS: dict[str, Any] = {family.name: case for family in OURS for case in family.column("Hub with")}
MODELS |= {case.name: case for case in SPARSIFIED.column("Hub with")}
FAMILIES = tuple(family.name for family in OURS)
# that are shared unless it is thorough: of one stack and with buffers that move, of two stacks, and sparsified
OFTEN = ("sparse_seq2seq", "routing_transformer", "llama")
OFTEN_OR_THOROUGH = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in MODELS]


def shared_model(name: str) -> Any:
    """Return a model in eval mode, every weight moved away from its start value; the same in every call."""
    torch.manual_seed(0)
    return scatter(MODELS[name].model(vocab_size=SIZES["vocab_size"])).eval()
