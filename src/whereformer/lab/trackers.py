"""Trackers: programs that a training reports its losses and scores to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import ranks
from ..errors import InputError, one_line


def check_installed(tracker: str) -> None:
    """Raise an InputError for ``report_to`` if a tracker, other than "none", is not installed."""
    if tracker != "none" and find_spec(tracker) is None:
        raise InputError("report_to", f"{tracker} is not installed; try `pip install {tracker}`")


@contextmanager
def open_tracker(
    tracker: str, folder: Path, log: Callable[[str], object]
) -> Iterator[Callable[[int, Mapping[str, float]], Any]]:
    """Yield a function that logs a step's values by name; only the main process logs.

    If a tracker fails, for instance without network, the training goes on without it, and a line says so.

    Args:
        tracker: "tensorboard", which writes files; "trackio" or "wandb", whose functions are the same; or "none".
        folder: the folder of the results, after which a run is named.
        log: called with a message if the tracker fails.
    """
    if tracker == "none" or not ranks.is_main():
        yield lambda step, values: None
    else:
        report, end = _start(tracker, folder)
        failed: list[str] = []

        def attempt(call: Callable[..., object], *arguments: object) -> None:
            if not failed:
                try:
                    call(*arguments)
                except Exception as error:  # of any kind, such as a network error
                    failed.append(one_line(str(error)) or type(error).__name__)
                    log(f"{tracker} failed, and gets no more numbers: {failed[0]}")

        try:
            yield partial(attempt, report)
        finally:
            attempt(end)


def _start(tracker: str, folder: Path) -> tuple[Callable[[int, Mapping[str, float]], object], Callable[[], object]]:
    """Start a tracker. Return a function that reports numbers after a step, and one that ends it."""
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def report(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return report, writer.close
    module = import_module(tracker)
    project = os.environ.get(f"{tracker.upper()}_PROJECT", "whereformer")
    module.init(project=project, name=folder.resolve().name)
    return lambda step, values: module.log({**values, "step": step}), module.finish
