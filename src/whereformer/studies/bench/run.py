"""Time attention: check every way, then time all ways in turns and compare them with plain attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from ...lab.jobs import threads
from ...lab.progress import Progress
from ...lab.provenance import commit
from ...lab.store import FILE
from .cases import BenchProblem, Case, make_problem
from .check import check, in_a_line
from .results import BenchResults, BenchRow
from .timing import Clock, expected_memory, memory_of, rounds_of
from .ways import CAUSAL, DENSE, FLOOR, Way, backend, make_step

BATCH = 4
LONG = 2048
"""With more keys than this, the default batch is one sequence."""


def summarize(row: BenchRow, seconds: Sequence[float], floor: Sequence[float]) -> BenchRow:
    """Add the timings of all rounds to a row; ``floor`` has plain attention's times in the same rounds."""
    ratios = [own / plain for own, plain in zip(seconds, floor, strict=True)]
    return replace(
        row,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        milliseconds=1000 * statistics.median(seconds),
        seconds=tuple(seconds),
    )


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What to measure, and how.

    Args:
        kinds, lengths, dtypes: the cases; each is measured forward and in training.
        backends: the backends to compare with plain attention, a dense bias and torch's causal attention.
        device: the device to measure.
        memory_limit: bytes; calls that would need more are not tried.
        peers: more ways to compare with.
        batch: sequences per call; None for 4, or 1 beyond 2048 keys.
        heads, head_dim: sizes of all cases.
        rounds: how many times each way is timed.
        threads: torch's threads on the CPU.
    """

    kinds: Sequence[str]
    lengths: Sequence[int]
    dtypes: Sequence[str]
    backends: Sequence[str]
    device: torch.device
    memory_limit: int
    peers: tuple[Way, ...] = ()
    batch: int | None = None
    heads: int = 12
    head_dim: int = 64
    rounds: int = 7
    threads: int = 1

    def cases(self) -> list[Case]:
        """Return all cases, in the order in which they are measured."""
        return [
            Case(kind, n, self.batch or (BATCH if n <= LONG else 1), self.heads, self.head_dim, dtype, training)
            for dtype in self.dtypes
            for kind in self.kinds
            for n in self.lengths
            for training in (False, True)
        ]

    def run(self, folder: Path, progress: Progress) -> BenchResults:
        """Measure all cases, and write the results after each.

        A repeated measurement replaces the old row. Other rows stay, so that lengths can be added later.

        Raises:
            InputError: if the folder has results from another machine or other versions, or its file is something else.
        """
        before = results = BenchResults.begin(folder, self.device)

        def keep(rows: Sequence[BenchRow]) -> None:
            nonlocal results
            results = results.with_rows(rows)
            results.write(folder / FILE)

        ways = [*map(backend, self.backends), DENSE, CAUSAL, *self.peers]
        try:
            Measurement(self, ways, keep, progress).run()
        except KeyboardInterrupt:
            if results is before:
                raise
            return results.interrupted()
        return results


class Measurement:
    """Checks and times all cases.

    Args:
        job: what to measure, and how.
        ways: the ways to compare with plain attention.
        keep: called with the rows of each case as soon as there are any, even if the case is interrupted.
        progress: shows the progress.
    """

    def __init__(
        self, job: BenchJob, ways: Sequence[Way], keep: Callable[[list[BenchRow]], None], progress: Progress
    ) -> None:
        self.job = job
        self.ways = (FLOOR, *ways)
        self.keep = keep
        self.progress = progress
        self.clock = Clock(job.device, job.threads)
        self.checked: dict[tuple[str, str, str, bool], float | str] = {}
        self.problem: BenchProblem | None = None

    def run(self) -> None:
        """Measure all cases."""
        cases = self.job.cases()
        self.progress.start(sum(self._work(case) * (self.job.rounds + 1) for case in cases))
        with threads(self.job.threads):
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
            self.progress.step(self._work(case) * self.job.rounds)
            return
        times: list[dict[Way, float]] = []
        try:
            for found in rounds_of(steps, self.clock.seconds, self.job.rounds):
                times.append(found)
                self.progress.step(self._work(case))
        finally:
            if times:
                for way in steps:
                    rows[way] = summarize(rows[way], [found[way] for found in times], [found[FLOOR] for found in times])
                self.keep(list(rows.values()))

    def _work(self, case: Case) -> int:
        """Return roughly how long a case takes, relative to others."""
        return case.batch * case.n * (case.n + 100) * (3 if case.training else 1)

    def _row(self, case: Case, way: Way) -> BenchRow:
        return BenchRow(
            case.kind,
            case.n,
            case.batch,
            case.heads,
            case.head_dim,
            case.dtype,
            case.direction,
            self.job.device.type,
            self.job.threads,
            way.name,
            measured=date.today().isoformat(),
            commit=commit(),
        )

    def _prepare(self, row: BenchRow, case: Case, way: Way) -> tuple[BenchRow, Callable[[], object] | None]:
        """Return the row with error and memory, and the step to time; if that fails, a row with a note, and None."""
        device = self.job.device
        verdict = self._check(case, way)
        if isinstance(verdict, str):
            return replace(row, note=verdict), None
        row = replace(row, error=verdict)
        try:
            scores = 4 * case.n**2 * (case.batch * case.heads + case.head_dim)
            if 10 * scores > self.job.memory_limit:  # smaller cases can't need too much
                needed = expected_memory(way, case, device)
                if needed > self.job.memory_limit:
                    note = f"would need {needed / 2**30:.1f} GiB, the limit is {self.job.memory_limit / 2**30:.1f}"
                    return replace(row, note=note), None
            step = make_step(way, self._problem(case))
            step()  # the first call compiles and fills caches
            return replace(row, memory=memory_of(step, device)), step
        except Exception as error:  # a peer's failure is also a result
            return replace(row, note=in_a_line(error)), None

    def _problem(self, case: Case) -> BenchProblem:
        """Return the case's tensors, the same for all ways."""
        if self.problem is None or self.problem.case != case:
            self.problem = None  # frees its memory before the next one needs any
            self.problem = make_problem(case, self.job.device)
        return self.problem

    def _check(self, case: Case, way: Way) -> float | str:
        """Return the way's error, or the reason why it isn't timed; checked once for all lengths."""
        key = (case.kind, case.dtype, way.name, case.training)
        if key not in self.checked:
            try:
                self.checked[key] = check(way, case, self.job.device)
            except Exception as error:
                self.checked[key] = in_a_line(error)
        return self.checked[key]
