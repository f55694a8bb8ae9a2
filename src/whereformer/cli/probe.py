"""The command ``whereformer probe``: which synthetic tasks each position method can learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from ..studies.probe.settings import ProbeTraining
from ..studies.settings import check_range, listed
from .arguments import MOST_JOBS, find_device


@dataclass(frozen=True)
class Probe:
    """What can each position method do? Synthetic tasks with known answers tell in minutes.

    Trains a small encoder per method and task, and judges it at the trained length and at two and four times it. A task
    needs absolute positions, relative offsets, order, or content only; the table shows the accuracy of guessing without
    positions, so that you see at once what a method has. The tasks: copy, previous (the left neighbor), match (what
    followed the last occurrence of this symbol), reverse, sort, brackets (how many are open), passkey (a key in noise).

    Takes less than ten minutes on two cores. Writes report.html (open it in a browser) and results.json. After an
    interruption, the same command does the runs that are missing.
    """

    positions: str | None = None
    """Methods to try, separated by commas. "a+b" uses both at once; "all" means every method. Default: none, learned,
    rope, alibi, t5, shaw, tisa (with --quick: none, learned, rope, tisa)."""

    tasks: str | None = None
    """Tasks to try, separated by commas. Default: all."""

    out: Path = Path("runs/probe")
    """Folder for the results."""

    quick: bool = False
    """Take a first look in about a minute, with fewer methods and steps. Hard tasks are then not learned."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. "auto" is a GPU if there is one."""

    jobs: int | None = None
    """Number of runs at a time, each in a process of its own. On the CPU they share the threads. Default: one for each
    GPU, or for each thread on the CPU, but there at most 8."""

    training: ProbeTraining = field(default_factory=ProbeTraining)

    def run(self, console: Console) -> None:
        """Train and judge every method on every task, then print the tables and write the report."""
        from ..lab.folder import open_folder
        from ..lab.jobs import number_of_jobs
        from ..lab.report.page import listed as in_words
        from ..positions import position_names
        from ..studies.probe.judgment import about_seeds, tables, verdict
        from ..studies.probe.report import write_report
        from ..studies.probe.run import (
            DEFAULT_POSITIONS,
            DEFAULT_STEPS,
            QUICK_POSITIONS,
            QUICK_STEPS,
            ProbeJob,
            probe,
        )
        from ..studies.probe.tasks import TASKS
        from .tables.probe import print_probes
        from .terminal import Bar, say

        check_range(self, jobs=(1, MOST_JOBS))
        sizes = self.training.sizes(QUICK_STEPS if self.quick else DEFAULT_STEPS)
        tasks = tuple(TASKS) if self.tasks is None else listed("tasks", self.tasks)
        positions: tuple[str, ...] = QUICK_POSITIONS if self.quick else DEFAULT_POSITIONS
        if self.positions is not None:
            every = self.positions.strip() == "all"
            positions = tuple(position_names()) if every else listed("positions", self.positions)
        device = find_device(self.device)
        job = ProbeJob.of(sizes, tasks, positions, self.training.all_seeds, device)
        with open_folder(self.out):
            with Bar(console) as progress:
                results = probe(job, self.out, progress, number_of_jobs(self.jobs, device, small=True))
            found = tables(results)
            report = self.out / "report.html"
            write_report(results, found, report)
            print_probes(console, found)
            for sentence in verdict(found, in_words):
                console.print(sentence, style="bold", highlight=False)
            console.print(about_seeds(results), highlight=False)
            say(console, f"wrote {report} (open it in a browser) and {self.out / 'results.json'}")
