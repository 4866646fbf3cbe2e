"""How well documents are classified: by the models, by a bag of words, and by always naming the most frequent class."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comparison.documents import Documents, pieces_of
from comparison.token_batches import pad_batch, token_batches

METRIC = Path(__file__).parents[2] / "metrics" / "classification_scores"
SCORES = ("accuracy", "accuracy_long", "f1_macro", "matthews")
TOKENS_PER_BATCH = 65_536
Scores = dict[str, float]


def scores_of(predictions: Sequence[int], documents: Documents) -> Scores:
    """Return accuracy, macro F1 and Matthews correlation; and the accuracy on long documents, if there are any."""
    scores = evaluate.load(str(METRIC)).compute(predictions=list(predictions), references=documents.labels)
    if documents.long:
        rights = [predictions[place] == documents.labels[place] for place in documents.long]
        scores["accuracy_long"] = statistics.fmean(rights)
    return scores


def score_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    max_length: int,
    whole: bool = False,
) -> Scores:
    """Return the scores on the first `max_length` tokens of each document, and documents per second.

    Args:
        whole: read each document to its end, in chunks of `max_length`, and average what they say.
    """
    inputs, owners = pieces_of(documents, tokenizer, max_length, whole)
    start = time.perf_counter()
    log_probabilities = _log_probabilities(model, inputs)
    sums = np.zeros((len(documents), log_probabilities.shape[1]))
    np.add.at(sums, owners, log_probabilities)
    seconds = time.perf_counter() - start
    return {**scores_of(sums.argmax(1).tolist(), documents), "documents_per_second": len(documents) / seconds}


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, inputs: list[list[int]]) -> np.ndarray:
    """Return [inputs, classes]."""
    model.eval()
    lengths = list(map(len, inputs))
    found = np.zeros((len(inputs), model.config.num_labels))
    for batch in token_batches(sorted(range(len(inputs)), key=lengths.__getitem__), lengths, TOKENS_PER_BATCH):
        padded = pad_batch([{"input_ids": inputs[index]} for index in batch], model.config.pad_token_id)
        logits = model(**{name: tensor.to(model.device) for name, tensor in padded.items()}).logits
        found[batch] = logits.float().log_softmax(-1).cpu().numpy()
    return found


def score_bag_of_words(train: Documents, test: Documents, max_length: int) -> Scores:
    """Return the scores of logistic regression on TF-IDF of the first `max_length` tokens, train and test alike."""
    vectorizer = TfidfVectorizer(analyzer=lambda tokens: tokens[:max_length], min_df=2, sublinear_tf=True)
    try:
        counts = vectorizer.fit_transform(train.tokens)
    except ValueError:  # no token is in two documents
        return score_most_frequent(train, test)
    classifier = LogisticRegression(C=30, max_iter=1000, class_weight="balanced").fit(counts, train.labels)
    return scores_of(classifier.predict(vectorizer.transform(test.tokens)).tolist(), test)


def score_most_frequent(train: Documents, test: Documents) -> Scores:
    """Return the scores of naming the most frequent class of the training documents each time."""
    ((label, _),) = Counter(train.labels).most_common(1)
    return scores_of([label] * len(test), test)


def over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what one kind of model needed and reached, as means over its seeds.

    Returns:
        the numbers of training, those of the first seed's reload, and "scores": reading → score → mean, and
        `NAME_deviation`, the standard deviation over the seeds (None for a single one).
    """
    numbers = ("train_seconds", "num_steps", "train_tokens", "train_examples", "train_tokens_per_second")
    shared = {name: results[0][name] for name in ("parameters", "reload_difference")}
    return {
        **shared,
        **{name: statistics.fmean(result[name] for result in results) for name in numbers},
        "scores": {reading: _mean_scores([r["scores"][reading] for r in results]) for reading in results[0]["scores"]},
    }


def _mean_scores(scores: Sequence[Scores]) -> dict[str, float | None]:
    means: dict[str, float | None] = {name: statistics.fmean(one[name] for one in scores) for name in scores[0]}
    for name in filter(means.__contains__, SCORES):
        means[f"{name}_deviation"] = statistics.stdev(one[name] for one in scores) if len(scores) > 1 else None
    return means
