"""Timing attention: every way is checked before it is timed, and compared with plain attention in the same round."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import InputError
from ...files import write_atomically
from ...runs.machine import machine
from ...runs.memory import peak_memory
from ...runs.progress import Progress
from ...runs.provenance import commit, versions
from .cases import FLOOR, KINDS, Case, Problem, Way, backend, make_problem, make_step

FORMAT = 1
CHECKED_LENGTH = 160
"""Keys when a way is checked: beyond the reach of every table with one."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""How far the norm of an error may be from zero, relative to the norm of what is right."""

SHORTEST_MEASUREMENT = 0.02
"""Seconds; shorter calls are repeated within a measurement."""

BATCH = 4
LONG = 2048
"""With more keys than this, the default batch is one sequence."""

METHOD = (
    "Each way is checked against the float64 reference, output and gradients, at a small length first. Then every "
    "round times each way once, in an order that changes, in one process; short calls are repeated until they last "
    "20 ms. A ratio is a way's time by that of torch's attention without any position in the same round; median, "
    "lowest and highest over the rounds. Time is the process's CPU time with one thread, wall time with more, and "
    "by events on a GPU. Memory is what a call allocates at its peak beyond its inputs, counted in a call of its own."
)

Name = TypeVar("Name")
Work = TypeVar("Work")
RowKey = tuple[str, int, int, int, int, str, str, str, int, str]


@dataclass(frozen=True)
class Settings:
    """What to measure and how.

    Args:
        kinds, lengths, dtypes: the cases, each forward and in training.
        batch: None for 4, and 1 beyond 2048 keys.
        heads, head_dim: of all cases.
        rounds: how often each way is timed.
        threads: of torch on the CPU.
        memory_limit: bytes; what would need more is not tried.
        device: where.
    """

    kinds: Sequence[str]
    lengths: Sequence[int]
    dtypes: Sequence[str]
    device: torch.device
    memory_limit: int
    batch: int | None = None
    heads: int = 12
    head_dim: int = 64
    rounds: int = 7
    threads: int = 1

    def cases(self) -> list[Case]:
        """All cases, in the order of measuring."""
        return [
            Case(kind, n, self.batch or (BATCH if n <= LONG else 1), self.heads, self.head_dim, dtype, training)
            for dtype in self.dtypes
            for kind in self.kinds
            for n in self.lengths
            for training in (False, True)
        ]


@dataclass(frozen=True)
class Row:
    """What one way took for one case.

    Args:
        terms, n, batch, heads, head_dim, dtype, direction: the case.
        device, threads: "cpu" or "cuda", and torch's threads.
        way: its name.
        ratio, lowest, highest: median and range of time relative to plain attention; None if it wasn't timed.
        milliseconds: a call's median time.
        memory: bytes at the peak, beyond the inputs.
        error: the largest relative error of output and gradients at the small length.
        note: why something is missing, or empty.
        measured: the day.
        commit: what was measured, see :func:`whereformer.runs.provenance.commit`.
        seconds: a call's time in each round.
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
        """What was measured: two rows with the same key are the same measurement at different times."""
        case = (self.terms, self.n, self.batch, self.heads, self.head_dim, self.dtype, self.direction)
        return (*case, self.device, self.threads, self.way)


class WrongError(Exception):
    """A way doesn't compute what the reference does."""


