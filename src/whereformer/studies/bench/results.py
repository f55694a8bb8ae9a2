"""The contents of a benchmark's ``results.json`` and ``results.csv``, and how they are updated."""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from ...errors import InputError
from ...lab.json_files import check_that
from ...lab.provenance import machine, provenance
from ...lab.store import Results
from .cases import KINDS

if TYPE_CHECKING:
    from ...lab.sheet import Sheet

METHOD = (
    "First, the output and gradients of each way are checked against the float64 reference at a small length. Then "
    "every round times each way once, in random order, in one process; short calls are repeated until they take 20 ms. "
    "A ratio is a way's time divided by the time of torch's attention without positions, over all keys, in the same "
    "round; the median, lowest and highest over the rounds are given. Time is the process's CPU time with one "
    "thread, wall time with more, and event time on a GPU. Memory is what a call allocates at its peak beyond its "
    "inputs, in a separate call."
)

RowKey = tuple[str, int, int, int, int, str, str, str, int, str]


@dataclass(frozen=True)
class BenchRow:
    """The measurements of one way on one case.

    Args:
        terms, n, batch, heads, head_dim, dtype, direction: the case.
        device, threads: "cpu" or "cuda", and torch's number of threads.
        way: the way's name.
        ratio, lowest, highest: median and range of time relative to plain attention; None if it wasn't timed.
        milliseconds: median time of a call.
        memory: peak memory in bytes, beyond the inputs.
        error: the largest relative error of output and gradients at the small length.
        note: why something is missing, or empty.
        measured: the date.
        commit: the commit that was measured, see :func:`whereformer.lab.provenance.commit`.
        seconds: time of a call in each round.
    """

    terms: str
    n: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    direction: str
    device: str
    threads: int
    way: str
    ratio: float | None = None
    lowest: float | None = None
    highest: float | None = None
    milliseconds: float | None = None
    memory: int | None = None
    error: float | None = None
    note: str = ""
    measured: str = ""
    commit: str | None = None
    seconds: tuple[float, ...] = ()

    @property
    def key(self) -> RowKey:
        """Identifies the measurement: rows with the same key are the same measurement at different times."""
        case = (self.terms, self.n, self.batch, self.heads, self.head_dim, self.dtype, self.direction)
        return (*case, self.device, self.threads, self.way)


@dataclass(frozen=True)
class MemoryGrowth:
    """The power of the length with which a way's memory grows, from cases that differ only in length."""

    terms: str
    dtype: str
    direction: str
    way: str
    batch: int
    lengths: list[int]
    exponent: float


@dataclass(frozen=True)
class BenchResults(Results):
    """All measurements of a folder.

    Args:
        method: how the measurements are taken.
        terms: descriptions of the kinds of terms.
        memory_growth: growth of memory for all cases with more than one length.
        rows: one row for each case and way.
    """

    FORMAT = 1
    INDENT = 1

    method: str
    terms: dict[str, str]
    memory_growth: list[MemoryGrowth]
    rows: list[BenchRow]

    def check(self) -> None:
        for number, row in enumerate(self.rows):
            sizes = (row.n, row.batch, row.heads, row.head_dim, row.threads)
            check_that(min(sizes) > 0, f"rows[{number}]", "sizes of at least 1")
            times = (row.ratio, row.lowest, row.highest, row.milliseconds, *row.seconds)
            check_that(all(time is None or time > 0 for time in times), f"rows[{number}]", "positive times")
            timed = [time is None for time in (row.ratio, row.lowest, row.highest, row.milliseconds)]
            check_that(all(timed) or not any(timed), f"rows[{number}]", "all times or none")

    @classmethod
    def begin(cls, folder: Path, device: torch.device) -> Self:
        """Return what a folder has been measured so far, which may be nothing.

        Raises:
            InputError: if the folder has results from another machine or other versions, or its file is something else.
        """
        origin = {**provenance(device), "machine": describe_machine(device)}
        earlier = cls.earlier(folder)
        if earlier is None:
            return cls(method=METHOD, terms={}, memory_growth=[], rows=[], **origin)
        for then, now in ((earlier.machine, origin["machine"]), (earlier.versions, origin["versions"])):
            for key in {**now, **then}:
                if now.get(key) != then.get(key):
                    raise InputError(
                        "out",
                        f"{folder} has results with {key} {then.get(key)}, not {now.get(key)}; choose another folder",
                    )
        return replace(earlier, method=METHOD, **origin)

    def with_rows(self, rows: Sequence[BenchRow]) -> Self:
        """Return these results with more rows, which replace those of the same measurements."""
        every = list({row.key: row for row in (*self.rows, *rows)}.values())
        terms = {kind: KINDS[kind].about for kind in dict.fromkeys(row.terms for row in every) if kind in KINDS}
        return replace(self, terms=terms, memory_growth=memory_growth(every), rows=every)

    def interrupted(self) -> BenchResults:
        """Return the same results of a command that was interrupted."""
        return _Interrupted(**{each.name: getattr(self, each.name) for each in fields(self)})

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheet

        return [sheet(self.rows)]

    def sentences(self) -> Sequence[str]:
        from .report import headline

        return [headline(self.rows)]

    def more_files(self) -> dict[str, str]:
        from .report import plot

        picture = plot(self.rows)
        return {"results.csv": as_csv(self.rows), **({} if picture is None else {"plot.svg": picture})}


class _Interrupted(BenchResults):
    def problem(self) -> KeyboardInterrupt:
        return KeyboardInterrupt("the measurements so far are kept")


def as_csv(rows: Sequence[BenchRow]) -> str:
    """Format rows as CSV, without the times of each round."""
    names = [column.name for column in fields(BenchRow) if column.name != "seconds"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return file.getvalue()


def memory_growth(rows: Sequence[BenchRow]) -> list[MemoryGrowth]:
    """Return how each way's memory grows, for batches that were measured at more than one length."""
    points: dict[tuple[str, str, str, str, int], dict[int, float]] = {}
    for row in rows:
        if row.memory:
            key = (row.terms, row.dtype, row.direction, row.way, row.batch)
            points.setdefault(key, {})[row.n] = row.memory
    return [
        MemoryGrowth(*key, lengths=sorted(found), exponent=round(exponent, 3))
        for key, found in points.items()
        if (exponent := growth(found)) is not None
    ]


def growth(points: Mapping[int, float]) -> float | None:
    """Return the power with which values grow with length (the slope of log over log); None for a single point."""
    logs = [(math.log(n), math.log(value)) for n, value in points.items() if value > 0]
    if len(logs) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine: processor, its instructions, GPU, system and number of cores."""
    facts = machine(device)
    return {name: facts[name] for name in ("cpu", "instructions", "gpu", "system") if name in facts} | {
        "cores": os.cpu_count()
    }
