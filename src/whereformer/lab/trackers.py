"""Trackers: programs that a training reports its losses and scores to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import ranks
from ..errors import InputError


def check_installed(tracker: str) -> None:
    """Check that a tracker is installed, if it is not "none".

    Raises:
        InputError: for ``report_to``, if it is not.
    """
    if tracker != "none" and find_spec(tracker) is None:
        raise InputError("report_to", f"{tracker} is not installed; try `pip install {tracker}`")


@contextmanager
def reporting(tracker: str, folder: Path) -> Iterator[Callable[[int, Mapping[str, float]], Any]]:
    """Yield what is told numbers by name, and after which step. Of several processes, the main one reports.

    Args:
        tracker: "tensorboard", which writes files; "trackio" or "wandb", whose functions are the same; or "none".
        folder: the folder of the results, after which a run is named.
    """
    if tracker == "none" or not ranks.is_main():
        yield lambda step, values: None
    elif tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard")) as writer:
            yield lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()]
    else:
        module = import_module(tracker)
        project = os.environ.get(f"{tracker.upper()}_PROJECT", "whereformer")
        module.init(project=project, name=folder.resolve().name)
        try:
            yield lambda step, values: module.log({**values, "step": step})
        finally:
            module.finish()
