"""The parts of a long benchmark: several at a time, each kept in a file, so that an interrupted one loses only one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from result_files import write_results

from whereformer.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")


def _new_processes(count: int) -> ProcessPoolExecutor:
    # A forked process would inherit locks and threads.
    return ProcessPoolExecutor(count, get_context("spawn"), torch.set_num_threads, (1,))


def in_processes(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result as soon as it is done; one process does them here, in order."""
    if processes == 1:
        yield from ((task, work(task)) for task in tasks)
        return
    pool = _new_processes(processes)
    try:
        waiting = {pool.submit(work, task): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_a_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of a call in a new process, which has one thread and no memory of earlier calls."""
    with _new_processes(1) as pool:
        return pool.submit(work, *arguments).result()


def keep(file: Path, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in ``file``; they are made and written there first if need be.

    Raises:
        InputError: if they were made with other settings.
    """
    if not file.exists():
        write_results(file, {"settings": dict(settings), **make()})
    results: dict[str, Any] = json.loads(file.read_text())
    for name, value in settings.items():
        if (earlier := results["settings"].get(name)) != value:
            raise InputError("out", f"{file.parent} holds results with {name} {earlier}, not {value}")
    return results


def spread(values: Sequence[float], digits: int) -> str:
    """Format the median of values, their range and their number; "-" for none."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f}, n={len(values)})"
