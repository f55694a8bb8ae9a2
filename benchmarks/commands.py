"""Run whereformer's commands for a benchmark, one thread each, several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from whereformer.errors import InputError

Run = TypeVar("Run")
Result = TypeVar("Result")


def run_command(log: Path, *arguments: str) -> None:
    """Run a command with one thread, and append what it prints to ``log``.

    Raises:
        InputError: if the command fails; the reason names the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "whereformer", *arguments]
    with log.open("a", encoding="utf-8") as out:
        code = subprocess.call(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    if code:
        raise InputError(None, f"a run failed, see {log}")


def in_turn(work: Callable[[Run], Result], runs: Sequence[Run], workers: int) -> Iterator[tuple[Run, Result]]:
    """Do all runs, ``workers`` at a time, and yield each with its result, in order. An error cancels the rest."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield from zip(runs, pool.map(work, runs), strict=True)
        except BaseException:
            # Cancels the runs that have not begun.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
