"""What every process reads of a text that they share: queries that all of them have, over the keys of each."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards, shards_of
from hf_efficient_attn.attention.sharded.sharded_call import Scores
from hf_efficient_attn.attention.sharded.sums import summed
from hf_efficient_attn.attention.sharded.wide_queries import WidePart, attend_wide

MAX_SEED = 2**62


def read_source(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    shards: SequenceShards,
) -> Tensor:
    """Return the output [B, H, T, Dv] of queries [B, H, T, D], the same in all processes, over all of their keys.

    Each process computes with its own keys; outputs and log-sum-exp are joined, and no key travels.

    Args:
        key, value: of this process's tokens, [B, H, n, ·].
        mask: which of them may be read, bool [B, 1, 1, n]; None: all.
    """
    refuse_compiled()
    (batch_size, _, num_queries, _), num_keys, device = query.shape, key.shape[2], query.device
    if mask is None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    examples, rows, keys = (torch.arange(count, device=device) for count in (batch_size, num_queries, num_keys))
    part = WidePart(examples, rows, keys, mask.expand(batch_size, 1, num_queries, num_keys))
    return attend_wide(query, key, value, None, (part,), Scores(scale, dropout=dropout), shards.group)


def same_random_numbers(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Let processes that share a module's texts drop the same numbers in what all of them compute.

    They agree where something is dropped, each place for itself: a layer that is computed again for its gradients, in
    whatever order, drops what it has dropped before.
    """
    shards = shards_of(module)
    # the former can be traced
    return nullcontext() if shards is None or not drops(module) else agreed_numbers(shards, device)


def drops(module: nn.Module) -> bool:
    """Return whether a forward pass of a module drops anything."""
    dropouts = (each for each in module.modules() if isinstance(each, nn.Dropout))
    return any(each.training and each.p > 0 for each in dropouts)


@contextmanager
def agreed_numbers(shards: SequenceShards, device: torch.device) -> Iterator[None]:
    """Let processes draw numbers from where the first of them is; afterwards each goes on where it was."""
    seed = torch.randint(MAX_SEED, (), device=device) * (shards.rank == 0)
    kind = device.type
    with torch.random.fork_rng([] if kind == "cpu" else [device], device_type="cuda" if kind == "cpu" else kind):
        torch.manual_seed(int(summed(seed, shards.group)))
        yield
