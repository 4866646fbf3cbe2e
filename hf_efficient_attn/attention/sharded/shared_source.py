"""What every process reads of a text that they share: queries that all of them have, over the keys of each."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
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


def same_random_numbers(shards: SequenceShards | None, device: torch.device) -> AbstractContextManager[None]:
    """Let processes that share texts draw the same numbers, as for dropout in what all of them compute."""
    # which torch can trace
    return nullcontext() if shards is None else agreed_numbers(shards, device)


@contextmanager
def agreed_numbers(shards: SequenceShards, device: torch.device) -> Iterator[None]:
    """Let processes draw numbers from where the first of them is; afterwards each goes on where it was."""
    seed = torch.randint(MAX_SEED, (), device=device) * (shards.rank == 0)
    kind = device.type
    with torch.random.fork_rng([] if kind == "cpu" else [device], device_type="cuda" if kind == "cpu" else kind):
        torch.manual_seed(int(summed(seed, shards.group)))
        yield
