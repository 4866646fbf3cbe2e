"""Accuracy, macro F1 and Matthews correlation of class predictions, by scikit-learn.

metric = evaluate.load("examples/metrics/classification_scores")
metric.compute(predictions=[0, 1, 1], references=[0, 1, 0])["f1_macro"]
"""

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_DESCRIPTION = "Accuracy and macro F1 (0 to 1) and Matthews correlation (-1 to 1; 0 for a guess); higher is better."
_INPUTS = """
Args:
    predictions: one class number an example.
    references: its true class number.
Returns:
    "accuracy", "f1_macro" (mean over the classes that are true or predicted; 0 for a class never hit), "matthews".
"""


class ClassificationScores(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict:
        if not predictions:
            raise ValueError("predictions: an empty list. Allowed: at least one class number.")
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0)),
            "matthews": float(matthews_corrcoef(references, predictions)),
        }
