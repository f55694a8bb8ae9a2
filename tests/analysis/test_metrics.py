"""Scores against numbers by hand."""

import numpy as np
import pytest

from whereformer.analysis import metrics

LABELS = [1, 1, 1, 0, 0, 0, 0, 1]
PREDICTED = [1, 1, 0, 0, 0, 1, 0, 0]


def logits_of(classes, count=2):
    return np.eye(count)[classes]


def test_classes_by_hand():
    # 2 true and 1 false positives, 3 true and 2 false negatives.
    scores = metrics.score(("accuracy", "f1", "matthews"), LABELS, logits_of(PREDICTED))
    assert scores["accuracy"] == pytest.approx(5 / 8)
    assert scores["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 2))
    assert scores["matthews"] == pytest.approx((2 * 3 - 1 * 2) / (3 * 4 * 4 * 5) ** 0.5)


def test_three_classes():
    assert metrics.score(("accuracy",), [0, 1, 2, 2], logits_of([0, 2, 2, 2], 3)) == {"accuracy": 0.75}


def test_correlations_by_hand():
    labels, predicted = [0.0, 1.0, 2.0, 5.0], np.array([[0.1], [0.3], [0.2], [0.4]])
    scores = metrics.score(("pearson", "spearman"), labels, predicted)
    deviations = np.array(labels) - 2, predicted[:, 0] - 0.25
    norms = [np.sqrt((x * x).sum()) for x in deviations]
    assert scores["pearson"] == pytest.approx((deviations[0] * deviations[1]).sum() / (norms[0] * norms[1]))
    # Ranks 1 2 3 4 and 1 3 2 4: 1 - 6 * 2 / (4 * 15)
    assert scores["spearman"] == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["f1", "matthews", "pearson", "spearman"])
def test_a_constant_is_worth_nothing(name):
    logits = np.zeros((4, 1)) if name in ("pearson", "spearman") else logits_of([0, 0, 0, 0])
    assert metrics.score((name,), [0, 1, 0, 1], logits) == {name: 0.0}
