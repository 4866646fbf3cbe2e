"""Exact match and F1 of answer spans, as SQuAD 1.1 defines them, but for answers of nothing but articles and signs.

Rajpurkar et al. 2016 (https://arxiv.org/abs/1606.05250), section 6.1: words are compared in lower case, without
punctuation and articles; the best of several true answers counts. Of "The" or "?!" that leaves nothing, and the usual
implementations take any two such answers for an exact match, some with an F1 of 0. Here they match, in both scores,
only if they are the same text, spaces around it aside; so do two empty ones, "no answer" as in SQuAD 2.0.

metric = evaluate.load("examples/metrics/squad_scores")
metric.compute(predictions=["the Fox"], references=[["fox", "a red fox"]])["exact_match"]
"""

import re
import string
from collections import Counter
from collections.abc import Iterable

import datasets
import evaluate

_DESCRIPTION = "Exact match and token F1 (0 to 100, higher is better) against the best of several true answers."
_INPUTS = """
Args:
    predictions: one answer a question, as text.
    references: for each question, the list of its true answers (`row["answers"]["text"]`), at least one.
Returns:
    "exact_match", "f1": means over the questions, 0 to 100.
"""


class SquadScores(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict:
        if not predictions:
            raise ValueError("predictions: an empty list. Allowed: at least one answer.")
        without = [number for number, answers in enumerate(references) if not answers]
        if without:
            raise ValueError(f"references: question {without[0]} has no true answer. Allowed: at least one; drop it.")
        pairs = list(zip(predictions, references, strict=True))
        return {
            "exact_match": 100 * _mean(max(exact_match(said, true) for true in answers) for said, answers in pairs),
            "f1": 100 * _mean(max(token_f1(said, true) for true in answers) for said, answers in pairs),
        }


def words(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles."""
    letters = "".join(character for character in answer.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def exact_match(prediction: str, truth: str) -> float:
    """Return 1 if the answers have the same words or, having none, the same text; else 0."""
    said, true = words(prediction), words(truth)
    if not said and not true:
        return float(prediction.strip() == truth.strip())
    return float(said == true)


def token_f1(prediction: str, truth: str) -> float:
    """Return the harmonic mean of the shares of words that each answer has in common with the other.

    Where an answer has no words: as `exact_match`.
    """
    said, true = words(prediction), words(truth)
    if not said or not true:
        return exact_match(prediction, truth)
    return 2 * sum((Counter(said) & Counter(true)).values()) / (len(said) + len(true))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
