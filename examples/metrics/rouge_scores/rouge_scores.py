"""ROUGE-1, ROUGE-2 and ROUGE-L of summaries, by rouge-score.

metric = evaluate.load("examples/metrics/rouge_scores")
metric.compute(predictions=["sort an array"], references=["sort or search an array"])["rougeL"]
"""

import datasets
import evaluate
from rouge_score import rouge_scorer

_DESCRIPTION = "Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (0 to 1, higher is better), without resampling."
_INPUTS = """
Args:
    predictions: one summary a document.
    references: one reference a document.
    use_stemmer: compare the stems of English words; True unless told.
Returns:
    "rouge1", "rouge2", "rougeL": means over the documents, 0 to 1.
"""
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


class RougeScores(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[str], references: list[str], use_stemmer: bool = True) -> dict:
        if not predictions:
            raise ValueError("predictions: an empty list. Allowed: at least one summary.")
        scorer = rouge_scorer.RougeScorer(ROUGE_TYPES, use_stemmer=use_stemmer)
        pairs = zip(references, predictions, strict=True)
        scores = [scorer.score(reference, prediction) for reference, prediction in pairs]
        return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE_TYPES}
