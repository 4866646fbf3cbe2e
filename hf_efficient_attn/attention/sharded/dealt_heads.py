"""Heads that processes deal out: each gets the whole text of some, in exchange for some tokens of all (Ulysses).

Source: Jacobs et al. (arXiv:2309.14509).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.attention.sharded.exchange import exchanged
from hf_efficient_attn.attention.sharded.sequence_shards import HALO, HEADS, Bounds, SequenceShards, shard_bounds
from hf_efficient_attn.attention.sharded.sums import SumOfProcesses
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

# why the heads of a layer with an indexer are not dealt out
INDEXED = "for all of which an indexer (hea.index) chooses the same keys"


@dataclass(frozen=True)
class DealtHeads:
    """Which heads each process gets the whole text of, and which tokens it holds; see `deal_heads`."""

    shards: SequenceShards
    heads: Bounds
    tokens: Bounds

    @property
    def own(self) -> slice:
        """The heads of this process."""
        return slice(*self.heads[self.shards.rank])

    def whole_texts(self, states: Tensor) -> Tensor:
        """Return the whole text of this process's heads, given all heads of its tokens: [B, H, n, X] → [B, h, N, X]."""
        # tokens before heads, so that what comes from the processes lies in the order of the text
        rows = states.permute(2, 0, 1, 3)
        sent = torch.cat([rows[:, :, first:stop].flatten() for first, stop in self.heads])
        batch_size, _, num_tokens, width = states.shape
        num_heads = self.own.stop - self.own.start
        to_send = [num_tokens * batch_size * (stop - first) * width for first, stop in self.heads]
        to_receive = [(stop - first) * batch_size * num_heads * width for first, stop in self.tokens]
        received = exchanged(sent, to_send, to_receive, self.shards.group)
        return received.view(-1, batch_size, num_heads, width).permute(1, 2, 0, 3)

    def own_channels(self, width: int) -> slice:
        """Return which numbers of a token are those of this process's heads, of `width` numbers each."""
        return slice(self.own.start * width, self.own.stop * width)

    def all_heads(self, states: Tensor, width: int) -> Tensor:
        """Return the numbers of all heads, of `width` each, given those of this process: [..., h · w] → [..., H · w].

        For what is small: all processes add them up.
        """
        own, num_numbers = self.own_channels(width), self.heads[-1][1] * width
        return SumOfProcesses.apply(pad(states, (own.start, num_numbers - own.stop)), self.shards.group)  # type: ignore[no-any-return]

    def own_tokens(self, states: Tensor) -> Tensor:
        """Return all heads of this process's tokens, given the whole text of its heads: the inverse."""
        batch_size, num_heads, _, width = states.shape
        first, stop = self.tokens[self.shards.rank]
        to_send = [(stop - first) * batch_size * num_heads * width for first, stop in self.tokens]
        to_receive = [(stop - first) * batch_size * (end - start) * width for start, end in self.heads]
        received = exchanged(states.permute(2, 0, 1, 3).flatten(), to_send, to_receive, self.shards.group)
        parts = [part.view(stop - first, batch_size, -1, width) for part in received.split(to_receive)]
        return torch.cat(parts, 2).permute(1, 2, 0, 3)

    def own_rows(self, out: Tensor) -> Tensor:
        """Return the same of what attention returns, [B, N, h, X] → [B, n, H, X]."""
        return self.own_tokens(out.transpose(1, 2)).transpose(1, 2)


def deal_heads(shards: SequenceShards, num_heads: int, num_tokens: int) -> DealtHeads:
    """Return how processes that share texts of so many tokens deal out heads; the first get one more if they must.

    Raises:
        ConfigurationError: fewer heads than processes.
    """
    refuse_few_heads(num_heads, shards.size)
    return DealtHeads(shards, shard_bounds(num_heads, shards.size), shard_bounds(num_tokens, shards.size))


def refuse_few_heads(num_heads: int, num_processes: int) -> None:
    """Raise ConfigurationError if a process would get no head."""
    if num_heads < num_processes:
        raise ConfigurationError(
            f"{num_processes} processes cannot deal out {num_heads} heads: each needs one at least. Use "
            f"{num_heads} processes or fewer, or mode='auto' and patterns that read neighbours."
        )


def refuse_heads(mode: str, what: str) -> None:
    """Raise ConfigurationError in the mode that deals out heads; `what`: whose heads, and why they cannot be."""
    if mode == HEADS:
        raise ConfigurationError(f"mode={shown(mode)} cannot deal out the heads of {what}. Use mode='auto'.")


def refuse_halo(mode: str, what: str) -> None:
    """Raise ConfigurationError in the mode that exchanges keys alone; `what`: why all keys of a head are needed."""
    if mode == HALO:
        raise ConfigurationError(
            f"{what}, so that processes must share heads, but mode={shown(mode)} shares keys. Use mode='auto' or "
            "'heads'."
        )
