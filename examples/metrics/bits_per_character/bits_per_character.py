"""Bits per character of text under a language model: comparable between tokenizers, which perplexity is not.

metric = evaluate.load("examples/metrics/bits_per_character")
metric.compute(predictions=[210.5, 98.0], references=["first text", "second"])["bits_per_character"]
"""

import math

import datasets
import evaluate

_DESCRIPTION = "Negative log2-likelihood per character and per UTF-8 byte; lower is better."
_INPUTS = """
Args:
    predictions: for each text, its negative log-likelihood in nats, summed over all its predicted tokens
        (mean loss times the number of labels that are not -100).
    references: the texts those tokens spell.
Returns:
    "bits_per_character", "bits_per_byte": total bits by total characters (code points) and UTF-8 bytes;
    "num_characters".
"""


class BitsPerCharacter(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[float], references: list[str]) -> dict:
        if not predictions:
            raise ValueError("predictions: an empty list. Allowed: at least one text.")
        num_characters = sum(map(len, references))
        if num_characters == 0:
            raise ValueError("references: no text holds a character. Allowed: at least one character in all of them.")
        bits = sum(predictions) / math.log(2)
        return {
            "bits_per_character": bits / num_characters,
            "bits_per_byte": bits / sum(len(text.encode()) for text in references),
            "num_characters": num_characters,
        }
