"""The metrics that judge fine-tuning, from scikit-learn, scipy and seqeval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from seqeval import metrics as spans
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
"""Each metric takes labels and predictions, (rows,) each, and returns a number of at most 1."""


def score(names: Sequence[str], labels: Sequence[float], logits: Numbers) -> dict[str, float]:
    """Compute metrics of a model's predictions: the likeliest class or, with one logit per row, that number.

    Args:
        names: names in :data:`METRICS`.
        labels: (rows,) class indices or numbers.
        logits: (rows, classes), or (rows, 1) for regression.
    """
    predictions = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return {name: METRICS[name](np.asarray(labels), predictions) for name in names}


Classes = Sequence[Sequence[Any]]
WORD_METRICS: dict[str, Callable[[Classes, Classes], float]] = {
    "accuracy": lambda labels, predictions: METRICS["accuracy"](_joined(labels), _joined(predictions)),
    # The mean of all classes' F1 scores.
    "macro_f1": lambda labels, predictions: float(
        metrics.f1_score(_joined(labels), _joined(predictions), average="macro", zero_division=0)
    ),
    # Of whole spans, as CoNLL's script counts them: a span is right if its beginning, its end and its class are.
    "span_f1": lambda labels, predictions: float(spans.f1_score(labels, predictions, zero_division=0)),
    "span_precision": lambda labels, predictions: float(spans.precision_score(labels, predictions, zero_division=0)),
    "span_recall": lambda labels, predictions: float(spans.recall_score(labels, predictions, zero_division=0)),
}
"""Each metric takes the names of the classes of each row's words and of those predicted, and returns at most 1."""


def _joined(rows: Classes) -> Numbers:
    return np.asarray([name for row in rows for name in row])


def score_words(
    names: Sequence[str], classes: Sequence[str], labels: Sequence[Sequence[int]], logits: Sequence[Numbers]
) -> dict[str, float]:
    """Compute metrics of a model's predictions for words: the likeliest class of each.

    Args:
        names: names in :data:`WORD_METRICS`.
        classes: the names of the classes.
        labels: the class of each word, by row.
        logits: (words, classes) of each row.
    """
    expected = [[classes[label] for label in row] for row in labels]
    predicted = [[classes[place] for place in row.argmax(1)] for row in logits]
    return {name: WORD_METRICS[name](expected, predicted) for name in names}