def check(way: Way, case: Case, device: torch.device) -> float:
    """The largest relative error of a way's output and gradients, against the reference in float64 at a small length.

    Raises:
        WrongError: if it is too large.
        Exception: what the way raises.
    """
    problem = make_problem(replace(case, n=CHECKED_LENGTH, batch=2, heads=2), device)
    wanted = make_step(backend("reference", way.ignores_terms), problem.exact())()
    found = make_step(way, problem)()
    names = ["output", "query", "key", "value", *problem.parameters][: len(wanted)]
    worst = 0.0
    for name, got, want in zip(names, found, wanted, strict=True):
        if got.shape != want.shape:
            raise WrongError(f"wrong: {name} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
        error = relative_error(got, want)
        if not error <= TOLERANCE[case.dtype]:
            what = name if name == "output" else f"gradient of {name}"
            raise WrongError(f"wrong: {what} is off by {error:.1e} of its size")
        worst = max(worst, error)
    return worst


def relative_error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference by that of what is wanted."""
    size = float(want.norm())
    off = float((got.to(want) - want).norm())
    return off / size if size else off


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads, and afterwards set it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Clock:
    """Seconds that a call takes: a GPU's own, the CPU time of one thread, or the wall time of several."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.now = time.process_time if threads == 1 else time.perf_counter

    def seconds(self, step: Callable[[], object]) -> float:
        """The mean over as many calls in a row as it takes to measure well."""
        calls = 1
        while True:
            elapsed = self._elapsed(step, calls)
            if elapsed >= SHORTEST_MEASUREMENT:
                return elapsed / calls
            calls = math.ceil(calls * min(1000.0, 1.2 * SHORTEST_MEASUREMENT / max(elapsed, 1e-9)))

    def _elapsed(self, step: Callable[[], object], calls: int) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            start.record()
            for _ in range(calls):
                step()
            end.record()
            torch.cuda.synchronize(self.device)
            return start.elapsed_time(end) / 1000
        started = self.now()
        for _ in range(calls):
            step()
        return self.now() - started


def rounds_of(steps: Mapping[Name, Work], seconds: Callable[[Work], float], count: int) -> Iterator[dict[Name, float]]:
    """The seconds of all steps, round by round, in an order that changes."""
    order = random.Random(0)
    for _ in range(count):
        yield {name: seconds(steps[name]) for name in order.sample(list(steps), len(steps))}


def memory_of(step: Callable[[], object], device: torch.device) -> int:
    """Peak memory of a call; what a thread keeps for its next call counts, so the call has a thread of its own."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(peak_memory, step, device).result()


def expected_memory(way: Way, case: Case, device: torch.device) -> int:
    """What inputs and a call would need, from what they need at two smaller lengths that surely fit."""

    def needed(n: int) -> int:
        problem = make_problem(replace(case, n=n), device)
        return sum(map(_bytes, problem.inputs)) + memory_of(make_step(way, problem), device)

    long = max(2, min(1024, case.n // 4))
    short = long // 2
    return extrapolate((short, needed(short)), (long, needed(long)), case.n)


def extrapolate(short: tuple[int, float], long: tuple[int, float], n: int) -> int:
    """``a n + b n**2`` at ``n``, through two points; a line through the longer where b would be below 0."""
    (n_1, y_1), (n_2, y_2) = short, long
    b = max(0.0, (y_2 / n_2 - y_1 / n_1) / (n_2 - n_1))
    a = max(0.0, y_2 / n_2 - b * n_2)
    return math.ceil(a * n + b * n * n)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def growth(points: Mapping[int, float]) -> float | None:
    """The exponent by which values grow with length: the slope of log value over log length; None for one point."""
    logs = [(math.log(n), math.log(value)) for n, value in points.items() if value > 0]
    if len(logs) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def in_a_line(error: BaseException) -> str:
    """An exception as one line for a table's note."""
    message = " ".join(str(error).split())
    if isinstance(error, WrongError):
        return message
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def summarise(row: Row, seconds: Sequence[float], floor: Sequence[float]) -> Row:
    """The row with the figures of its rounds; ``floor`` has plain attention's times in the same rounds."""
    ratios = [own / plain for own, plain in zip(seconds, floor, strict=True)]
    return replace(
        row,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        milliseconds=1000 * statistics.median(seconds),
        seconds=tuple(seconds),
    )


class Bench:
    """Measures cases.

    Args:
        settings: what and how.
        ways: what to compare with plain attention.
        keep: is given the rows of each case as soon as there are any, also if the case is interrupted.
        progress: is told of every round.
    """

    def __init__(
        self, settings: Settings, ways: Sequence[Way], keep: Callable[[list[Row]], None], progress: Progress
    ) -> None:
        self.settings = settings
        self.ways = (FLOOR, *ways)
        self.keep = keep
        self.progress = progress
        self.clock = Clock(settings.device, settings.threads)
        self.checked: dict[tuple[str, str, str, bool], float | str] = {}
        self.problem: Problem | None = None

    def run(self) -> None:
        """Measure all cases."""
        cases = self.settings.cases()
        self.progress.start(sum(self._work(case) * (self.settings.rounds + 1) for case in cases))
        with threads(self.settings.threads):
            for case in cases:
                self.progress.begin(f"{case.kind} {case.dtype} n={case.n} {case.direction}")
                self.measure(case)

    def measure(self, case: Case) -> None:
        """Check and time all ways that can compute a case, and keep the rows."""
        rows = {way: self._row(case, way) for way in self.ways if way.does(case.kind)}
        steps: dict[Way, Callable[[], object]] = {}
        for way in rows:
            rows[way], step = self._prepare(rows[way], case, way)
            if step is not None:
                steps[way] = step
        self.progress.step(self._work(case))
        if FLOOR not in steps:
            why = f"nothing to compare with: {rows[FLOOR].note}"
            self.keep([row if row.note else replace(row, note=why) for row in rows.values()])
            self.progress.step(self._work(case) * self.settings.rounds)
            return
        times: list[dict[Way, float]] = []
        try:
            for found in rounds_of(steps, self.clock.seconds, self.settings.rounds):
                times.append(found)
                self.progress.step(self._work(case))
        finally:
            if times:
                for way in steps:
                    rows[way] = summarise(rows[way], [found[way] for found in times], [found[FLOOR] for found in times])
                self.keep(list(rows.values()))

    def _work(self, case: Case) -> int:
        """Roughly how long a case takes, relative to others."""
        return case.batch * case.n * (case.n + 100) * (3 if case.training else 1)

    def _row(self, case: Case, way: Way) -> Row:
        return Row(
            case.kind,
            case.n,
            case.batch,
            case.heads,
            case.head_dim,
            case.dtype,
            case.direction,
            self.settings.device.type,
            self.settings.threads,
            way.name,
            measured=date.today().isoformat(),
            commit=commit(),
        )

    def _prepare(self, row: Row, case: Case, way: Way) -> tuple[Row, Callable[[], object] | None]:
        """The row with error and memory, and what is to be timed; None and a note if it can't be."""
        device = self.settings.device
        verdict = self._check(case, way)
        if isinstance(verdict, str):
            return replace(row, note=verdict), None
        row = replace(row, error=verdict)
        try:
            scores = 4 * case.n**2 * (case.batch * case.heads + case.head_dim)
            if 10 * scores > self.settings.memory_limit:  # or it can't need too much
                needed = expected_memory(way, case, device)
                if needed > self.settings.memory_limit:
                    note = f"would need {needed / 2**30:.1f} GiB, the limit is {self.settings.memory_limit / 2**30:.1f}"
                    return replace(row, note=note), None
            step = make_step(way, self._problem(case))
            step()  # what is compiled or kept in caches comes with the first call
            return replace(row, memory=memory_of(step, device)), step
        except Exception as error:  # a peer's failure is a result as well
            return replace(row, note=in_a_line(error)), None

    def _problem(self, case: Case) -> Problem:
        """The case's tensors, the same for all ways."""
        if self.problem is None or self.problem.case != case:
            self.problem = None  # its memory goes before the next one's comes
            self.problem = make_problem(case, self.settings.device)
        return self.problem

    def _check(self, case: Case, way: Way) -> float | str:
        """The way's error, or why it isn't timed; found out once for all lengths."""
        key = (case.kind, case.dtype, way.name, case.training)
        if key not in self.checked:
            try:
                self.checked[key] = check(way, case, self.settings.device)
            except Exception as error:
                self.checked[key] = in_a_line(error)
        return self.checked[key]


class Results:
    """``results.json`` and ``results.csv`` of a folder, written after every case.

    What is measured again replaces what the folder has of it; other rows stay, so that long lengths can be added later.

    Args:
        out: the folder.
        device: what is measured on.

    Raises:
        InputError: if the folder has results of another machine or other versions, or something else of that name.
    """

    def __init__(self, out: Path, device: torch.device) -> None:
        self.path = out / "results.json"
        self.csv = out / "results.csv"
        self.facts = {"machine": describe_machine(device), "versions": versions()}
        self.rows: dict[RowKey, Row] = {}
        if not self.path.exists():
            return
        found, facts = load(self.path)
        for name, value in self.facts.items():
            different = [key for key in {**value, **facts[name]} if value.get(key) != facts[name].get(key)]
            if different:
                key = different[0]
                raise InputError(
                    "out",
                    f"{out} has results with {key} {facts[name].get(key)}, not {value.get(key)}; choose another folder",
                )
        self.rows = {row.key: row for row in found}

    def add(self, rows: Sequence[Row]) -> None:
        """Keep rows, and write both files."""
        self.rows.update({row.key: row for row in rows})
        self.save()

    def save(self) -> None:
        """Write both files."""
        rows = list(self.rows.values())
        data = {
            "format": FORMAT,
            "date": date.today().isoformat(),
            "commit": commit(),
            **self.facts,
            "method": METHOD,
            "terms": {kind: KINDS[kind].about for kind in dict.fromkeys(row.terms for row in rows) if kind in KINDS},
            "memory_growth": memory_growth(rows),
            "rows": [asdict(row) for row in rows],
        }
        write_atomically(self.path, json.dumps(data, indent=1, allow_nan=False) + "\n")
        write_atomically(self.csv, as_csv(rows))


def load(path: Path) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """The rows of a ``results.json``, and its machine and versions.

    Raises:
        InputError: if it is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError
        rows = [Row(**{**row, "seconds": tuple(row["seconds"])}) for row in data["rows"]]
        return rows, {name: dict(data[name]) for name in ("machine", "versions")}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "out", f"{path} is not a complete result of this command; move it away or choose another folder"
        ) from None


def as_csv(rows: Sequence[Row]) -> str:
    """A line a row, without the times of each round."""
    names = [column.name for column in fields(Row) if column.name != "seconds"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return file.getvalue()


def memory_growth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By which exponent of the length each way's memory grows, where more than one length has the same batch."""
    points: dict[tuple[str, str, str, str, int], dict[int, float]] = {}
    for row in rows:
        if row.memory:
            key = (row.terms, row.dtype, row.direction, row.way, row.batch)
            points.setdefault(key, {})[row.n] = row.memory
    names = ("terms", "dtype", "direction", "way", "batch")
    return [
        {**dict(zip(names, key, strict=True)), "lengths": sorted(found), "exponent": round(exponent, 3)}
        for key, found in points.items()
        if (exponent := growth(found)) is not None
    ]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers are measured on."""
    facts = machine(device)
    return {name: facts[name] for name in ("cpu", "gpu", "system") if name in facts} | {"cores": os.cpu_count()}


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    available: int = psutil.virtual_memory().available
    return available


def check_backend(name: str, settings: Settings) -> None:
    """Raise unless a backend can compute a small case here, in each dtype.

    Raises:
        InputError: with the backend's own reason.
    """
    for dtype in settings.dtypes:
        case = Case("bias", 16, 1, 1, settings.head_dim, dtype, False)
        try:
            make_step(backend(name), make_problem(case, settings.device))()
        except Exception as error:
            raise InputError("backends", f"{name} can't run here: {in_a_line(error)}") from None
