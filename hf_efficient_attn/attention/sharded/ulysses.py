"""Ulysses: each process exchanges all heads of its own tokens for the whole sequence of some heads.

Source: Jacobs et al. (arXiv:2309.14509).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.dispatch import attend
from hf_efficient_attn.attention.sharded.collectives import SumOfProcesses, exchanged
from hf_efficient_attn.attention.sharded.plan import repeated_heads
from hf_efficient_attn.attention.sharded.shards import HALO, HEADS, Bounds, SequenceShards, ShardedCall, shard_bounds
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.messages import shown

# why the heads of a layer with an indexer are not divided among processes
INDEXED = "because an indexer (hea.index) selects the same keys for all of them"


@dataclass(frozen=True)
class UlyssesHeads:
    """The heads whose whole sequence each process gets, and the tokens that it holds; see `ulysses_heads`."""

    shards: SequenceShards
    heads: Bounds
    tokens: Bounds

    @property
    def own(self) -> slice:
        """The heads of this process."""
        return slice(*self.heads[self.shards.rank])

    def gather_sequences(self, states: Tensor) -> Tensor:
        """Return the sequences of this process's heads, given all heads of its tokens: [B, H, n, X] → [B, h, N, X]."""
        # tokens before heads, so that the received rows are in the order of the sequence
        rows = states.permute(2, 0, 1, 3)
        sent = torch.cat([rows[:, :, first:stop].flatten() for first, stop in self.heads])
        batch_size, _, num_tokens, width = states.shape
        num_heads = self.own.stop - self.own.start
        to_send = [num_tokens * batch_size * (stop - first) * width for first, stop in self.heads]
        to_receive = [(stop - first) * batch_size * num_heads * width for first, stop in self.tokens]
        received = exchanged(sent, to_send, to_receive, self.shards.group)
        return received.view(-1, batch_size, num_heads, width).permute(1, 2, 0, 3)

    def own_channels(self, width: int) -> slice:
        """Return the range of a token's channels that belong to this process's heads, `width` channels each."""
        return slice(self.own.start * width, self.own.stop * width)

    def all_heads(self, states: Tensor, width: int) -> Tensor:
        """Return the channels of all heads, `width` each, given those of this process: [..., h · w] → [..., H · w].

        This is meant for small tensors, since it is an all-reduce.
        """
        own, num_numbers = self.own_channels(width), self.heads[-1][1] * width
        return SumOfProcesses.apply(pad(states, (own.start, num_numbers - own.stop)), self.shards.group)  # type: ignore[no-any-return]

    def own_tokens(self, states: Tensor) -> Tensor:
        """Return all heads of this process's tokens, the inverse of `gather_sequences`: [B, h, N, X] → [B, H, n, X]."""
        batch_size, num_heads, _, width = states.shape
        first, stop = self.tokens[self.shards.rank]
        to_send = [(stop - first) * batch_size * num_heads * width for first, stop in self.tokens]
        to_receive = [(stop - first) * batch_size * (end - start) * width for start, end in self.heads]
        received = exchanged(states.permute(2, 0, 1, 3).flatten(), to_send, to_receive, self.shards.group)
        parts = [part.view(stop - first, batch_size, -1, width) for part in received.split(to_receive)]
        return torch.cat(parts, 2).permute(1, 2, 0, 3)

    def own_rows(self, out: Tensor) -> Tensor:
        """Do the same as `own_tokens` for the output of attention, [B, N, h, X] → [B, n, H, X]."""
        return self.own_tokens(out.transpose(1, 2)).transpose(1, 2)


def ulysses_heads(shards: SequenceShards, num_heads: int, num_tokens: int) -> UlyssesHeads:
    """Return how processes divide heads and tokens; the first processes get one more if they are not divisible.

    Raises:
        ConfigurationError: there are fewer heads than processes.
    """
    refuse_few_heads(num_heads, shards.size)
    return UlyssesHeads(shards, shard_bounds(num_heads, shards.size), shard_bounds(num_tokens, shards.size))


def refuse_few_heads(num_heads: int, num_processes: int) -> None:
    """Raise ConfigurationError if a process would get no head."""
    if num_heads < num_processes:
        raise ConfigurationError(
            f"Cannot split {num_heads} heads over {num_processes} processes: each process needs at least one. Use "
            f"{num_heads} processes or fewer, or mode='auto' and a local pattern."
        )


def refuse_heads(mode: str, what: str) -> None:
    """Raise ConfigurationError in the mode that divides heads; `what`: whose heads, and why they cannot be divided."""
    if mode == HEADS:
        raise ConfigurationError(f"mode={shown(mode)} cannot split the heads of {what}. Use mode='auto'.")


def refuse_halo(mode: str, what: str) -> None:
    """Raise ConfigurationError in the mode that exchanges only keys; `what`: why all keys of a head are needed."""
    if mode == HALO:
        raise ConfigurationError(
            f"{what}, so the processes must split the heads, but mode={shown(mode)} exchanges keys. Use mode='auto' or "
            "'heads'."
        )


# Attention of some heads over the whole sequence: processes exchange heads for tokens and back (DeepSpeed Ulysses).
#
# Any pattern can be computed this way, by at most one process per head.


def repeat_key_heads(states: Tensor, num_heads: int, num_shards: int) -> Tensor:
    """Return keys or values with their heads repeated until the processes can divide them."""
    num_key_heads = states.shape[1]
    repeats = repeated_heads(num_key_heads, num_heads, num_shards) // num_key_heads
    return states if repeats == 1 else states.repeat_interleave(repeats, 1)


def attend_heads(query: Tensor, key: Tensor, value: Tensor, call: ShardedCall) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens."""
    layout, scores, num_heads = call.layout, call.scores, query.shape[1]
    ulysses = ulysses_heads(call.shards, num_heads, layout.num_keys)
    key, value = (repeat_key_heads(each, num_heads, call.shards.size) for each in (key, value))
    of_keys = ulysses_heads(call.shards, key.shape[1], layout.num_keys)
    query = ulysses.gather_sequences(query)
    key, value = (of_keys.gather_sequences(each) for each in (key, value))
    terms = tuple(term_of_heads(each, ulysses) for each in scores.terms)
    layer_spec = LayerPattern(
        layout.pattern,
        layout.layer,
        False,
        first_head=layout.first_head + ulysses.own.start,
        num_model_heads=layout.num_model_heads or layout.num_heads,
    )
    sinks = None if scores.sinks is None else scores.sinks[ulysses.own]
    settings = (sinks, scores.softcap, scores.scale, scores.dropout)
    out, _ = attend(query, key, value, layer_spec, None, call.tokens, terms, *settings, backend=scores.backend)
    return ulysses.own_tokens(out)


def term_of_heads(term: Term, ulysses: UlyssesHeads) -> Term:
    """Return a term for all queries of this process's heads, given the term for all heads of its queries."""
    values, num_heads = term.values, ulysses.heads[-1][1]
    if not is_by_query(term, ulysses.tokens):
        return term if values.shape[1] == 1 else replace(term, values=values[:, ulysses.own])
    first, stop = ulysses.tokens[ulysses.shards.rank]
    return replace(term, values=ulysses.gather_sequences(values.expand(-1, num_heads, stop - first, -1)))


def is_by_query(term: Term, bounds: Bounds) -> bool:
    """Return whether a term has values for each query; all processes must return the same.

    A process with a single query could not tell, so if there is one, all processes return True.
    """
    return term.values.shape[2] > 1 or any(stop - first == 1 for first, stop in bounds)
