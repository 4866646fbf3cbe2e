"""Manual pages whose sections have lost their titles and their order: which title had each?"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_efficient_attn as hea

SEPARATOR = "\n\n"
TEXTS_PER_BATCH = 16
NOT_ASKED = -100
Scores = dict[str, float]


def shuffled_pages(
    pages: Dataset, titles: Sequence[str], num_texts: int, most_words: int, seed: int
) -> list[dict[str, Any]]:
    """Return pages in random order, again and again, the sections of each in random order and cut to their first words.

    An item has `text`, `parts`, where its sections are in characters, and `labels`, the numbers of their titles.

    >>> page = {"titles": ["NAME", "NOTES"], "texts": ["a b", "c d e"]}
    >>> shuffled_pages(Dataset.from_list([page]), ["NAME", "NOTES"], 1, most_words=2, seed=1)
    [{'text': 'c d\\n\\na b', 'parts': [(0, 3), (5, 8)], 'labels': [1, 0]}]
    """
    random, rows = Random(seed), pages.to_list()
    items: list[dict[str, Any]] = []
    while len(items) < num_texts:
        items += [_shuffled(row, titles, most_words, random) for row in random.sample(rows, len(rows))]
    return items[:num_texts]


def _shuffled(row: dict[str, Any], titles: Sequence[str], most_words: int, random: Random) -> dict[str, Any]:
    order = random.sample(range(len(row["texts"])), len(row["texts"]))
    texts = [" ".join(row["texts"][place].split()[:most_words]) for place in order]
    stops = (np.cumsum([len(text) + len(SEPARATOR) for text in texts]) - len(SEPARATOR)).tolist()
    return {
        "text": SEPARATOR.join(texts),
        "parts": [(stop - len(text), stop) for stop, text in zip(stops, texts, strict=True)],
        "labels": [titles.index(row["titles"][place]) for place in order],
    }


class SectionCollator:
    """Make a batch for heads of tokens: the first token of a section is asked for its title."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        texts, parts = [each["text"] for each in items], [each["parts"] for each in items]
        batch = dict(hea.structured_inputs(self.tokenizer, texts, parts, max_length=self.max_length))
        links = batch["long_to_global"][..., 0]
        labels = torch.full_like(links, NOT_ASKED)
        for row, item in enumerate(items):
            # sections behind the cut have no token
            for number in range(int(batch["global_mask"][row].sum())):
                labels[row, (links[row] == number).int().argmax()] = item["labels"][number]
        return {**batch, "labels": labels}


@torch.no_grad()
def score_titles(
    model: PreTrainedModel, items: Sequence[dict[str, Any]], collate: Callable[..., dict[str, Tensor]]
) -> Scores:
    """Return which share of the sections a model names; see `scores_of`."""
    model.eval()
    found, right = [], []
    for place in range(0, len(items), TEXTS_PER_BATCH):
        batch = collate(items[place : place + TEXTS_PER_BATCH])
        labels = batch.pop("labels")
        found += model(**batch).logits.argmax(-1)[labels != NOT_ASKED].tolist()
        right += labels[labels != NOT_ASKED].tolist()
    return scores_of(found, right)


def scores_of(found: Sequence[int], right: Sequence[int]) -> Scores:
    """Return the share of all sections that is named right, and the mean of the shares of each title.

    >>> scores_of([0, 0, 0, 1], [0, 0, 1, 1])
    {'named': 0.75, 'named_of_a_title': 0.75}
    """
    hits, titles = np.array(found) == np.array(right), np.array(right)
    return {
        "named": float(hits.mean()),
        "named_of_a_title": float(np.mean([hits[titles == title].mean() for title in np.unique(titles)])),
    }


def score_words(train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]) -> Scores:
    """Return the scores of logistic regression on the words (TF-IDF) of each section alone."""
    texts, labels = zip(*((_sections(items), _labels(items)) for items in (train, test)), strict=True)
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    classifier = LogisticRegression(C=30, max_iter=1000).fit(vectorizer.fit_transform(texts[0]), labels[0])
    return scores_of(classifier.predict(vectorizer.transform(texts[1])).tolist(), labels[1])


def _sections(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["text"][start:stop] for item in items for start, stop in item["parts"]]


def _labels(items: Sequence[dict[str, Any]]) -> list[int]:
    return [label for item in items for label in item["labels"]]
