"""How much the processes that share a text send in one layer, and by which way of exchange this is least."""

from dataclasses import dataclass

from hf_efficient_attn.attention.sharded.key_plan import KeyPlan
from hf_efficient_attn.attention.sharded.sequence_shards import HALO, HEADS, Bounds
from hf_efficient_attn.patterns.intervals import intersect, size


@dataclass(frozen=True)
class HeadSizes:
    """The heads of a layer: how many, those of keys, and the widths of keys and of values."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Traffic:
    """What each process receives in the forward pass of one layer, in numbers of an example.

    The backward pass sends as many back, without the log-sum-exp of wide queries.

    Attributes:
        mode: "halo" or "heads".
        received: numbers that each process receives of keys, values, queries and outputs.
        reduced: numbers that all processes add up, for wide queries.
    """

    mode: str
    received: tuple[int, ...]
    reduced: int = 0

    @property
    def most(self) -> int:
        """What the process receives that receives most; numbers that are added up are sent twice."""
        return max(self.received) + 2 * self.reduced


def halo_traffic(plan: KeyPlan, bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return what the halo of a plan takes: keys and values, and the wide queries."""
    of_key = sizes.num_key_heads * (sizes.head_dim + sizes.value_dim)
    of_query = sizes.num_heads * sizes.head_dim
    wide = plan.wide_positions
    foreign = [size(wide) - size(intersect(wide, (own,))) for own in bounds]
    received = (
        size(wanted) * of_key + queries * of_query for wanted, queries in zip(plan.wanted, foreign, strict=True)
    )
    # the highest log-sum-exp, the outputs, and their weights
    return Traffic(HALO, tuple(received), size(wide) * sizes.num_heads * (sizes.value_dim + 2))


def heads_traffic(bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return what the exchange of heads takes: queries, keys, values and outputs."""
    num_shards, num_tokens = len(bounds), bounds[-1][1]
    heads = sizes.num_heads // num_shards
    key_heads = sizes.num_key_heads
    if key_heads % num_shards:
        key_heads = num_shards if num_shards % key_heads == 0 else sizes.num_heads
    of_token = heads * sizes.head_dim + key_heads // num_shards * (sizes.head_dim + sizes.value_dim)
    received = []
    for first, stop in bounds:
        foreign = num_tokens - (stop - first)
        outputs = (stop - first) * (num_shards - 1) * heads * sizes.value_dim
        received.append(foreign * of_token + outputs)
    return Traffic(HEADS, tuple(received))


def gather_traffic(bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return what gathering all keys and values takes, as other engines do."""
    of_key = sizes.num_key_heads * (sizes.head_dim + sizes.value_dim)
    return Traffic("all-gather", tuple((bounds[-1][1] - (stop - first)) * of_key for first, stop in bounds))
