"""Time attention: check every way, then time all ways in turns and compare them with plain attention."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...lab.jobs import threads
from ...lab.progress import Progress
from ...lab.provenance import commit
from ...lab.store import FILE
from .cases import BenchProblem, Case, make_problem
from .results import BenchResults, BenchRow
from .timing import Clock, expected_memory, memory_of
from .ways import FLOOR, Way, check, in_a_line, make_step

Keep = Callable[[Sequence[BenchRow]], None]
"""Called with the rows of each case as soon as there are any, even if the case is interrupted."""


def _work(case: Case) -> int:
    """Return roughly how long a case takes, relative to others."""
    return case.batch * case.n * (case.n + 100) * (3 if case.direction == "training" else 1)


def timings(seconds: Sequence[float], floor: Sequence[float]) -> dict[str, Any]:
    """Return a row's timings over all rounds; ``floor`` has plain attention's times in the same rounds."""
    ratios = [own / plain for own, plain in zip(seconds, floor, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "milliseconds": 1000 * statistics.median(seconds),
        "seconds": tuple(seconds),
    }


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What to measure, and how.

    Args:
        cases: the cases, in the order in which they are measured.
        ways: the ways to compare with plain attention.
        device: the device to measure.
        memory_limit: bytes; calls that would need more are not tried.
        rounds: how many times each way is timed.
        threads: torch's threads on the CPU.
    """

    cases: Sequence[Case]
    ways: Sequence[Way]
    device: torch.device
    memory_limit: int
    rounds: int
    threads: int

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

        try:
            self.measure(keep, progress)
        except KeyboardInterrupt:
            if results is before:
                raise
            return replace(results, interrupted=True)
        return results

    def measure(self, keep: Keep, progress: Progress) -> None:
        """Check and time all ways on all cases."""
        progress.start(sum(map(_work, self.cases)) * (self.rounds + 1))
        with threads(self.threads):
            for case in self.cases:
                progress.begin(f"{case.terms} {case.dtype} n={case.n} {case.direction}")
                self._measure(case, keep, progress)

    def _measure(self, case: Case, keep: Keep, progress: Progress) -> None:
        facts: dict[str, Any] = {"measured": date.today().isoformat(), "commit": commit()}
        rows: dict[Way, BenchRow] = {}
        steps: dict[Way, Callable[[], object]] = {}
        problem = cache(partial(make_problem, case, self.device))  # made once, if it fits into memory
        for way in (FLOOR, *self.ways):
            if way.does(case.terms):
                found, step = self._prepare(case, way, problem)
                rows[way] = BenchRow(
                    **vars(case), device=self.device.type, threads=self.threads, way=way.name, **facts, **found
                )
                if step is not None:
                    steps[way] = step
        progress.step(_work(case))
        if FLOOR not in steps:
            why = f"nothing to compare with: {rows[FLOOR].note}"
            keep([replace(row, note=row.note or why) for row in rows.values()])
            progress.step(_work(case) * self.rounds)
            return
        clock, order = Clock(self.device, self.threads), random.Random(0)
        rounds: list[dict[Way, float]] = []
        try:
            for _ in range(self.rounds):
                rounds.append({way: clock.seconds(steps[way]) for way in order.sample(list(steps), len(steps))})
                progress.step(_work(case))
        finally:
            if rounds:
                seconds = {way: [each[way] for each in rounds] for way in steps}
                timed = {way: replace(rows[way], **timings(seconds[way], seconds[FLOOR])) for way in steps}
                keep(list((rows | timed).values()))

    def _prepare(
        self, case: Case, way: Way, problem: Callable[[], BenchProblem]
    ) -> tuple[dict[str, Any], Callable[[], object] | None]:
        """Return error and memory, or a note why there is none, and the step to time, if it can be timed."""
        error = check(way, case.terms, case.head_dim, case.dtype, case.direction, self.device)
        if isinstance(error, str):
            return {"note": error}, None
        limit, scores = self.memory_limit, 4 * case.n**2 * (case.batch * case.heads + case.head_dim)
        try:
            # Smaller cases can't need too much.
            if 10 * scores > limit and (needed := expected_memory(way, case, self.device)) > limit:
                note = f"would need {needed / 2**30:.1f} GiB, the limit is {limit / 2**30:.1f}"
                return {"error": error, "note": note}, None
            step = make_step(way, problem())
            step()  # the first call compiles and fills caches
            return {"error": error, "memory": memory_of(step, self.device)}, step
        except Exception as failure:  # another library's failure is also a result
            return {"error": error, "note": in_a_line(failure)}, None
