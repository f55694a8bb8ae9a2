"""What fine-tuning is judged by, from scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from sklearn import metrics

Numbers = np.ndarray[Any, np.dtype[Any]]


def _correlation(function: Callable[..., Any]) -> Callable[[Numbers, Numbers], float]:
    def metric(labels: Numbers, predictions: Numbers) -> float:
        # A constant has no correlation; to a table it is worth as much as guessing.
        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        return float(function(labels, predictions).statistic)

    return metric


METRICS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": lambda labels, predictions: float(metrics.accuracy_score(labels, predictions)),
    # Of class 1, as in GLUE.
    "f1": lambda labels, predictions: float(metrics.f1_score(labels, predictions, zero_division=0)),
    "matthews": lambda labels, predictions: float(metrics.matthews_corrcoef(labels, predictions)),
    "pearson": _correlation(stats.pearsonr),
    "spearman": _correlation(stats.spearmanr),
}
"""From labels and predictions (rows,) to a number that is at most 1."""


def score(names: Sequence[str], labels: Sequence[float], logits: Numbers) -> dict[str, float]:
    """The metrics of these names: of the likeliest class, or with one logit a row, of that number.

    Args:
        names: of :data:`METRICS`.
        labels: (rows,) classes or numbers.
        logits: (rows, classes) or (rows, 1).
    """
    predictions = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return {name: METRICS[name](np.asarray(labels), predictions) for name in names}
