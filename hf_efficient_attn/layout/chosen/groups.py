"""What all choices have in common whose keys are read in groups: lists of queries, and of the keys that they read."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.chosen_keys import ChosenKeys, in_range, near_places
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.query_rows import first_query
from hf_efficient_attn.layout.token_mask import TokenMask


class Groups(NamedTuple):
    """Positions of queries and keys that form groups; numbers out of range are empty places.

    Attributes:
        queries, keys: int64 [batch or 1, heads, groups, places].
        query_buckets, key_buckets: of the same shapes; only pairs of equal buckets are read. None: all pairs.
    """

    queries: Tensor
    keys: Tensor
    query_buckets: Tensor | None = None
    key_buckets: Tensor | None = None


class GroupedKeys(ChosenKeys):
    """Keys that are read in groups."""

    def groups(self) -> Groups:
        """Return the groups."""
        raise NotImplementedError

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return how many pairs of places hold each pair."""
        found = self.groups()
        num_queries, num_keys = layout.num_queries, layout.num_keys
        queries = in_range(found.queries - first_query(layout, query_start), num_queries)[..., None]
        keys = in_range(found.keys, num_keys)[..., None, :]
        is_pair = (queries < num_queries) & (keys < num_keys)
        if found.query_buckets is not None and found.key_buckets is not None:
            is_pair = is_pair & (found.query_buckets[..., None] == found.key_buckets[..., None, :])
        if self.first_place is not None:
            is_pair = is_pair & near_places(self.first_place, queries.shape[3], keys.shape[4], keys.device)
        numbers = torch.where(is_pair, queries * num_keys + keys, num_queries * num_keys)
        counts = torch.zeros(*numbers.shape[:2], num_queries * num_keys + 1, dtype=torch.int32, device=numbers.device)
        # a compiler cannot join the axes of groups and places for every number of groups
        examples, heads = (torch.arange(size, device=numbers.device) for size in numbers.shape[:2])
        index = (examples.view(-1, 1, 1, 1, 1), heads.view(-1, 1, 1, 1), numbers)
        counts = counts.index_put(index, torch.ones_like(numbers, dtype=torch.int32), accumulate=True)
        return counts[..., :-1].unflatten(2, (num_queries, num_keys))
