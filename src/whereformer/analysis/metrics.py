"""The metrics that evaluate fine-tuning, from scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from sklearn import metrics

Numbers = np.ndarray[Any, np.dtype[Any]]


def _correlation(function: Callable[..., Any]) -> Callable[[Numbers, Numbers], float]:
    def metric(labels: Numbers, predictions: Numbers) -> float:
        # Constant values have no correlation; in a table they count as guessing.
        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        return float(function(labels, predictions).statistic)

    return metric


METRICS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": lambda labels, predictions: float(metrics.accuracy_score(labels, predictions)),
    # The F1 score of class 1, as in GLUE.
    "f1": lambda labels, predictions: float(metrics.f1_score(labels, predictions, zero_division=0)),
    "matthews": lambda labels, predictions: float(metrics.matthews_corrcoef(labels, predictions)),
    "pearson": _correlation(stats.pearsonr),
    "spearman": _correlation(stats.spearmanr),
}
"""Each metric accepts labels and predictions, each of shape (rows,), and returns a number of at most 1."""


def score(names: Sequence[str], labels: Sequence[float], logits: Numbers) -> dict[str, float]:
    """Compute metrics of a model's predictions: the likeliest class or, with one logit per row, the logit.

    Args:
        names: names in :data:`METRICS`.
        labels: (rows,) class indices or numbers.
        logits: (rows, classes), or (rows, 1) for regression.
    """
    predictions = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return {name: METRICS[name](np.asarray(labels), predictions) for name in names}
