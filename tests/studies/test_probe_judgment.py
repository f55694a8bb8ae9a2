"""What a probe's numbers say, and what chance keeps it from saying, on made-up results."""

import pytest

from whereformer.studies.probe.judgment import Level, about_seeds, judge, tables, verdict
from whereformer.studies.probe.results import Cannot, Failed, ProbeResults, Run, Score
from whereformer.studies.probe.settings import ProbeSettings

GUESS = 0.2
CANNOT = Cannot("no positions there")


def score(accuracy, error=0.01):
    return Score(accuracy, accuracy - GUESS, error)


def run(trained, longer=GUESS, error=0.01):
    """A run with an accuracy at 16 symbols, and one or a reason at 64."""
    return Run(1.0, {16: score(trained, error), 64: longer if isinstance(longer, Cannot) else score(longer)})


def results_of(**tasks):
    """Results of tasks, each a dictionary of methods with a list of runs, one per seed."""
    return ProbeResults(
        settings=ProbeSettings(16, 10),
        runs={task: {name: dict(enumerate(runs)) for name, runs in methods.items()} for task, methods in tasks.items()},
        guesses={task: {16: GUESS, 64: GUESS} for task in tasks},
    )


def says(**tasks):
    return verdict(tables(results_of(**tasks)))


@pytest.mark.parametrize(
    ("accuracies", "level"),
    [
        ([0.95], Level.SOLVED),
        ([1.0, 0.96], Level.SOLVED),
        ([0.94], Level.BETTER),
        ([1.0, 0.3], Level.BETTER),
        ([0.25], Level.BETTER),
        ([0.239], Level.GUESSING),
        ([0.1], Level.GUESSING),
        ([0.2, 0.23], Level.GUESSING),
        ([1.0, 0.2], Level.MIXED),
    ],
)
def test_levels(accuracies, level):
    found = judge({seed: run(accuracy) for seed, accuracy in enumerate(accuracies)}, 16)
    assert found.level is level
    assert (found.accuracy.low, found.accuracy.high) == (min(accuracies), max(accuracies))


def test_cells_without_a_number():
    assert judge({}, 16).level is Level.MISSING
    failed = judge({0: run(1.0), 3: Failed("the loss is not a number")}, 16)
    assert failed.level is Level.FAILED
    assert failed.accuracy.why_not == "with seed 3, the loss is not a number"
    cannot = judge({0: run(1.0, CANNOT)}, 64)
    assert (cannot.level, cannot.accuracy.why_not) == (Level.CANNOT, "no positions there")


def test_tables_are_by_length_and_keep_what_is_missing():
    found = tables(results_of(copy={"none": [run(0.2)]}, sort={"none": [run(0.2)], "rope": [run(1.0, 0.5)]}))
    assert [table.length for table in found] == [16, 64]
    assert found[0].rows["rope"]["copy"].level is Level.MISSING
    assert found[0].solved("rope") == ["sort"]
    assert found[1].solved("rope") == []


def test_who_solves_everything():
    both = {"rope": [run(1.0)], "tisa": [run(0.97)], "none": [run(0.2)]}
    assert says(copy=both, sort=both) == [
        "rope and tisa solve both tasks at 16 symbols.",
        "No method solves a task at 64 symbols.",
    ]


def test_who_solves_the_most():
    assert says(copy={"rope": [run(1.0, CANNOT)], "none": [run(0.2, 1.0)]}, sort={"rope": [run(0.3)]}) == [
        "rope solves the most tasks at 16 symbols, 1 of 2.",
        "none solves the most tasks at 64 symbols, 1 of 2.",
    ]


def test_what_luck_with_the_rows_may_explain_is_no_difference():
    assert says(copy={"rope": [run(0.951)], "tisa": [run(0.949)], "none": [run(0.5)]})[0] == (
        "rope solves the task at 16 symbols; tisa may solve as many."
    )
    assert says(copy={"rope": [run(0.951)], "tisa": [run(0.90)]})[0] == "rope solves the task at 16 symbols."


def test_nothing_learned_and_nothing_tried():
    assert says(copy={"rope": [run(0.3)]})[0] == "No method solves a task at 16 symbols; train longer."
    assert verdict(tables(results_of())) == ["Nothing was tried."]


def test_equal_methods_are_not_the_best():
    copy, sort = {"rope": [run(1.0)], "tisa": [run(1.0)]}, {"rope": [run(0.3)], "tisa": [run(0.3)]}
    assert says(copy=copy, sort=sort)[0] == "rope and tisa solve 1 of 2 tasks at 16 symbols."


def test_one_seed_says_less_than_several():
    assert "one seed" in about_seeds(results_of(copy={"rope": [run(1.0)]}))
    assert "each of 2 seeds" in about_seeds(results_of(copy={"rope": [run(1.0), run(1.0)]}))


def test_methods_with_fewer_seeds_are_not_said_to_have_all():
    """A later command may add a method with fewer seeds."""
    sentence = about_seeds(results_of(copy={"rope": [run(1.0), run(1.0)], "tisa": [run(1.0)]}))
    assert "each seed that was tried, up to 2" in sentence
