"""Labelled documents as tokens, and what a model sees of them: crops in training, starts or chunks in evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from corpora.splits import Row, Splits
from shared.arguments import UsageError
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


def find_classes(splits: Splits, column: str, names: Sequence[str] | None) -> dict[Any, str]:
    """Return the name of each value of the label column; a value's place is its class number.

    Args:
        names: of the values 0, 1, ...; None: the values of the training rows, sorted, name themselves.

    Raises:
        UsageError: fewer than two classes, or one that occurs only outside the training rows.
    """
    if names is not None:
        return dict(enumerate(names))
    values = sorted({row[column] for row in splits["train"]}, key=lambda value: (str(type(value)), value))
    if len(values) < 2:
        raise UsageError(f"Column {column} has one class only, {values[0]!r}, in the training rows; two are needed.")
    for name, rows in splits.items():
        for row in rows:
            if row[column] not in values:
                raise UsageError(f"Class {row[column]!r} of the {name} rows does not occur in the training rows.")
    return {value: str(value) for value in values}


def tokenize(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    text_column: str,
    label_column: str,
    values: Sequence[Any],
    long_from: int,
) -> Documents:
    """Return the rows as `Documents`, whole; a label's number is its place in `values`."""
    texts = [row[text_column] for row in rows]
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return Documents(tokens, [values.index(row[label_column]) for row in rows], long_from)


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
