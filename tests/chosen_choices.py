"""Choices of keys for the contract of a backend, drawn from a fixed seed; a choice joins by a line in `CHOICES`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.grouped_keys import ChunkedOrder, KeyGroups
from hf_efficient_attn.layout.listed_keys import ChosenBlocks, ChosenTokens
from hf_efficient_attn.layout.selected_keys import ChosenKeys


@dataclass(frozen=True)
class Sizes:
    """Of the call that a choice is for."""

    batch_size: int
    num_heads: int
    num_key_heads: int
    num_queries: int
    num_keys: int


def numbers(most: int, *shape: int) -> Tensor:
    """Return integers from -1 to `most`, which is out of range."""
    return torch.randint(-1, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape) + most))


def sorted_by_bucket(sizes: Sizes, num_rounds: int, num_buckets: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return positions in the order of their buckets, and these buckets, [batch, heads, rounds, keys]."""
    buckets = numbers(num_buckets - 1, sizes.batch_size, heads, num_rounds, sizes.num_keys).clamp(min=0)
    ordered, order = buckets.sort(stable=True)
    return order, ordered


def tokens(sizes: Sizes) -> ChosenKeys:
    """Return tokens for all heads, some named twice."""
    return ChosenTokens(numbers(sizes.num_keys, sizes.batch_size, 1, sizes.num_queries, 9))


def tokens_of_heads(sizes: Sizes) -> ChosenKeys:
    """Return tokens for every query head, alike in all examples."""
    return ChosenTokens(numbers(sizes.num_keys, 1, sizes.num_heads, sizes.num_queries, 5).int())


def blocks(sizes: Sizes) -> ChosenKeys:
    """Return blocks for every query head, counted from the start of documents."""
    return ChosenBlocks(numbers(sizes.num_keys // 7, sizes.batch_size, sizes.num_heads, sizes.num_queries, 3), 7)


def own_blocks(sizes: Sizes) -> ChosenKeys:
    """Return for every query its own block, and others."""
    own = (torch.arange(sizes.num_queries) + sizes.num_keys - sizes.num_queries) // 9
    others = numbers(sizes.num_keys // 9, sizes.batch_size, sizes.num_heads, sizes.num_queries, 2)
    return ChosenBlocks(torch.cat([others, own[:, None].expand(*others.shape[:3], 1)], 3), 9)


def blocks_of_key_heads(sizes: Sizes) -> ChosenKeys:
    """Return blocks of the axis for every key head."""
    drawn = numbers(sizes.num_keys // 16, sizes.batch_size, sizes.num_key_heads, sizes.num_queries, 2)
    return ChosenBlocks(drawn, 16, counted_from="axis")


def blocks_for_blocks(sizes: Sizes) -> ChosenKeys:
    """Return blocks for blocks of five queries of all heads."""
    return ChosenBlocks(numbers(sizes.num_keys // 8, 1, 1, -(-sizes.num_queries // 5), 4), 8, queries_per_choice=5)


def groups(sizes: Sizes) -> ChosenKeys:
    """Return groups in which queries and keys are in any number of groups."""
    of_queries = numbers(sizes.num_keys, sizes.batch_size, sizes.num_heads, 4, sizes.num_keys // 3 + 1)
    return KeyGroups(of_queries, numbers(sizes.num_keys, sizes.batch_size, sizes.num_heads, 4, sizes.num_keys // 4 + 2))


def groups_of_places(sizes: Sizes) -> ChosenKeys:
    """Return groups of all heads, whose labels count places."""
    drawn = numbers(sizes.num_keys, sizes.batch_size, 1, 3, sizes.num_keys // 3 + 1).sort().values
    return KeyGroups(drawn, drawn, labels_count="places")


def mean_of_groups(sizes: Sizes) -> ChosenKeys:
    """Return groups whose outputs are averaged."""
    drawn = numbers(sizes.num_keys, sizes.batch_size, sizes.num_heads, 4, sizes.num_keys // 2 + 1).sort().values
    return KeyGroups(drawn, drawn, join="mean", mean_epsilon=0.01, labels_count="places")


def groups_of_near_places(sizes: Sizes) -> ChosenKeys:
    """Return groups of which a query reads keys from three places before its own on."""
    drawn = numbers(sizes.num_keys, sizes.batch_size, sizes.num_heads, 3, sizes.num_keys // 2 + 1).sort().values
    return KeyGroups(drawn, drawn, first_place=-3)


def order(sizes: Sizes) -> ChosenKeys:
    """Return Reformer's order in one round, with empty places."""
    ordered, _ = sorted_by_bucket(sizes, 1, 6, sizes.num_heads)
    return ChunkedOrder(ordered.masked_fill(ordered % 11 == 3, -1), 16)


def order_of_rounds(sizes: Sizes) -> ChosenKeys:
    """Return an order of three rounds, with chunks on both sides, in which a token may read itself."""
    ordered, buckets = sorted_by_bucket(sizes, 3, 4, sizes.num_heads)
    return ChunkedOrder(ordered, 8, chunks_after=1, buckets=buckets, attends_to_self_last=False)


def order_once(sizes: Sizes) -> ChosenKeys:
    """Return an order of two rounds for key heads, in which pairs count once."""
    ordered, buckets = sorted_by_bucket(sizes, 2, 5, sizes.num_key_heads)
    return ChunkedOrder(ordered, 12, buckets=buckets, counts_duplicates=False)


def order_of_lists(sizes: Sizes) -> ChosenKeys:
    """Return an order whose chunks are listed, for all heads."""
    ordered, _ = sorted_by_bucket(sizes, 2, 5, 1)
    num_chunks = 2 * -(-sizes.num_keys // 10)
    own = torch.arange(num_chunks).expand(sizes.batch_size, 1, -1)[..., None]
    others = numbers(num_chunks, sizes.batch_size, 1, num_chunks, 2)
    return ChunkedOrder(ordered, 10, reads=torch.cat([own, others], 3))


CHOICES: dict[str, Callable[[Sizes], ChosenKeys]] = {
    "tokens": tokens,
    "tokens of heads": tokens_of_heads,
    "blocks": blocks,
    "own blocks": own_blocks,
    "blocks of key heads": blocks_of_key_heads,
    "blocks for blocks": blocks_for_blocks,
    "groups": groups,
    "groups of places": groups_of_places,
    "mean of groups": mean_of_groups,
    "groups of near places": groups_of_near_places,
    "order": order,
    "order of rounds": order_of_rounds,
    "order once": order_once,
    "order of lists": order_of_lists,
}
