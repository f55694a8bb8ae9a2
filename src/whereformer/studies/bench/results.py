"""The contents of a benchmark's ``results.json`` and ``results.csv``, and how they are updated."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from ...errors import InputError
from ...lab.provenance import provenance
from ...lab.store import Results
from .cases import Case

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True)
class BenchRow(Case):
    """The measurements of one way on one case.

    Args:
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
    def key(self) -> tuple[str | int, ...]:
        """Identifies the measurement: rows with the same key are the same measurement at different times."""
        case = (self.terms, self.n, self.batch, self.heads, self.head_dim, self.dtype, self.direction)
        return (*case, self.device, self.threads, self.way)


@dataclass(frozen=True)
class BenchResults(Results):
    """All measurements of a folder.

    Args:
        rows: one row for each case and way.
        interrupted: whether the last command was interrupted.
    """

    FORMAT = 1
    INDENT = 1

    rows: list[BenchRow]
    interrupted: bool | None = None

    @classmethod
    def begin(cls, folder: Path, device: torch.device) -> Self:
        """Return what a folder has been measured so far, which may be nothing.

        Raises:
            InputError: if the folder has results from another machine or other versions, or its file is something else.
        """
        origin = provenance(device)
        earlier = cls.earlier(folder)
        if earlier is None:
            return cls(rows=[], **origin)
        names = ("cpu", "instructions", "gpu", "system")
        then, now = (
            {**{name: machine.get(name) for name in names}, **versions}
            for machine, versions in ((earlier.machine, earlier.versions), (origin["machine"], origin["versions"]))
        )
        for key in {**now, **then}:
            if then.get(key) != now.get(key):
                raise InputError(
                    "out", f"{folder} has results with {key} {then.get(key)}, not {now.get(key)}; choose another folder"
                )
        return replace(earlier, interrupted=None, **origin)

    def with_rows(self, rows: Sequence[BenchRow]) -> Self:
        """Return these results with more rows, which replace those of the same measurements."""
        return replace(self, rows=list({row.key: row for row in (*self.rows, *rows)}.values()))

    def problem(self) -> KeyboardInterrupt | None:
        return KeyboardInterrupt("the measurements so far are kept") if self.interrupted else None

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheet

        return [sheet(self.rows)]

    def sentences(self) -> Sequence[str]:
        from .report import headline

        return [headline(self.rows)]

    def more_files(self) -> dict[str, str | bytes]:
        return {"results.csv": as_csv(self.rows)}


def as_csv(rows: Sequence[BenchRow]) -> str:
    """Format rows as CSV, without the times of each round."""
    names = [column.name for column in fields(BenchRow) if column.name != "seconds"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return file.getvalue()
