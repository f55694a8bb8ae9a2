"""Budgets of time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whereformer.errors import InputError
from whereformer.lab import encoders
from whereformer.recipes.budget import LEAST_STEPS, Plan, fitting, seconds_per_step
from whereformer.recipes.compare import Compare


def test_a_budget_divides_the_time_by_all_that_a_step_costs():
    """Nine tenths of ten minutes; a step of all methods takes 0.1 seconds, and judging a tenth of that."""
    assert fitting(10, 0.1, 1) == Plan(int(540 / 0.11), 1)
    assert fitting(10, 0.1, 2) == Plan(int(540 / 0.22), 2)


@pytest.mark.parametrize(("minutes", "seeds"), [(1, 1), (5, 1), (12, 3), (8, 2)])
def test_more_seeds_come_once_there_are_enough_steps(minutes, seeds):
    """1800 steps with a seed take 1800 * 0.11 seconds, which is 3.7 minutes of budget."""
    assert fitting(minutes, 0.1, None) == Plan(int(minutes * 54 / (0.11 * seeds)), seeds)


@given(st.floats(1e-4, 1e3), st.floats(1e-5, 100), st.sampled_from([None, 1, 3]))
def test_the_least_that_an_error_names_is_enough(minutes, step, seeds):
    try:
        found = fitting(minutes, step, seeds)
    except InputError as error:
        reason = str(error)
    else:
        assert found.steps >= LEAST_STEPS
        return
    assert reason.startswith("minutes: expected at least ")
    least = float(reason.split()[4])
    assert least > minutes
    assert fitting(least, step, seeds).steps >= LEAST_STEPS


def test_steps_are_timed():
    model = encoders.build(Compare(out="x", length=16, hidden_size=16, blocks="1").config("tisa", 64), 0)
    assert 0 < seconds_per_step(model, 4, 16, 0.4, "cpu") < 60
