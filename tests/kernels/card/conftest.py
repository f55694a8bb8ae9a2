"""Each test begins without plans, and sees which ones are recorded."""

import pytest

from whereformer.kernels import remember
from whereformer.kernels.triton import launch


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that was recorded in the test, whether it became a plan."""
    record, are_plans = launch.record, []

    def record_and_note(*arguments):
        results, plan = record(*arguments)
        are_plans.append(plan is not None)
        return results, plan

    monkeypatch.setattr(launch, "record", record_and_note)
    remember(True)  # which forgets all
    return are_plans
