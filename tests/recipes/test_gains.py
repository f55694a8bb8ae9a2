"""The table's arithmetic, on numbers of the TISA paper."""

import pytest

from whereformer.analysis.verdicts import Gain


def test_gains_as_in_the_paper():
    # Table 3, with position embeddings: MNLI 83.8, and 84.1, 84.4, 84.8 with 1, 3 and 5 kernels.
    gain = Gain([83.8], [[84.1], [84.4], [84.8]])
    assert gain.points == pytest.approx(1.0)
    assert gain.error_reduction == pytest.approx(5.9, abs=0.3)  # the paper's is of scores that are not rounded
    worse = Gain([50.0], [[45.0], [40.0]])
    assert (worse.points, worse.error_reduction) == (-5.0, -10.0)
    assert Gain([100.0], [[90.0]]).error_reduction is None


def test_gains_are_of_medians():
    gain = Gain([60, 70, 50], [[60, 50, 55], [60, 62, 70]])
    assert gain.points == pytest.approx(2)
    assert gain.error_reduction == pytest.approx(5)


def test_a_gain_is_clear_if_every_seed_is_better():
    def clear(baseline, scores):
        return Gain(baseline, [scores]).is_clear

    assert clear([50, 60], [61, 70])
    assert not clear([50, 60], [60, 70])
    assert not clear([50], [70])  # one seed says nothing of its spread
    assert not clear([50, 60], [70, 55])
    assert clear([0, 0], [10, 10])  # seeds may agree
    assert not clear([50, 60], [30, 40])
