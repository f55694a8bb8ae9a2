"""Each test begins without plans, and sees which ones are recorded."""

import importlib

import pytest


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that was recorded in the test, whether it became a plan."""
    launch = importlib.import_module("whereformer.kernels.triton.launch")
    record, found = launch.record, []

    def record_and_note(*arguments):
        results, plan = record(*arguments)
        found.append(plan is not None)
        return results, plan

    monkeypatch.setattr(launch, "record", record_and_note)
    forget()
    return found


def forget() -> None:
    """Forget all plans."""
    kinds, launch = (importlib.import_module(f"whereformer.kernels.{name}") for name in ("kinds", "triton.launch"))
    kinds._known.values.clear()
    launch.operators.plans.values.clear()
