"""What a comparison chooses by itself: steps for a budget, learning rates, and methods to go on with."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.failing import fails
from tests.studies.test_compare_ranking import SETTINGS
from tests.studies.trainings import TINY_ENCODER, without_time
from whereformer.cli.main import main
from whereformer.errors import InputError
from whereformer.lab import fit
from whereformer.lab.fit import DivergedError
from whereformer.lab.jobs import threads
from whereformer.studies.compare import budget, search
from whereformer.studies.compare import run as compare
from whereformer.studies.compare.budget import LEAST_STEPS, plan
from whereformer.studies.compare.results import Trial
from whereformer.studies.compare.search import best_rate

TINY = [*TINY_ENCODER[:-1], "--positions=none,tisa"]
"""Without a number of steps."""


def run(text, out, *more):
    main(["compare", "--data", text, "--out", str(out), *TINY, *more])
    return json.loads((out / "results.json").read_text())


# Budgets


def test_a_budget_divides_the_time_by_all_that_a_step_costs():
    """Nine tenths of ten minutes; a step of all methods takes 0.1 seconds, and judging a tenth of that."""
    assert plan(10, 0.1, SETTINGS, 1).steps == int(540 / 0.11)
    assert plan(10, 0.1, SETTINGS, 2).steps == int(540 / 0.22)
    searching = replace(SETTINGS, rate_factors=(0.5, 1.0, 2.0))
    assert plan(10, 0.1, searching, 1).steps == int(540 / (0.11 + 0.1 * 3 * 0.15))


@pytest.mark.parametrize(("minutes", "seeds"), [(1, 1), (5, 1), (12, 3), (8, 2)])
def test_more_seeds_come_once_there_are_enough_steps(minutes, seeds):
    """1800 steps with a seed take 1800 * 0.11 seconds, which is 3.7 minutes of budget."""
    found = plan(minutes, 0.1, SETTINGS, None)
    assert found.seeds == seeds
    assert found.steps == int(minutes * 54 / (0.11 * seeds))


@given(st.floats(1e-4, 1e3), st.floats(1e-5, 100), st.sampled_from([None, 1, 3]))
def test_the_least_that_an_error_names_is_enough(minutes, step, seeds):
    try:
        found = plan(minutes, step, SETTINGS, seeds)
    except InputError as error:
        reason = str(error)
    else:
        assert found.steps >= LEAST_STEPS
        return
    assert reason.startswith("minutes: expected at least ")
    least = float(reason.split()[4])
    assert least > minutes
    assert plan(least, step, SETTINGS, seeds).steps >= LEAST_STEPS


def test_the_time_of_a_step_is_that_of_all_methods():
    both = budget.seconds_per_step(SETTINGS, ["none", "tisa"], torch.device("cpu"))
    assert 0 < both < 60


def test_runs_beside_each_other_share_the_time(monkeypatch):
    each = []
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: each.append(torch.get_num_threads()) or 0.3)

    def seconds(jobs, available):
        with threads(available):
            return budget.shared_seconds(SETTINGS, ["none", "tisa", "rope"], torch.device("cpu"), jobs)

    # Three methods take three turns, or two, or one.
    assert seconds(1, 4) == pytest.approx(0.3)
    assert seconds(2, 4) == pytest.approx(0.2)
    assert seconds(9, 4) == pytest.approx(0.1)
    assert seconds(9, 1) == pytest.approx(0.3)
    assert each == [4, 2, 1, 1]


def test_a_budget_is_kept_when_a_comparison_continues(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_STEPS", 1)
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 0.1)
    monkeypatch.setattr(compare, "train_and_judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        run(text, tmp_path, "--minutes=0.02", "--rate-factors=1")
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["budget"] == {"minutes": 0.02, "steps": 9, "seeds": 1}
    assert kept["runs"] == {}
    monkeypatch.undo()
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: pytest.fail("measured twice"))
    results = run(text, tmp_path, "--minutes=0.02", "--rate-factors=1")
    assert len(results["runs"]["tisa"]["0"]["train_loss"]) == results["settings"]["steps"] == 9
    assert results["budget"] == kept["budget"]
    capsys.readouterr()
    message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path), *TINY, "--minutes=3", "--rate-factors=1")
    assert "holds results with minutes 0.02, not 3.0" in message
    again = run(text, tmp_path, "--minutes=0.02", "--rate-factors=1")
    assert (again["date"], again["commit"], again["runs"]) == (results["date"], results["commit"], results["runs"])
    assert "2 of 2 runs are already done" in capsys.readouterr().out
    more = run(text, tmp_path, "--minutes=0.02", "--rate-factors=1", "--seeds=2")
    assert sorted(more["runs"]["tisa"]) == ["0", "1"]
    assert more["budget"] == {**kept["budget"], "seeds": 2}


def test_results_without_a_budget_are_not_continued_with_one(text, tmp_path, capsys):
    run(text, tmp_path, "--steps=2", "--rate-factors=1", "--positions=none")
    message = fails(capsys, "compare", "--data", text, "--out", str(tmp_path), *TINY, "--minutes=3", "--rate-factors=1")
    assert "holds results with minutes None, not 3.0; choose another folder" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--minutes=1", "--steps=5"], "--minutes: expected either --minutes or --steps, got both"),
        (["--minutes=0"], "--minutes: expected a positive number, got 0.0"),
        (["--minutes=0.00001"], "--minutes: expected at least "),
        (["--rate-factors=0"], "--rate-factors: expected positive numbers such as '0.5,1,2' and learning rates of at"),
        (["--rate-factors=1,x"], "learning rates of at most 1e+06, got 'x'"),
        (["--rate-factors=1e9"], "learning rates of at most 1e+06, got '1e9'"),
        (["--rate-factors="], "--rate-factors: expected at least one, got none"),
        (["--rate-factors=nan"], "got 'nan'"),
    ],
)
def test_bad_choices_give_one_line(text, tmp_path, capsys, options, expected):
    assert expected in fails(capsys, "compare", "--data", text, "--out", str(tmp_path / "out"), *TINY, *options)


# Learning rates


def test_another_rate_than_the_usual_one_has_to_be_clearly_better():
    trials = [Trial(1.0, 3.0), Trial(2.0, 2.45), Trial(4.0, 2.4), Trial(8.0, None)]
    assert best_rate(trials, usual=1.0) == 4.0
    assert best_rate(trials, usual=2.0) == 2.0
    # A usual rate that was not tried, or did not last, is that of its neighbor.
    assert best_rate(trials, usual=2.5) == 2.0
    assert best_rate(trials, usual=8.0) == 4.0
    assert best_rate([Trial(2.0, None)], usual=2.0) is None
    assert best_rate([], usual=2.0) is None
    assert best_rate([Trial(1.0, float("nan")), Trial(2.0, 3.0)], usual=1.0) == 2.0
    assert best_rate([Trial(0.5, 3.0), Trial(2.0, 2.7)], usual=1.0) == 0.5


def test_a_higher_rate_has_to_be_better_by_more_than_a_lower_one():
    # As t5 with 3,600 steps, which the higher rate left with a loss that was higher by 0.1.
    trials = [Trial(0.004, 5.08), Trial(0.008, 4.77), Trial(0.016, 4.38)]
    assert best_rate(trials, usual=0.008) == 0.008
    assert best_rate(trials, usual=0.016) == 0.016
    assert best_rate([Trial(0.004, 4.6), *trials[1:]], usual=0.008) == 0.004
    assert best_rate([*trials[:2], Trial(0.016, 4.2)], usual=0.008) == 0.016


def test_each_method_is_trained_with_the_best_of_its_rates(text, tmp_path):
    results = run(text, tmp_path, "--steps=20", "--learning-rate=0.01", "--rate-factors=1e-6,1")
    for name in ("none", "tisa"):
        slow, fast = results["trials"][name]
        assert (slow["rate"], fast["rate"]) == (1e-8, 0.01)
        assert fast["loss"] < slow["loss"]
        assert results["runs"][name]["0"]["learning_rate"] == 0.01


def test_a_search_that_was_interrupted_goes_on_where_it_stopped(text, tmp_path, monkeypatch):
    options = "--steps=7", "--rate-factors=1,2"
    whole = run(text, tmp_path / "whole", *options)
    real, searched = compare.search_rate, []

    def interrupted(material, position, *rest):
        if position == "tisa":
            raise KeyboardInterrupt
        return real(material, position, *rest)

    monkeypatch.setattr(compare, "search_rate", interrupted)
    with pytest.raises(SystemExit):
        run(text, tmp_path / "part", *options)
    assert set(json.loads((tmp_path / "part" / "results.json").read_text())["trials"]) == {"none"}
    monkeypatch.setattr(compare, "search_rate", lambda *args: (searched.append(args[1]), real(*args))[1])
    part = run(text, tmp_path / "part", *options)
    assert searched == ["tisa"]
    assert part["trials"] == whole["trials"]
    for name in ("none", "tisa"):
        assert without_time(part["runs"][name]["0"]) == without_time(whole["runs"][name]["0"])


def test_short_trainings_have_the_warm_up_of_whole_ones(text, tmp_path, monkeypatch):
    """With their own, too high rates look worse than they are in a whole training."""
    rates, schedule = [], fit.build_schedule

    def watched(optimizer, name, warmup, steps):
        rates.append((warmup, steps))
        return schedule(optimizer, name, warmup, steps)

    monkeypatch.setattr(fit, "build_schedule", watched)
    run(text, tmp_path, "--steps=40", "--rate-factors=1,2", "--positions=none")
    assert rates == [(4, 6), (4, 6), (4, 40)]


def diverging(position, rates):
    """Training in which the loss of a method is not finite at these rates."""
    real = search.train

    def train(material, name, seed, rate, *rest, **more):
        if name == position and rate in rates:
            raise DivergedError("learning_rate", f"the loss of {name!r} is not finite")
        return real(material, name, seed, rate, *rest, **more)

    return train


def test_a_rate_that_diverges_is_not_taken(text, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "train", diverging("tisa", {0.008}))
    results = run(text, tmp_path, "--steps=7", "--rate-factors=1,2")
    assert results["trials"]["tisa"][0]["loss"] is None
    assert results["runs"]["tisa"]["0"]["learning_rate"] == 0.016


def test_a_method_that_always_diverges_is_an_error_after_the_others_are_done(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(search, "train", diverging("none", {0.008, 0.016}))
    arguments = ["--data", text, "--out", str(tmp_path), *TINY, "--steps=7", "--rate-factors=1,2"]
    message = fails(capsys, "compare", *arguments)
    assert "--learning-rate: the loss of 'none' is not finite (NaN or inf) at any of 0.008, 0.016; try 0.002" in message
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["runs"]) == {"tisa"}
    assert set(results["failed"]) == {"none"}
    assert (tmp_path / "report.html").exists()
    again = fails(capsys, "compare", *arguments)
    assert "the loss of 'none' is not finite (NaN or inf) at any of" in again


def test_an_interruption_while_speed_is_measured_repeats_nothing_else(text, tmp_path, monkeypatch):
    options = "--steps=7", "--rate-factors=1,2"
    with monkeypatch.context() as patched:
        patched.setattr(compare, "measure_speed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            run(text, tmp_path, *options)
    for name in ("search_rate", "train_and_judge"):
        monkeypatch.setattr(compare, name, lambda *_: pytest.fail("done twice"))
    assert set(run(text, tmp_path, *options)["speed"]) == {"none", "tisa"}


def test_a_training_that_diverges_later_leaves_the_others(text, tmp_path, capsys, monkeypatch):
    real = compare.train_and_judge

    def diverged(job, position, *rest):
        if position == "none":
            raise DivergedError("learning_rate", "the loss of 'none' is not finite after 5 steps")
        return real(job, position, *rest)

    monkeypatch.setattr(compare, "train_and_judge", diverged)
    arguments = ["--data", text, "--out", str(tmp_path), *TINY, "--steps=7", "--rate-factors=1"]
    assert "--learning-rate: the loss of 'none' is not finite after 5" in fails(capsys, "compare", *arguments)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["runs"]) == {"tisa"}
    assert set(results["failed"]) == {"none"}
    monkeypatch.undo()
    main(["compare", *arguments])
    assert json.loads((tmp_path / "results.json").read_text())["failed"] == {}


def test_a_budget_chooses_seeds(text, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_STEPS", 1)
    monkeypatch.setattr(budget, "ENOUGH_STEPS", 2)
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 0.1)
    results = run(text, tmp_path, "--minutes=0.02", "--rate-factors=1")
    assert results["budget"] == {"minutes": 0.02, "steps": 3, "seeds": 3}
    assert [[*runs] for runs in results["runs"].values()] == [["0", "1", "2"]] * 2
