"""The ranking claims no more than the numbers carry."""

import random

from whereformer.experiments.compare.summary import SEED_NOISE, clearly_better, rank, verdict


def results(**losses):
    """Results of length 8 with one list of window losses per method and seed."""
    runs = {
        name: {
            str(seed): {
                "scores": {"8": {"loss": sum(w) / len(w), "accuracy": 0.5}, "16": {"cannot": "too long"}},
                "window_losses": w,
                "positional_parameters": 3,
            }
            for seed, w in enumerate(seeds)
        }
        for name, seeds in losses.items()
    }
    return {"settings": {"length": 8}, "runs": runs, "speed": {}, "text": {"unigram_entropy": 7.0}}


def windows(mean, noise=0.1, seed=0):
    generator = random.Random(seed)
    return [mean + generator.gauss(0, noise) for _ in range(100)]


def test_a_gap_beyond_all_noise_is_a_rank():
    found = results(a=[windows(4.0)], b=[windows(5.0, seed=1)], c=[windows(6.0, seed=2)])
    rows = rank(found)
    assert [(row.position, row.rank) for row in rows] == [("a", 1), ("b", 2), ("c", 3)]
    assert verdict(rows, found) == "a predicts this text best."


def test_one_seed_can_not_tell_a_gap_smaller_than_what_seeds_do():
    base = windows(4.0)
    close = [loss + SEED_NOISE / 2 for loss in base]
    found = results(a=[base], b=[close], c=[[loss + 1 for loss in base]])
    rows = rank(found)
    assert [(row.position, row.rank) for row in rows] == [("a", 1), ("b", 1), ("c", 3)]
    assert verdict(rows, found) == "a and b predict this text best; they can't be told apart."


def test_several_seeds_tell_a_small_gap_that_all_of_them_show():
    bases = [windows(4.0, seed=seed) for seed in range(3)]
    closer = [[loss + SEED_NOISE * 0.7 for loss in base] for base in bases]
    rows = rank(results(a=bases, b=closer))
    assert [row.rank for row in rows] == [1, 2]


def test_seeds_that_disagree_tell_nothing():
    found = results(a=[windows(4.0), windows(4.5, seed=1)], b=[windows(4.5, seed=2), windows(4.0, seed=3)])
    rows = rank(found)
    assert [row.rank for row in rows] == [1, 1]
    assert verdict(rows, found).startswith("The methods can't be told apart")


def test_noise_over_the_text_hides_a_gap():
    runs = results(a=[windows(4.0, noise=3)], b=[windows(4.1, noise=3, seed=9)])["runs"]
    assert not clearly_better(runs["a"], runs["b"])
    assert not clearly_better(runs["b"], runs["a"])


def test_runs_without_a_common_seed_are_not_compared():
    runs = results(a=[windows(4.0)], b=[windows(9.0)])["runs"]
    runs["b"] = {"7": runs["b"]["0"]}
    assert not clearly_better(runs["a"], runs["b"])


def test_cells_hold_medians_ranges_and_reasons():
    row = rank(results(a=[[1.0], [3.0], [2.0]]))[0]
    assert (row.loss[8].median, row.loss[8].low, row.loss[8].high) == (2.0, 1.0, 3.0)
    assert row.loss[16].median is None
    assert row.loss[16].why_not == "too long"
    assert row.seeds == 3
    assert row.relative_speed.median is None


def test_the_rank_never_falls_as_the_loss_rises():
    """b is not clearly worse than a, and c not than b by more; yet a is clearly better than c alone."""
    base = windows(4.0)
    step = SEED_NOISE * 0.7
    rows = rank(results(c=[[loss + 2 * step for loss in base]], a=[base], b=[[loss + step for loss in base]]))
    assert [(row.position, row.rank) for row in rows] == [("a", 1), ("b", 1), ("c", 2)]


def test_nobody_wins_before_anyone_beats_guessing():
    found = results(a=[windows(7.5)], b=[windows(9.0, seed=1)])
    assert verdict(rank(found), found).startswith("No method predicts better than guessing by frequency")
