"""TensorBoard's files of a training's losses and scores, which other trackers read, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .. import ranks


@contextmanager
def open_writer(folder: Path | None) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield a function that writes a step's values by name. Without a folder, it does nothing, as in other processes
    than the main one."""
    if folder is None or not ranks.is_main():
        yield lambda step, values: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def report(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield report
