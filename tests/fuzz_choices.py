"""Keys chosen by content, for `tests/fuzz_engine.py`: random choices, and how often each says that a query reads a key.

The counts follow the docstrings of the choices, pair by pair; nothing of the engine is called.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from fuzz_formula import Masks
from torch import Tensor

import hf_efficient_attn as hea

# of a call: batch, heads, key heads, queries, keys
Sizes = tuple[int, int, int, int, int]


def draw_choice(rng: random.Random, sizes: Sizes, is_cross: bool) -> Any:
    """Draw a choice of any kind; an order is of one axis."""
    batch, heads, key_heads, queries, keys = sizes
    shape = (rng.choice((1, batch)), rng.choice((1, key_heads, heads)))
    kind = rng.choice(("tokens", "blocks", "groups") if is_cross else ("tokens", "blocks", "groups", "order"))
    if kind == "tokens":
        return hea.ChosenTokens(numbers(keys, *shape, queries, rng.randint(1, 9)))
    if kind == "blocks":
        size, shared = rng.randint(1, 20), rng.choice((1, 1, rng.randint(1, 9)))
        drawn = numbers(-(-keys // size), *shape, -(-queries // shared), rng.randint(1, 4))
        return hea.ChosenBlocks(drawn, size, shared, rng.choice(("document", "axis")))
    if kind == "groups":
        count = rng.randint(1, 5)
        # positions of queries end with the keys, or with those of another sequence
        last = max(keys, queries) + 3
        return hea.KeyGroups(
            numbers(last, *shape, count, rng.randint(1, 30)), numbers(keys, *shape, count, rng.randint(1, 30))
        )
    rounds, left_out = rng.randint(1, 3), rng.choice((0, 0, rng.randint(0, keys // 2)))
    order = torch.rand(*shape, rounds, keys).argsort(-1)[..., left_out:]
    order = order.masked_fill(torch.rand(order.shape) < rng.choice((0.0, 0.1)), -1)
    return hea.ChunkedOrder(
        order,
        rng.randint(1, 12),
        rng.randint(0, 2),
        rng.randint(0, 1),
        buckets=rng.choice((None, torch.randint(0, 4, order.shape).sort(-1).values)),
        attends_to_self_last=rng.random() < 0.7,
        counts_duplicates=rng.random() < 0.6,
    )


def numbers(most: int, *shape: int) -> Tensor:
    """Return integers from -1 to `most`, which is out of range."""
    return torch.randint(-1, most + 1, shape)


def counts_of(chosen: Any, masks: Masks, sizes: Sizes, first: int) -> Tensor:
    """Return how often each query of a call may read each key by a choice, int [batch, heads, queries, keys].

    first: position of the first query.
    """
    batch, heads, key_heads, queries, keys = sizes
    counts = torch.zeros(batch, heads, queries, keys, dtype=torch.long)
    for example in range(batch):
        places = places_of_keys(masks, example, keys)
        for head in range(heads):
            for query, key in pairs_of_head(chosen, example, head, places, sizes):
                # positions, but for lists of a call's own queries
                row = query - first if chosen.kind in ("groups", "order") else query
                if 0 <= row < queries and 0 <= key < keys:
                    counts[example, head, row, key] += 1
    if chosen.kind in ("tokens", "blocks") or (chosen.kind == "order" and not chosen.counts_duplicates):
        counts = counts.clamp(max=1)
    return counts


def places_of_keys(masks: Masks, example: int, keys: int) -> list[int]:
    """Return the place of each key in its document; of keys in none, any."""
    places = list(range(keys))
    for document in masks.documents(example, keys):
        for key in document:
            places[key] = key - document[0]
    return places


def pairs_of_head(chosen: Any, example: int, head: int, places: list[int], sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Yield the pairs of a head, each as often as it is read."""

    def own(tensor: Tensor) -> list[Any]:
        of_example = tensor[example if tensor.shape[0] > 1 else 0]
        per_head = of_example.shape[0]
        return of_example[head * per_head // sizes[1]].tolist()  # type: ignore[no-any-return]

    queries = sizes[3]
    if chosen.kind == "tokens":
        yield from ((query, key) for query, listed in enumerate(own(chosen.tokens)) for key in listed)
    elif chosen.kind == "blocks":
        numbered = places if chosen.counted_from == "document" else range(len(places))
        listed = own(chosen.blocks)
        for query in range(queries):
            wanted = set(listed[query // chosen.queries_per_choice]) - {-1}
            yield from ((query, key) for key, place in enumerate(numbered) if place // chosen.block_tokens in wanted)
    elif chosen.kind == "groups":
        for members, keys in zip(own(chosen.queries), own(chosen.keys), strict=True):
            yield from ((query, key) for query in members for key in keys if min(query, key) >= 0)
    else:
        yield from pairs_of_order(chosen, own(chosen.order), None if chosen.buckets is None else own(chosen.buckets))


def pairs_of_order(chosen: Any, order: list[Any], buckets: list[Any] | None) -> Iterator[tuple[int, int]]:
    """Yield the pairs of chunks that read each other, on the circle of the chunks of all rounds."""
    size, chunks = chosen.chunk_tokens, []
    for number, positions in enumerate(order):
        marked = list(zip(positions, positions if buckets is None else buckets[number], strict=True))
        chunks += [marked[start : start + size] for start in range(0, len(marked), size)]
    for number, members in enumerate(chunks):
        steps = range(-chosen.chunks_before, chosen.chunks_after + 1)
        for read in {(number + step) % len(chunks) for step in steps}:
            for query, own_bucket in members:
                for key, bucket in chunks[read]:
                    if min(query, key) >= 0 and (buckets is None or own_bucket == bucket):
                        yield query, key
