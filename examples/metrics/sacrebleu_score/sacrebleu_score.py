"""BLEU and chrF of translations, by sacrebleu.

metric = evaluate.load("examples/metrics/sacrebleu_score")
metric.compute(predictions=["Guten Tag!"], references=[["Guten Morgen!"]])["chrf"]
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

_DESCRIPTION = "Corpus BLEU and chrF (0 to 100, higher is better) with the signatures that say how they were computed."
_INPUTS = """
Args:
    predictions: one translation a sentence, detokenised.
    references: for each sentence, one reference or a list of them; the same number for every sentence.
Returns:
    "bleu", "chrf": 0 to 100; "bleu_signature", "chrf_signature": version and settings, to be reported with the score;
    "num_sentences".
"""


class SacrebleuScore(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        several = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        one = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=[several, one]
        )

    def add_batch(self, *, predictions: Sequence[str], references: Sequence, **others: Any) -> None:
        """Add translations; `compute` comes here, too. Of none, `evaluate` could not tell the form of `references`."""
        if not len(predictions):
            raise ValueError("predictions: an empty list. Allowed: at least one translation.")
        super().add_batch(predictions=predictions, references=references, **others)

    def _compute(self, predictions: list[str], references: list[list[str]] | list[str]) -> dict:
        lists = [[reference] if isinstance(reference, str) else reference for reference in references]
        numbers = sorted({len(several) for several in lists})
        if len(numbers) != 1 or numbers[0] == 0:
            raise ValueError(
                f"references: {numbers} of them by sentence. Allowed: the same number, at least 1, for every sentence."
            )
        streams = [list(stream) for stream in zip(*lists, strict=True)]
        bleu, chrf = BLEU(), CHRF()
        return {
            "bleu": bleu.corpus_score(predictions, streams).score,
            "chrf": chrf.corpus_score(predictions, streams).score,
            "bleu_signature": str(bleu.get_signature()),
            "chrf_signature": str(chrf.get_signature()),
            "num_sentences": len(predictions),
        }
