"""The ranking claims no more than the numbers carry."""

import random

from whereformer.lab.score import Cannot
from whereformer.studies.compare.ranking import SEED_NOISE, clearly_better, rank, sentences
from whereformer.studies.compare.results import (
    CompareResults,
    CompareText,
    Run,
    Score,
)
from whereformer.studies.compare.settings import CompareSettings

SETTINGS = CompareSettings(
    blocks="1",
    decoder_layers="0",
    length=8,
    steps=1,
    batch_size=1,
    hidden_size=16,
    num_heads=2,
    vocab_size=64,
    mask_rate=0.4,
    learning_rate=1e-3,
    rate_factors=(1.0,),
    text="0",
    device="cpu",
)
TEXT = CompareText("story", 1, 1, 1, 1, 64, 7.0, data=[], column=None)


def run_of(losses):
    scores = {8: Score(sum(losses) / len(losses), 0.5), 16: Cannot("too long")}
    return Run(1e-3, 1.0, [], scores, losses, 3, 100, curves=None, attention=[])


def results(**losses):
    """Results of length 8 with one list of window losses per method and seed."""
    runs = {name: dict(enumerate(map(run_of, seeds))) for name, seeds in losses.items()}
    return CompareResults(SETTINGS, runs, TEXT, 100)


def windows(mean, noise=0.1, seed=0):
    generator = random.Random(seed)
    return [mean + generator.gauss(0, noise) for _ in range(100)]


def test_a_gap_beyond_all_noise_is_a_rank():
    found = results(a=[windows(4.0)], b=[windows(5.0, seed=1)], c=[windows(6.0, seed=2)])
    ranking = rank(found)
    assert [(row.position, row.rank) for row in ranking.rows] == [("a", 1), ("b", 2), ("c", 3)]
    assert ranking.verdict == "a predicts this text best."


def test_one_seed_can_not_tell_a_gap_smaller_than_what_seeds_do():
    base = windows(4.0)
    close = [loss + SEED_NOISE / 2 for loss in base]
    found = results(a=[base], b=[close], c=[[loss + 1 for loss in base]])
    ranking = rank(found)
    assert [(row.position, row.rank) for row in ranking.rows] == [("a", 1), ("b", 1), ("c", 3)]
    assert ranking.verdict == "a and b predict this text best; they can't be told apart."


def test_several_seeds_tell_a_small_gap_that_all_of_them_show():
    bases = [windows(4.0, seed=seed) for seed in range(3)]
    closer = [[loss + SEED_NOISE * 0.7 for loss in base] for base in bases]
    rows = rank(results(a=bases, b=closer)).rows
    assert [row.rank for row in rows] == [1, 2]


def test_seeds_that_disagree_tell_nothing():
    found = results(a=[windows(4.0), windows(4.5, seed=1)], b=[windows(4.5, seed=2), windows(4.0, seed=3)])
    ranking = rank(found)
    assert [row.rank for row in ranking.rows] == [1, 1]
    assert ranking.verdict.startswith("The methods can't be told apart")


def test_noise_over_the_text_hides_a_gap():
    runs = results(a=[windows(4.0, noise=3)], b=[windows(4.1, noise=3, seed=9)]).runs
    assert not clearly_better(runs["a"], runs["b"])
    assert not clearly_better(runs["b"], runs["a"])


def test_runs_without_a_common_seed_are_not_compared():
    runs = results(a=[windows(4.0)], b=[windows(9.0)]).runs
    runs["b"] = {7: runs["b"][0]}
    assert not clearly_better(runs["a"], runs["b"])


def test_cells_hold_medians_ranges_and_reasons():
    row = rank(results(a=[[1.0], [3.0], [2.0]])).rows[0]
    assert (row.loss[8].median, row.loss[8].low, row.loss[8].high) == (2.0, 1.0, 3.0)
    assert row.loss[16].median is None
    assert row.loss[16].why_not == "too long"


def test_the_rank_never_falls_as_the_loss_rises():
    """b is not clearly worse than a, and c not than b by more; yet a is clearly better than c alone."""
    base = windows(4.0)
    step = SEED_NOISE * 0.7
    rows = rank(results(c=[[loss + 2 * step for loss in base]], a=[base], b=[[loss + step for loss in base]])).rows
    assert [(row.position, row.rank) for row in rows] == [("a", 1), ("b", 1), ("c", 2)]


def test_nobody_wins_before_anyone_beats_guessing():
    found = results(a=[windows(7.5)], b=[windows(9.0, seed=1)])
    assert rank(found).verdict.startswith("No method predicts better than guessing by frequency")


def test_a_method_on_the_plateau_of_none_has_no_rank():
    found = results(none=[windows(5.0)], learned=[windows(5.05, seed=1)], rope=[windows(3.0, seed=2)])
    ranking = rank(found)
    assert [(row.position, row.rank) for row in ranking.rows] == [("rope", 1), ("none", 2), ("learned", None)]
    assert ranking.waiting == ["learned"]
    assert ranking.rows[-1].outlook is None
    assert "learned is not yet learning" in " ".join(sentences(found))
    assert "--steps 4" in " ".join(sentences(found))


def test_if_nothing_left_the_plateau_the_verdict_says_so():
    found = results(none=[windows(5.0)], learned=[windows(5.05, seed=1)])
    assert rank(found).verdict == "No method predicts clearly better than none yet; train longer."
    # Without the baseline, nothing is known of the plateau.
    assert rank(results(learned=[windows(5.0)], rope=[windows(5.05, seed=1)])).waiting == []
