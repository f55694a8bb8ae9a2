"""Which thresholds of :mod:`whereformer.kernels.tuning` would be better on this machine.

All ways of a call are timed in turns, by the process's CPU time with one thread.
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
from ...runs.progress import Progress
from ...runs.provenance import provenance
from ...runs.results import Results
from .check import in_a_line
from .results import describe_machine
from .timing import Clock, rounds_of, threads
from .workloads import Step, TunedSetting, TunedWay, TuneSizes, Value, Workload, name_of, settings

FEWEST_GAINED = 0.03
"""Share of the time that another value has to save, in every round some, before it counts as better."""

METHOD = (
    "A setting's values are compared on calls for which they take different ways. Every round times each way of a call "
    "once, in an order that changes, in one process; short calls are repeated until they last 20 ms. A ratio is the "
    "geometric mean over the calls of a value's time by that of the value now in the same round; median, lowest and "
    "highest over the rounds. Time is the process's CPU time with one thread."
)


@dataclass(frozen=True)
class TuneRow:
    """What was measured of a setting.

    Args:
        field, dtype: what it is.
        now, best: the value that holds, and the one that was fastest.
        ratio, lowest, highest: median and range over the rounds of the best value's time relative to the one's now.
        better: whether that is more than noise.
        ratios: the median of every value.
        calls: what they were measured on.
        failed: the ways that this machine can't go, and why; values that take them are out.
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
        """ "fused_dtypes bfloat16"."""
        return f"{self.field} {self.dtype}".strip()


@dataclass(frozen=True)
class TuneResults(Results):
    """What ``tune.json`` holds.

    Args:
        method: how it was measured.
        processor: the family whose thresholds hold now.
        sizes: of the calls.
        lines: what one would write in ``tuning.py``.
        rows: one for each setting.
    """

    FORMAT = 1
    INDENT = 1

    method: str
    processor: str
    sizes: TuneSizes
    lines: list[str]
    rows: list[TuneRow]


def run(sizes: TuneSizes, keep: Callable[[TuneRow], None], progress: Progress) -> None:
    """Measure all settings, and ``keep`` each row as soon as it is there."""
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
    """Seconds of each way, round by round, and why some have none."""
    make = workload.prepare()
    timed, errors = {}, []
    for way in dict.fromkeys(workload.ways.values()):
        measured = partial(_timed, clock, _with_changes(way, make(way.backend)), {})
        try:
            measured(warm=True)
            timed[way] = measured
        except Exception as error:  # that a way is closed here is a result as well
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
    """Seconds of a step that finds in the thread's memory what it left there itself, not what other ways did."""
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
    """The row of a setting, from the seconds of each workload's ways in each round.

    Ways may be missing: then the values that take them are out, or, where the value now does, that call.
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
    # Of values that are equally fast the one that holds stays.
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
    """What one would write in ``tuning.py``, a line for each field that would change."""
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
    """ "yes", "2**16" or "300"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"2**{value.bit_length() - 1}" if value >= 2**10 and value & (value - 1) == 0 else str(value)


def _code(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(str, value)))}}})" if value else "frozenset()"
    return str(value) if isinstance(value, bool) else show(value)


def write(path: Path, rows: Sequence[TuneRow], sizes: TuneSizes) -> None:
    """Save all rows, with what they were measured on."""
    origin = {**provenance(), "machine": describe_machine(torch.device("cpu"))}
    processor = tuning.current().processor
    TuneResults(METHOD, processor, sizes, lines(rows), list(rows), **origin).save(path)
