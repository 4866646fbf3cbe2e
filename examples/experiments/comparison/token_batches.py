"""Endless batches of about equally many tokens, so that models that read different lengths do equal work a step."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch.utils.data import IterableDataset

Example = dict[str, Any]
BATCHES_SORTED_TOGETHER = 16


class TokenBatches(IterableDataset):
    """Padded batches of examples, anew and in another order at each pass, without end.

    Examples of alike length come together, so that little is padding; which ones, and in which order the batches come,
    is drawn anew at each pass.

    Args:
        examples: a sequence of {"input_ids": list, ...}; its items may be drawn at random (crops), but have the length
            that `lengths` says.
        lengths: tokens of each example.
        tokens_per_step: examples times the longest of them; a longer example comes alone.
    """

    def __init__(
        self, examples: Sequence[Example], lengths: Sequence[int], tokens_per_step: int, pad_token_id: int, seed: int
    ) -> None:
        self.examples, self.lengths, self.tokens_per_step = examples, lengths, tokens_per_step
        self.pad_token_id, self.random = pad_token_id, Random(seed)
        self.examples_served = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for indices in self._plan():
                self.examples_served += len(indices)
                yield pad_batch([self.examples[index] for index in indices], self.pad_token_id)

    def _plan(self) -> list[list[int]]:
        """Return one pass over the examples as batches of indices."""
        order = list(range(len(self.lengths)))
        self.random.shuffle(order)
        window = BATCHES_SORTED_TOGETHER * max(1, self.tokens_per_step * len(order) // sum(self.lengths))
        batches = []
        for start in range(0, len(order), window):
            alike = sorted(order[start : start + window], key=self.lengths.__getitem__)
            batches += token_batches(alike, self.lengths, self.tokens_per_step)
        self.random.shuffle(batches)
        return batches

    def longest_batch(self) -> dict[str, torch.Tensor]:
        """Return a batch with the most tokens there can be, for measuring what a training step needs."""
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True)
        first = token_batches(order, self.lengths, self.tokens_per_step)[0]
        return pad_batch([self.examples[index] for index in first], self.pad_token_id)


def token_batches(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return `indices` in their order, cut into batches of at most `max_tokens` tokens with padding.

    >>> token_batches([0, 1, 2, 3], [4, 4, 5, 20], max_tokens=10)
    [[0, 1], [2], [3]]
    """
    batches: list[list[int]] = []
    longest = 0
    for index in indices:
        longest = max(longest, lengths[index])
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def pad_batch(examples: Sequence[Example], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return the examples as one batch, padded on the right, with its `attention_mask`.

    Args:
        examples: {"input_ids": list, and by name further lists of that length, or numbers}; lists are padded by 0,
            numbers become vectors.
    """
    longest = max(len(example["input_ids"]) for example in examples)
    batch = {"attention_mask": _padded([[1] * len(example["input_ids"]) for example in examples], longest, 0)}
    for name, value in examples[0].items():
        values = [example[name] for example in examples]
        filler = pad_token_id if name == "input_ids" else 0
        batch[name] = _padded(values, longest, filler) if isinstance(value, list) else torch.tensor(values)
    return batch


def _padded(rows: Sequence[list[int]], length: int, filler: int) -> torch.Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])
