"""Trackers: programs that a training reports its losses to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ..errors import InputError
from . import ranks


def check_installed(tracker: str) -> None:
    """Check that a tracker is installed, if it is not "none".

    Raises:
        InputError: for ``report_to``, if it is not.
    """
    if tracker != "none" and find_spec(tracker) is None:
        raise InputError("report_to", f"{tracker} is not installed; try `pip install {tracker}`")


@contextmanager
def reporting(tracker: str, folder: Path, name: str) -> Iterator[Callable[[int, float], None]]:
    """Yield what is told how many more steps are done, and the last loss. Of several processes, the main one reports.

    Args:
        tracker: "tensorboard", which writes files; "trackio" or "wandb", whose functions are the same; or "none".
        folder: the folder of the results, after which a run is named.
        name: the name of the training in it.
    """
    if tracker == "none" or not ranks.is_main():
        yield lambda steps, loss: None
        return
    done = 0
    report: Callable[[str, float, int], None]
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard" / name))
        report, finish = writer.add_scalar, writer.close
    else:
        module = import_module(tracker)
        project = os.environ.get(f"{tracker.upper()}_PROJECT", "whereformer")
        module.init(project=project, name=f"{folder.resolve().name}-{name}")
        finish = module.finish

        def log(key: str, value: float, step: int) -> None:
            module.log({key: value, "step": step})

        report = log

    def told(steps: int, loss: float) -> None:
        nonlocal done
        done += steps
        report("loss", loss, done)

    try:
        yield told
    finally:
        finish()
