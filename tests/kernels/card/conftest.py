"""Each test begins without plans, and sees which calls are recorded."""

import pytest

from whereformer.kernels import remember
from whereformer.kernels.triton import launch


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that was recorded in the test, whether it became a function."""
    record, can_replay = launch.record, []

    def record_and_note(*arguments):
        results, replay = record(*arguments)
        can_replay.append(replay is not None)
        return results, replay

    monkeypatch.setattr(launch, "record", record_and_note)
    remember(True)  # which forgets all
    return can_replay
