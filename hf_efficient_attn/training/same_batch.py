"""Whether the processes that share texts were called with the same batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.errors import InputError

# of Knuth's generator of random numbers
MULTIPLIER = 6364136223846793005


def refuse_other_batch(shards: SequenceShards, given: Mapping[str, Any], device: torch.device) -> None:
    """Raise InputError unless all processes got the same arguments, in one exchange of a number for each of them.

    Args:
        given: by name, the same names in every process; None: it is not given.
        device: on which the processes exchange.
    """
    own = torch.stack([digest(value).to(device) for value in given.values()])
    everywhere = [torch.empty_like(own) for _ in range(shards.size)]
    distributed.all_gather(everywhere, own, group=shards.group)
    differs = torch.stack(everywhere).ne(everywhere[0])
    if not bool(differs.any()):
        return
    rank = int(differs.any(1).nonzero()[0])
    names = [name for name, is_other in zip(given, differs[rank].tolist(), strict=True) if is_other]
    raise InputError(
        f"The processes of the mesh share every text, but process {rank} got another batch than process 0 (other "
        f"{', '.join(names)}). Give all of them the same one; with Trainer, SharedTextsMixin does."
    )


def digest(value: Any) -> Tensor:
    """Return a number of 64 bits that depends on the shape and on every entry in its place; of what has none it is 0.

    >>> rows = torch.arange(6).view(2, 3)
    >>> digests = {int(digest(each)) for each in (rows, rows.flip(0), rows.flip(1), rows.view(3, 2), rows.double())}
    >>> len(digests), int(digest(None))
    (5, 0)
    """
    if not isinstance(value, Tensor | int | float):
        # None, and what is refused once this is alike
        return torch.zeros((), dtype=torch.int64)
    entries = torch.as_tensor(value).detach()
    bits = entries.double().view(torch.int64) if entries.is_floating_point() else entries.long()
    shape = torch.tensor([entries.ndim + 1, *entries.shape], device=entries.device)
    numbers = torch.cat([shape, bits.flatten()])
    # sums and products of integers wrap around; without the shift the weights would only grow by steps
    weights = torch.arange(1, len(numbers) + 1, device=entries.device) * MULTIPLIER
    return (numbers * (weights ^ (weights >> 29))).sum()
