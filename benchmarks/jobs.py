"""Spread independent runs over processes: one for each GPU, or several that share the threads of the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from whereformer.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Progress:
    """Receives the progress of a run. This base class ignores it."""

    def start(self, steps: int) -> None:
        """Called when a job begins and the number of its steps is known."""

    def begin(self, label: str) -> None:
        """Called when a part of the job begins."""

    def step(self, steps: int = 1, detail: str = "") -> None:
        """Called when ``steps`` more steps are done."""

    def line(self, text: str) -> None:
        """Called with a line of text for the user."""


Work = Callable[[Task, Progress], Result]

SECONDS = 5.0
"""How long to wait for the last reports of progress."""


def spread(
    work: Work[Task, Result], tasks: Sequence[Task], jobs: int, progress: Progress
) -> Iterator[tuple[Task, Result]]:
    """Do all tasks, ``jobs`` at a time, and yield each with its result as soon as it is done.

    With one job they are done here, in order. Otherwise each process gets a GPU or its share of the threads. If one
    task fails, or the caller stops, the others stop at their next step.

    Args:
        work: does one task and reports its progress. It can be pickled, and so can tasks and results.
        tasks: the tasks.
        jobs: the number of processes.
        progress: receives the progress of all tasks.

    Raises:
        InputError: if a process ends unexpectedly, and whatever ``work`` raises.
    """
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, work(task, progress)
        return
    jobs = min(jobs, len(tasks))
    # A forked process would inherit locks and threads, and it could not use a GPU.
    context = multiprocessing.get_context("spawn")
    messages, stopped, number = context.SimpleQueue(), context.Event(), context.Value("i", 0)
    threads = max(1, torch.get_num_threads() // jobs)
    pool = ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(work, messages, stopped, number, threads)
    )
    with pool as processes:
        # A process that dies in the middle of a message leaves this thread waiting, and nothing else.
        reader = threading.Thread(target=_pass_on, args=(messages, progress), daemon=True)
        reader.start()
        waiting = {processes.submit(_do, task): task for task in tasks}
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                # Finished results are kept first.
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    yield waiting.pop(future), future.result()
            messages.put(None)
            reader.join(SECONDS)
        except BrokenProcessPool:
            raise InputError(
                "jobs", f"one of {jobs} processes ended unexpectedly, perhaps for lack of memory; use fewer"
            ) from None
        finally:
            stopped.set()
            processes.shutdown(wait=False, cancel_futures=True)


def _pass_on(messages: Any, progress: Progress) -> None:
    while (message := messages.get()) is not None:
        name, arguments = message
        getattr(progress, name)(*arguments)


class _StoppedError(Exception):
    """Ends a task whose result nobody waits for."""


class _Sender(Progress):
    """Sends the progress of a process to the one that started it."""

    def __init__(self, messages: Any, stopped: Any) -> None:
        self.messages = messages
        self.stopped = stopped

    def begin(self, label: str) -> None:
        self.messages.put(("begin", (label,)))

    def step(self, steps: int = 1, detail: str = "") -> None:
        if self.stopped.is_set():
            raise _StoppedError
        self.messages.put(("step", (steps, detail)))

    def line(self, text: Any) -> None:
        self.messages.put(("line", (text,)))


_this: dict[str, Any] = {}
"""What this process works with, if it is one of several: the "work" and the "progress"."""


def _begin(work: Work[Any, Any], messages: Any, stopped: Any, number: Any, threads: int) -> None:
    # Ctrl-C reaches all processes; the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        with number.get_lock():
            torch.cuda.set_device(number.value % torch.cuda.device_count())
            number.value += 1
    _this.update(work=work, progress=_Sender(messages, stopped))


def _end_with_parent() -> None:
    """End this process when the one that started it has ended: nobody is left to take what it computes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(task: Any) -> Any:
    return _this["work"](task, _this["progress"])
