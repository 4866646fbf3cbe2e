"""How much the processes that share a text send in one layer, and by which way of exchange this is least."""

from dataclasses import dataclass

from hf_efficient_attn.attention.sharded.key_exchange import KeyExchange
from hf_efficient_attn.attention.sharded.sequence_shards import HALO, HEADS, Bounds, shard_bounds
from hf_efficient_attn.patterns.intervals import intersect, size


@dataclass(frozen=True)
class HeadSizes:
    """The heads of a layer: how many, those of keys, and the widths of keys and of values.

    Attributes:
        term_values: how many values terms have for each query of a head.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    term_values: int = 0


@dataclass(frozen=True)
class Traffic:
    """What each process sends and receives in the forward pass of one layer, in numbers of an example.

    The backward pass sends gradients the other way: each process sends as many numbers as it has received.

    Attributes:
        mode: "halo" or "heads".
        sent, received: numbers of keys, values, queries and outputs that each process sends and receives.
        reduced, reduced_backward: numbers that all processes add up for wide queries (all-reduce), by pass.
    """

    mode: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    reduced: int = 0
    reduced_backward: int = 0

    @property
    def most(self) -> int:
        """What the process receives that receives most; numbers that are added up are sent twice."""
        return max(self.received) + 2 * self.reduced


def halo_traffic(exchange: KeyExchange, bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return what the halo takes: keys and values, and the wide queries."""
    of_key = sizes.num_key_heads * (sizes.head_dim + sizes.value_dim)
    of_query = sizes.num_heads * sizes.head_dim
    num_wide = size(exchange.wide_positions)
    sent, received = [], []
    for own, wanted in zip(bounds, exchange.wanted, strict=True):
        wide = size(intersect(exchange.wide_positions, (own,)))
        num_keys = sum(size(intersect(others, (own,))) for others in exchange.wanted)
        sent.append(num_keys * of_key + wide * (len(bounds) - 1) * of_query)
        received.append(size(wanted) * of_key + (num_wide - wide) * of_query)
    outputs = num_wide * sizes.num_heads * sizes.value_dim
    # forward, besides the outputs, the highest log-sum-exp and the weights of the processes
    return Traffic(HALO, tuple(sent), tuple(received), outputs + 2 * num_wide * sizes.num_heads, outputs)


def heads_traffic(bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return what the exchange of heads takes: queries, their terms, keys, values and outputs."""
    num_shards, num_tokens = len(bounds), bounds[-1][1]
    num_key_heads = repeated_heads(sizes.num_key_heads, sizes.num_heads, num_shards)
    key_heads = shard_bounds(num_key_heads, num_shards)
    sent, received = [], []
    for (first, stop), (head, end), (key_head, key_end) in zip(
        bounds, shard_bounds(sizes.num_heads, num_shards), key_heads, strict=True
    ):
        own, foreign = stop - first, num_tokens - (stop - first)
        heads, of_keys = end - head, key_end - key_head
        of_query, of_key = sizes.head_dim + sizes.term_values, sizes.head_dim + sizes.value_dim
        there = (sizes.num_heads - heads) * of_query + (num_key_heads - of_keys) * of_key
        sent.append(own * there + foreign * heads * sizes.value_dim)
        here = heads * of_query + of_keys * of_key
        received.append(foreign * here + own * (sizes.num_heads - heads) * sizes.value_dim)
    return Traffic(HEADS, tuple(sent), tuple(received))


def repeated_heads(num_key_heads: int, num_heads: int, num_shards: int) -> int:
    """Return to how many key heads they are repeated, so that each process gets those of its query heads."""
    if num_key_heads % num_shards == 0:
        return num_key_heads
    return num_shards if num_shards % num_key_heads == 0 and num_heads % num_shards == 0 else num_heads


def gather_traffic(bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return what gathering all keys and values takes, as other engines do."""
    of_key = sizes.num_key_heads * (sizes.head_dim + sizes.value_dim)
    lengths, num_tokens = [stop - first for first, stop in bounds], bounds[-1][1]
    sent = tuple(length * (len(bounds) - 1) * of_key for length in lengths)
    return Traffic("all-gather", sent, tuple((num_tokens - length) * of_key for length in lengths))
