"""Time attention: check every way, then time all ways in turns and compare them with plain attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date

from ...lab.jobs import threads
from ...lab.progress import Progress
from ...lab.provenance import commit
from .cases import BenchProblem, Case, make_problem
from .check import check, in_a_line
from .results import BenchRow
from .settings import BenchSettings
from .timing import Clock, expected_memory, memory_of, rounds_of
from .ways import FLOOR, Way, make_step


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


class Measurement:
    """Checks and times all cases.

    Args:
        settings: what to measure, and how.
        ways: the ways to compare with plain attention.
        keep: called with the rows of each case as soon as there are any, even if the case is interrupted.
        progress: shows the progress.
    """

    def __init__(
        self, settings: BenchSettings, ways: Sequence[Way], keep: Callable[[list[BenchRow]], None], progress: Progress
    ) -> None:
        self.settings = settings
        self.ways = (FLOOR, *ways)
        self.keep = keep
        self.progress = progress
        self.clock = Clock(settings.device, settings.threads)
        self.checked: dict[tuple[str, str, str, bool], float | str] = {}
        self.problem: BenchProblem | None = None

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
            self.settings.device.type,
            self.settings.threads,
            way.name,
            measured=date.today().isoformat(),
            commit=commit(),
        )

    def _prepare(self, row: BenchRow, case: Case, way: Way) -> tuple[BenchRow, Callable[[], object] | None]:
        """Return the row with error and memory, and the step to time; if that fails, a row with a note, and None."""
        device = self.settings.device
        verdict = self._check(case, way)
        if isinstance(verdict, str):
            return replace(row, note=verdict), None
        row = replace(row, error=verdict)
        try:
            scores = 4 * case.n**2 * (case.batch * case.heads + case.head_dim)
            if 10 * scores > self.settings.memory_limit:  # smaller cases can't need too much
                needed = expected_memory(way, case, device)
                if needed > self.settings.memory_limit:
                    note = f"would need {needed / 2**30:.1f} GiB, the limit is {self.settings.memory_limit / 2**30:.1f}"
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
            self.problem = make_problem(case, self.settings.device)
        return self.problem

    def _check(self, case: Case, way: Way) -> float | str:
        """Return the way's error, or the reason why it isn't timed; checked once for all lengths."""
        key = (case.kind, case.dtype, way.name, case.training)
        if key not in self.checked:
            try:
                self.checked[key] = check(way, case, self.settings.device)
            except Exception as error:
                self.checked[key] = in_a_line(error)
        return self.checked[key]
