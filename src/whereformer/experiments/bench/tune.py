"""Measure which thresholds of :mod:`whereformer.kernels.tuning` would be faster on this machine.

All ways to compute a call are timed in turns, by the process's CPU time with one thread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...kernels import tuning
from ...kernels.cpu.workspace import Workspace
from ...runs.jobs import threads
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...runs.results import Results
from .check import in_a_line
from .results import describe_machine
from .timing import Clock, rounds_of
from .workloads import Step, TunedSetting, TunedWay, TuneSizes, Value, Workload, name_of, settings

FEWEST_GAINED = 0.03
"""A value counts as better if it saves at least this share of the time, and saves some in every round."""

METHOD = (
    "A setting's values are compared on calls that they compute in different ways. Every round times each way of a "
    "call once, in random order, in one process; short calls are repeated until they take 20 ms. A ratio is a value's "
    "time divided by the current value's time in the same round, as a geometric mean over the calls; the median, "
    "lowest and highest over the rounds are given. Time is the process's CPU time with one thread."
)


@dataclass(frozen=True)
class TuneRow:
    """The measurements of one setting.

    Args:
        field, dtype: the setting.
        now, best: the current value, and the fastest one.
        ratio, lowest, highest: median and range over the rounds of the best value's time relative to the current one's.
        better: whether the difference is more than noise.
        ratios: the median ratio of every value.
        calls: the calls that were measured.
        failed: ways that this machine can't compute, with the reason; values that need them are excluded.
    """

    field: str
    dtype: str
    now: Any
    best: Any
    ratio: float
    lowest: float
    highest: float
    better: bool
    ratios: dict[str, float]
    calls: tuple[str, ...]
    failed: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The setting's name, such as "fused_dtypes bfloat16"."""
        return f"{self.field} {self.dtype}".strip()


@dataclass(frozen=True)
class TuneResults(Results):
    """The contents of ``tune.json``.

    Args:
        method: how it was measured.
        processor: the family of processors whose thresholds are in use.
        sizes: the sizes of the calls.
        lines: lines to write into ``tuning.py``.
        rows: one row for each setting.
    """

    FORMAT = 1
    INDENT = 1

    method: str
    processor: str
    sizes: TuneSizes
    lines: list[str]
    rows: list[TuneRow]


def run(sizes: TuneSizes, keep: Callable[[TuneRow], None], progress: Progress) -> None:
    """Measure all settings, and call ``keep`` with each row as soon as it is measured."""
    found = settings(sizes)
    clock = Clock(torch.device("cpu"), 1)
    progress.start(sum(_work(workload) * (sizes.rounds + 1) for setting in found for workload in setting.workloads))
    with threads(1):
        for setting in found:
            times, failed = [], []
            for workload in setting.workloads:
                progress.begin(f"{setting.label}: {workload.label}")
                measured, errors = _measure(workload, clock, sizes.rounds, progress)
                times.append(measured)
                failed += [f"{workload.label}: {error}" for error in errors]
            keep(replace(judge(setting, times), failed=tuple(failed)))


def _work(workload: Workload) -> int:
    return workload.work * len(set(workload.ways.values()))


def _measure(
    workload: Workload, clock: Clock, rounds: int, progress: Progress
) -> tuple[list[dict[TunedWay, float]], list[str]]:
    """Return the seconds of each way, round by round, and the reasons why ways could not be timed."""
    make = workload.prepare()
    timed, errors = {}, []
    for way in dict.fromkeys(workload.ways.values()):
        measured = partial(_timed, clock, _with_changes(way, make(way.backend)), {})
        try:
            measured(warm=True)
            timed[way] = measured
        except Exception as error:  # that a way fails on this machine is also a result
            errors.append(in_a_line(error))
    progress.step(_work(workload))
    times = []
    for found in rounds_of(timed, lambda measured: measured(), rounds):
        times.append(found)
        progress.step(_work(workload))
    return times, errors


def _with_changes(way: TunedWay, step: Step) -> Step:
    def changed() -> object:
        with tuning.use(**dict(way.changes)):
            return step()

    return changed


def _timed(clock: Clock, step: Step, memory: dict[str, Any], warm: bool = False) -> float:
    """Time a step that finds only its own leftovers in the thread's memory, not those of other ways."""
    with _own(memory):
        if warm:
            step()
            return 0.0
        return clock.seconds(step)


@contextmanager
def _own(memory: dict[str, Any]) -> Iterator[None]:
    kept = Workspace._kept.__dict__
    others = dict(kept)
    kept.clear()
    kept.update(memory)
    try:
        yield
    finally:
        memory.clear()
        memory.update(kept)
        kept.clear()
        kept.update(others)


def judge(setting: TunedSetting, times: Sequence[Sequence[Mapping[TunedWay, float]]]) -> TuneRow:
    """Make the row of a setting from the seconds of each workload's ways in each round.

    If a way is missing, the values that need it are excluded. If the current value needs it, the call is excluded.
    """
    calls = [
        (workload.ways, found)
        for workload, found in zip(setting.workloads, times, strict=True)
        if workload.ways[setting.now] in found[0]
    ]

    def ratio(value: Value, index: int) -> float:
        logs = [math.log(found[index][ways[value]] / found[index][ways[setting.now]]) for ways, found in calls]
        return math.exp(statistics.mean(logs)) if logs else 1.0

    open_values = [value for value in setting.values if all(ways[value] in found[0] for ways, found in calls)]
    ratios = {value: [ratio(value, index) for index in range(len(times[0]))] for value in open_values}
    medians = {value: statistics.median(found) for value, found in ratios.items()}
    # If values are equally fast, the current one stays.
    best = min(open_values, key=lambda value: (medians[value], value != setting.now))
    return TuneRow(
        field=setting.field,
        dtype="" if setting.dtype is None else name_of(setting.dtype),
        now=setting.now,
        best=best,
        ratio=medians[best],
        lowest=min(ratios[best]),
        highest=max(ratios[best]),
        better=medians[best] <= 1 - FEWEST_GAINED and max(ratios[best]) < 1,
        ratios={show(value): median for value, median in medians.items()},
        calls=tuple(workload.label for workload in setting.workloads),
    )


def lines(rows: Sequence[TuneRow]) -> list[str]:
    """Return the lines to write into ``tuning.py``, one for each field that would change."""
    now = tuning.current()
    changed: dict[str, Any] = {}
    for row in rows:
        if not row.better:
            continue
        if row.dtype:
            dtypes = changed.get(row.field, getattr(now, row.field))
            dtype = {getattr(torch, row.dtype)}
            changed[row.field] = dtypes | dtype if row.best else dtypes - dtype
        else:
            changed[row.field] = row.best
    return [f"{field}={_code(value)}," for field, value in changed.items()]


def show(value: Any) -> str:
    """Format a value, as in "yes", "2**16" or "300"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"2**{value.bit_length() - 1}" if value >= 2**10 and value & (value - 1) == 0 else str(value)


def _code(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(str, value)))}}})" if value else "frozenset()"
    return str(value) if isinstance(value, bool) else show(value)


def write(path: Path, rows: Sequence[TuneRow], sizes: TuneSizes) -> None:
    """Save all rows, with the machine that they were measured on."""
    origin = {**provenance(), "machine": describe_machine(torch.device("cpu"))}
    processor = tuning.current().processor
    TuneResults(METHOD, processor, sizes, lines(rows), list(rows), **origin).save(path)
