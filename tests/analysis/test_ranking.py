"""The ranking claims no more than the numbers carry."""

import random
import statistics
from types import SimpleNamespace

import pytest

from whereformer.analysis.ranking import LASTING, SEED_NOISE, NextComparison, advise, clearly_better, rank, sentences


def methods(**losses):
    """Models with one list of window losses per method and seed."""
    return {
        name: {seed: SimpleNamespace(windows=run, loss=statistics.fmean(run)) for seed, run in enumerate(seeds)}
        for name, seeds in losses.items()
    }


def windows(mean, noise=0.1, seed=0):
    generator = random.Random(seed)
    return [mean + generator.gauss(0, noise) for _ in range(100)]


def ranked(guessing=7.0, **losses):
    """The ranks of methods, best first, and the sentences."""
    ranking = rank(methods(**losses), "none", 1)
    return [(row.position, row.rank) for row in ranking.rows], sentences(ranking, "none", guessing, 1)


def test_a_gap_beyond_all_noise_is_a_rank():
    rows, messages = ranked(a=[windows(4.0)], b=[windows(6.0, seed=1)], c=[windows(8.0, seed=2)])
    assert rows == [("a", 1), ("b", 2), ("c", 3)]
    assert messages == ["Take a: it predicts this text best."]


def test_one_seed_can_not_tell_a_gap_smaller_than_what_seeds_do():
    base = windows(4.0)
    rows, messages = ranked(a=[base], b=[[loss + SEED_NOISE / 2 for loss in base]], c=[[loss + 2 for loss in base]])
    assert rows == [("a", 1), ("b", 1), ("c", 3)]
    assert messages == ["Take a or b: this run cannot tell them apart."]


def test_several_seeds_tell_a_small_gap_that_all_of_them_show():
    bases = [windows(4.0, seed=seed) for seed in range(3)]
    assert ranked(a=bases, b=[[loss + SEED_NOISE * 0.7 for loss in base] for base in bases])[0] == [("a", 1), ("b", 2)]


def test_seeds_that_disagree_tell_nothing():
    rows, messages = ranked(a=[windows(4.0), windows(4.5, seed=1)], b=[windows(4.5, seed=2), windows(4.0, seed=3)])
    assert [rank for _, rank in rows] == [1, 1]
    assert messages == ["The methods are too close to rank; train longer or use more seeds."]


def test_noise_over_the_text_hides_a_gap():
    runs = methods(a=[windows(4.0, noise=3)], b=[windows(4.1, noise=3, seed=9)])
    assert not clearly_better(runs["a"], runs["b"])
    assert not clearly_better(runs["b"], runs["a"])


def test_models_without_a_common_seed_are_not_compared():
    runs = methods(a=[windows(4.0)], b=[windows(9.0)])
    assert not clearly_better(runs["a"], {7: runs["b"][0]})


def test_the_rank_never_falls_as_the_loss_rises():
    """b is not clearly worse than a, and c not than b by more; yet a is clearly better than c alone."""
    base, step = windows(4.0), SEED_NOISE * 0.7
    rows, _ = ranked(c=[[loss + 2 * step for loss in base]], a=[base], b=[[loss + step for loss in base]])
    assert rows == [("a", 1), ("b", 1), ("c", 2)]


def test_nobody_wins_before_anyone_beats_guessing():
    messages = ranked(a=[windows(7.5)], b=[windows(9.0, seed=1)])[1]
    assert messages == ["No method predicts better than guessing by frequency yet; train longer."]
    assert ranked(a=[windows(6.0)])[1] == ["Only a was tried; one method is no comparison."]


def test_a_method_on_the_plateau_of_none_has_no_rank():
    losses = {"none": [windows(5.0)], "learned": [windows(5.05, seed=1)], "rope": [windows(3.0, seed=2)]}
    rows, messages = ranked(**losses)
    assert rows == [("rope", 1), ("none", 2), ("learned", None)]
    assert messages[0] == "Take rope for now: it leads after 1 steps. learned is 2.07 nats behind and may catch up."
    assert messages[1].startswith("learned is not learning yet: its loss is not clearly lower than that of none.")
    assert messages[1].endswith(" Train longer (--steps 4).")
    # Causal models learn order without positions, too.
    assert all(row.rank for row in rank(methods(**losses), None, 1).rows)


