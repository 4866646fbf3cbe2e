"""What autograd keeps of an indexer while nothing else of its layer learns: kept, whatever checkpoints activations.

Checkpointing would save nothing, since the layer keeps nothing, and compute the whole layer again; and FSDP would not
have gathered its parameters, which it does for layers that have a gradient.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hf_efficient_attn.attention.indexed.lightning_indexer import WARMUP


def keeping(stage: str) -> AbstractContextManager[None]:
    """Return a context within which tensors are kept for the backward pass; only in "warmup"."""
    if stage != WARMUP or torch.compiler.is_compiling():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor
