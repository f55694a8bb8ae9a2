"""The command ``whereformer properties``: measure Table 1 of the TISA paper."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import InputError
from ..lab.options import MOST_JOBS, check_range
from ..studies.compare.settings import Compare

if TYPE_CHECKING:
    from ..studies.properties.comparison import Comparison
    from ..studies.properties.results import PropertiesResults
    from ..studies.properties.ticks import MethodTicks


@dataclass(frozen=True)
class Properties:
    """What can each position method do? Table 1 of the TISA paper, measured instead of claimed.

    The command answers six questions about every method. Can it read text longer than its training text (inductive)? Do
    gradients reach its parameters (data-driven)? Are there few, and does their number not grow (parameter efficient)?
    Does a common shift of all positions leave the output unchanged (translation invariant)? Does the longest chain of
    operations not grow with the length (parallelizable)? Is its effect on the scores a curve over offsets
    (interpretable)? A threshold, which the output states, decides each tick. Where a tick differs from the paper's, the
    output says why.

    The command trains a small encoder for each method, as `whereformer compare` does, in about ten minutes on two cores
    (almost half of that for floater), or uses the models of a finished comparison. Writes results.json, results.md and
    report.html. After an interruption, the same command does the rest.
    """

    positions: str | None = None
    """Methods to judge, separated by commas. "a+b" uses both at once. Default: every method, or all that --results
    has."""

    results: Path | None = None
    """The folder of a finished `whereformer compare`, whose losses and models are used instead of training."""

    data: tuple[str, ...] = ()
    """Text to train on: files or folders with .txt, .md, .rst, .parquet, .jsonl. Default: the documentation that
    comes with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

    out: Path = Path("runs/properties")
    """Folder for the results."""

    quick: bool = False
    """Take a first look in about two minutes. Methods then learn little that longer text could spoil."""

    length: int | None = None
    """Tokens in a training window. The longer text has four times this length. Default: 64."""

    steps: int | None = None
    """Training steps of each method. Default: 800 (with --quick: 200)."""

    seeds: int | None = None
    """Number of seeds to train with. Medians decide "inductive"; the rest is measured with the first seed.
    Default: 1."""

    seed: int | None = None
    """The first seed. Default: 0."""

    jobs: int = 1
    """Number of methods at a time, each in a process of its own; they share the threads. Default: 1."""

    def run(self, console: Console) -> None:
        """Measure every method, then print the table and write the report."""
        from ..lab.folder import open_folder
        from ..lab.terminal import Bar
        from ..studies.properties.comparison import load_comparison
        from ..studies.properties.run import measure_properties
        from .tables.properties import print_properties

        check_range(self, jobs=(1, MOST_JOBS))
        names = self._names()
        for name in ("data", "column", "quick", "length", "steps", "seeds", "seed"):
            if self.results is not None and getattr(self, name) not in (None, (), False):
                raise InputError(name, "only without `results`, whose models are already trained")
        with ExitStack() as stack:
            if self.results is None:
                comparison, names = self._train(console, names, stack)
            else:
                with console.status("reading the comparison and its text"):
                    comparison, names = load_comparison(self.results, names)
                stack.enter_context(open_folder(self.out))
            with Bar(console) as progress:
                results, rows = measure_properties(comparison, names, self.out, progress, self.jobs)
            print_properties(console, rows)
            self._write(console, results, rows)

    def _names(self) -> list[str] | None:
        if self.positions is None:
            return None
        from ..lab.encoders import BASELINE
        from ..lab.options import listed

        names = list(listed("positions", self.positions))
        if BASELINE in names:
            raise InputError("positions", f"{BASELINE!r} has no properties; it is what the others are compared with")
        return names

    def _train(self, console: Console, names: list[str] | None, stack: ExitStack) -> tuple[Comparison, list[str]]:
        """Train a comparison in the output folder."""
        from ..lab.encoders import BASELINE
        from ..lab.folder import open_folder
        from ..lab.terminal import Bar
        from ..positions import position_names
        from ..studies.properties.comparison import Comparison
        from ..studies.properties.run import DEFAULT_STEPS, QUICK_STEPS

        given: dict[str, Any] = {name: getattr(self, name) for name in ("length", "seeds", "seed")}
        folder = self.out / "comparison"
        job = Compare(
            positions=",".join([BASELINE, *(names or [name for name in position_names() if name != BASELINE])]),
            data=self.data,
            column=self.column,
            out=folder,
            steps=(QUICK_STEPS if self.quick else DEFAULT_STEPS) if self.steps is None else self.steps,
            # Six properties need no search for the best learning rate.
            rate_factors="1",
            device="cpu",
            jobs=self.jobs,
            **{name: value for name, value in given.items() if value is not None},
        ).job()
        stack.enter_context(open_folder(self.out))
        stack.enter_context(open_folder(folder))
        with console.status("reading the text and training a tokenizer"):
            material = job.prepare(folder)
        with Bar(console) as progress:
            results = replace(job, speed=False).complete(material, folder, progress)
        return Comparison(folder, results, material.held_out), [name for name in job.positions if name != BASELINE]

    def _write(self, console: Console, results: PropertiesResults, rows: list[MethodTicks]) -> None:
        """Write the table as Markdown and as an HTML page."""
        from ..files import write_atomically
        from ..lab.terminal import say
        from ..studies.properties import report

        files = {"results.md": report.build_markdown(results, rows), "report.html": report.build_report(results, rows)}
        for name, text in files.items():
            write_atomically(self.out / name, text)
        written = " and ".join(str(self.out / name) for name in ("results.json", "results.md"))
        say(console, f"wrote {self.out / 'report.html'} (open it in a browser), {written}")