def test_if_nothing_left_the_plateau_the_verdict_says_so():
    messages = ranked(none=[windows(5.0)], learned=[windows(5.05, seed=1)])[1]
    assert messages[0] == "No method predicts clearly better than none yet; train longer."
    assert messages[1].endswith("on this text, or in so few steps, word order has not helped yet.")
    # Without the baseline, nothing is known of the plateau.
    assert not rank(methods(learned=[windows(5.0)], rope=[windows(5.05, seed=1)]), "none", 1).not_learning


@pytest.mark.parametrize("steps", [400, 1800])
def test_a_lead_that_may_not_last_is_no_verdict(steps):
    lasting = LASTING[1800 if steps == 1800 else 0]
    near, far = 0.9 * SEED_NOISE / lasting, 1.1 * SEED_NOISE / lasting
    base = windows(4.0)
    for gap, unsettled in ((0.9 * SEED_NOISE, []), (near, [("a", "b")]), (far, [])):
        losses = {"a": [base], "b": [[loss + gap for loss in base]], "none": [[loss + 3 for loss in base]]}
        ranking = rank(methods(**losses), "none", steps)
        assert ranking.unsettled == unsettled, gap
        if unsettled:
            first, second = sentences(ranking, "none", 7.0, steps)
            lead = f"Take a for now: it leads after {steps:,} steps."
            assert first == f"{lead} b is {gap:.2f} nats behind and may catch up."
            assert second == "Not settled, because 4 times the steps may close these gaps: a ahead of b."


def test_what_learns_no_more_does_not_catch_up():
    base = windows(4.0)
    losses = {"a": [base], "none": [[loss + 0.2 for loss in base]]}
    assert rank(methods(**losses), "none", 400).unsettled == []
    # Causal models learn order without positions, too.
    assert rank(methods(**losses), None, 400).unsettled == [("a", "none")]


def level(*names, gap=0.0):
    """Methods whose losses are equal, up to less than seeds change, behind ``gap``."""
    return {name: [[loss + gap + 0.001 * number for loss in windows(4.0)]] for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("losses", "steps", "first", "following"),
    [
        # Five level methods, and one that is behind.
        (
            {**level("shaw", "tisa", "rope", "t5", "alibi"), **level("learned", gap=0.2), **level("none", gap=3)},
            400,
            "Take shaw, tisa, rope, t5 or alibi: this run cannot tell them apart. learned is 0.20 nats behind and may "
            "catch up.",
            ("To see who stays ahead", ["shaw", "tisa", "rope", "t5", "alibi", "learned", "none"], 1600, 1),
        ),
        # Rivals beyond four are counted.
        (
            {**level("a"), **level(*"bcdefg", gap=0.2), **level("none", gap=3)},
            400,
            "Take a for now: it leads after 400 steps. b, c, d, e and 2 more are 0.20 nats behind and may catch up.",
            ("To see who stays ahead", [*"abcdefg", "none"], 1600, 1),
        ),
        # Nothing may catch up: seeds can still separate what is level.
        (
            {**level("a", "b"), **level("none", gap=3)},
            400,
            "Take a or b: this run cannot tell them apart.",
            ("To tell them apart", ["a", "b"], 400, 3),
        ),
        ({**level("a"), **level("b", gap=2), **level("none", gap=4)}, 400, "Take a: it predicts this text best.", None),
        # One method is no comparison.
        ({**level("rope"), **level("none", gap=3)}, 400, "rope beats no positions; one method is no comparison.", None),
        (level("rope"), 400, "Only rope was tried; one method is no comparison.", None),
        (
            {**level("none"), **level("rope", gap=0.01)},
            400,
            "No method predicts clearly better than none yet; train longer.",
            ("To let the methods learn", ["none", "rope"], 1600, 1),
        ),
        (
            level("a", "b", gap=3.5),
            400,
            "No method predicts better than guessing by frequency yet; train longer.",
            ("To let the methods learn", ["a", "b"], 1600, 1),
        ),
    ],
)
def test_the_verdict_says_what_to_take_and_what_to_run_next(losses, steps, first, following):
    ranking = rank(methods(**losses), "none", steps)
    assert sentences(ranking, "none", 7.0, steps)[0] == first
    advice = advise(ranking, "none", 7.0, steps, 1)
    assert advice == (None if following is None else NextComparison(*following))


def test_more_seeds_are_advised_to_those_who_had_several():
    losses = {name: seeds * 3 for name, seeds in level("a", "b").items()}
    assert advise(rank(methods(**losses), "none", 400), "none", 7.0, 400, 3).seeds == 6
