"""Labelled documents as tokens, and what a model sees of them: crops in training, starts or chunks in evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Documents:
    """Tokens without the special ones, and class numbers.

    Attributes:
        long_from: what an input of so many tokens, two of them special, does not hold is a long document.
    """

    tokens: list[list[int]]
    labels: list[int]
    long_from: int

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def long(self) -> list[int]:
        """Return the places of the long documents."""
        return [place for place, tokens in enumerate(self.tokens) if len(tokens) + 2 > self.long_from]


def tokenize(rows: Dataset, tokenizer: PreTrainedTokenizerBase, long_from: int) -> Documents:
    """Return the rows as `Documents`, whole."""
    tokens = tokenizer(list(rows["text"]), add_special_tokens=False, verbose=False)["input_ids"]
    return Documents(tokens, list(rows["label"]), long_from)


class Crops(Sequence):
    """Training examples: of each document a piece of at most `max_length` tokens, another one at each visit."""

    def __init__(self, documents: Documents, tokenizer: PreTrainedTokenizerBase, max_length: int, seed: int) -> None:
        self.documents, self.random = documents, Random(seed)
        self.start, self.end = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.inner = max_length - 2
        self.lengths = [min(len(tokens), self.inner) + 2 for tokens in documents.tokens]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.documents.tokens[index]
        offset = self.random.randint(0, max(0, len(tokens) - self.inner))
        piece = [self.start, *tokens[offset : offset + self.inner], self.end]
        return {"input_ids": piece, "labels": self.documents.labels[index]}


def pieces_of(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, max_length: int, whole: bool
) -> tuple[list[list[int]], list[int]]:
    """Return inputs of at most `max_length` tokens and the document of each: starts, or if `whole` all chunks."""
    inner = max_length - 2
    inputs, owners = [], []
    for number, tokens in enumerate(documents.tokens):
        starts = range(0, max(1, len(tokens)), inner) if whole else [0]
        for start in starts:
            inputs.append([tokenizer.cls_token_id, *tokens[start : start + inner], tokenizer.sep_token_id])
            owners.append(number)
    return inputs, owners
