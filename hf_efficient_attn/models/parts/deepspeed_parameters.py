"""Parameters that DeepSpeed's ZeRO keeps: in shards (stage 3), or beside numbers of its own, which it trains."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import nn


def is_in_shards(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is empty now because processes hold it in shards."""
    return parameter.shape != getattr(parameter, "ds_shape", parameter.shape)


def is_a_copy(parameter: nn.Parameter) -> bool:
    """Return whether the optimizer trains other numbers, and overwrites the parameter with them after each step."""
    return parameter.requires_grad and (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"))


def are_released_by_layers(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether parameters are whole only while their layer runs: the third stage of ZeRO holds them in shards."""
    return any(hasattr(parameter, "ds_id") for parameter in parameters)


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager:
    """Return a context in which parameters are whole; the first process's are then those of all.

    All processes must enter it.
    """
    held = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not held:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(held, modifier_rank=0)  # type: ignore[no-any-return]
