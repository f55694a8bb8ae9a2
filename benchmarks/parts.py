"""The parts of a long benchmark: several at a time, each kept in a file, so that an interrupted one loses only one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from whereformer.errors import InputError
from whereformer.provenance import write_results

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result as soon as it is done; one process does them here, in order."""
    if processes == 1:
        yield from ((task, work(task)) for task in tasks)
        return
    # A forked process would inherit locks and threads.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    try:
        waiting = {pool.submit(work, task): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def kept(file: Path, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in ``file``; they are made and written there first if need be.

    Raises:
        InputError: if they were made with other settings.
    """
    if not file.exists():
        write_results(file, {"settings": dict(settings), **make()})
    found: dict[str, Any] = json.loads(file.read_text())
    for name, value in settings.items():
        if found["settings"].get(name) != value:
            raise InputError(
                "out", f"{file.parent} holds results with {name} {found['settings'].get(name)}, not {value}"
            )
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Format the median of values, their range and their number; "-" for none."""
    if not values:
        return "-"
    least, most = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({least:.{digits}f}-{most:.{digits}f}, n={len(values)})"
