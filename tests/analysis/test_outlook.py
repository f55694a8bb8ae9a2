"""Predicted losses: curves with known parameters, and which ranks they leave open."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.test_ranking import methods
from whereformer.analysis import ranking
from whereformer.analysis.outlook import SHARES, Estimate, Outlook, fitted, outlook
from whereformer.analysis.ranking import rank


def losses(floor, fall, power, steps=2000, noise=0.1, seed=0):
    """The losses of a training that follows a power law, with noise between steps."""
    generator = random.Random(seed)
    return [floor + fall * ((step + 1) / steps) ** -power + generator.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize(("floor", "fall", "power"), [(2, 1.5, 0.5), (0, 4, 0.1), (1, 2, 0.3), (3, 0.5, 1)])
def test_known_curves_are_continued_within_the_error(floor, fall, power):
    for seed in range(3):
        found = fitted(losses(floor, fall, power, seed=seed))
        for times, estimate in ((2, found.double), (4, found.ahead)):
            truth = fall * (1 - times**-power)
            assert abs(estimate.value - truth) < 2.5 * estimate.error
            assert estimate.error < 0.25


def test_without_noise_the_fall_is_found_closely():
    found = fitted(losses(0, 4, 0.1, noise=0, steps=4000))
    assert found.double.value == pytest.approx(4 * (1 - 2**-0.1), abs=0.02)
    assert found.curve == pytest.approx([4 * share**-0.1 for share in SHARES], abs=0.02)


def test_a_loss_that_does_not_fall_is_not_expected_to():
    found = fitted(losses(4, 0, 0))
    assert found.double.value < 0.03
    assert found.ahead.value < 0.06


def test_more_noise_makes_less_sure():
    sure, unsure = (fitted(losses(2, 1.5, 0.5, noise=noise)) for noise in (0.05, 0.5))
    assert sure.ahead.error < unsure.ahead.error


def test_seeds_are_averaged():
    runs = [losses(2, 1.5, 0.5, seed=seed) for seed in range(3)]
    each = [fitted(run).ahead for run in runs]
    both = outlook(runs).ahead
    assert both.value == pytest.approx(sum(one.value for one in each) / 3)
    assert both.error >= min(one.error for one in each)


def test_few_steps_say_nothing():
    assert fitted(losses(2, 1, 0.5, steps=95)) is None
    assert fitted(losses(2, 1, 0.5, steps=100)) is not None
    assert outlook([]) is None
    assert outlook([losses(2, 1, 0.5), [4.0] * 10]) is None


@given(st.lists(st.floats(0, 1e100), min_size=100, max_size=130))
def test_any_losses_give_numbers_or_nothing(values):
    found = fitted(values)
    if found is not None:
        numbers = (*found.curve, found.double.value, found.double.error, found.ahead.value, found.ahead.error)
        assert all(map(math.isfinite, numbers))


@pytest.mark.parametrize(
    ("falls", "unsettled", "uncertain"),
    [
        ((0.1, 0.1), [], []),  # the gap stays
        ((0.1, 0.9), [("a", "b")], []),  # the gap is closed within the error
        ((0.1, 1.4), [("a", "b")], ["b"]),  # the order changes within twice the error
        ((0.1, 2.0), [("a", "b")], []),  # the order changes by more
        ((2.0, 0.1), [], []),  # the gap grows
    ],
)
def test_pairs_whose_order_may_change_are_named(monkeypatch, falls, unsettled, uncertain):
    by_method = iter(falls)
    monkeypatch.setattr(ranking, "outlook", lambda _: Outlook(Estimate(0, 0), Estimate(next(by_method), 0.15), []))
    ranked = rank(methods(a=[[4.0] * 5], b=[[5.0] * 5]), "none")
    assert ranked.unsettled == unsettled
    assert ranked.uncertain == uncertain


def test_methods_that_can_not_be_told_apart_now_have_no_order_to_change(monkeypatch):
    monkeypatch.setattr(ranking, "outlook", lambda _: Outlook(Estimate(0, 0), Estimate(0.0, 1.0), []))
    ranked = rank(methods(a=[[4.0] * 5], b=[[4.01] * 5]), "none")
    assert (ranked.unsettled, ranked.uncertain) == ([], [])
