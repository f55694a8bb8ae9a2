"""The command ``whereformer compare``: train and rank position methods on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from rich.console import Console

from ..errors import InputError
from ..experiments.compare.settings import CompareTraining
from ..experiments.settings import check_positive, check_range
from .arguments import MOST_JOBS, find_device


@dataclass(frozen=True)
class Compare:
    """Which position method suits your text? Trains the same small encoder once per method and compares them.

    Without --data, the text is the documentation that comes with Python: about 2 MB, and nothing is downloaded. All
    methods start from the same weights and see the same batches and masks, so they differ only in position.

    Writes report.html (open it in a browser), results.json and the trained models (models/METHOD-SEED, for
    EncoderForMaskedLM.from_pretrained). After an interruption, the same command does the runs that are missing.
    """

    FLAGS: ClassVar = {"num_attention_heads": "--num-heads"}

    positions: str | None = None
    """Methods to compare, separated by commas. "a+b" uses both at once; "all" means every method. Default: none,
    sinusoidal, learned, rope, t5, shaw, tisa, learned+tisa (with --quick: none, learned, rope, tisa)."""

    data: tuple[str, ...] = ()
    """Text to train on: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md, .rst, .parquet,
    .jsonl. Default: the documentation that comes with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

    out: Path = Path("runs/compare")
    """Folder for the results."""

    quick: bool = False
    """Take a first look in about a minute, with fewer methods and steps. Small differences will not show."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. "auto" is a GPU if there is one."""

    jobs: int | None = None
    """Number of runs at a time, each in a process of its own. On the CPU they share the threads. Default: one for each
    GPU, or 1 on the CPU."""

    minutes: float | None = None
    """Wall time for the whole comparison, instead of --steps. The number of steps follows from a short measurement, and
    is the same for all methods."""

    training: CompareTraining = field(default_factory=CompareTraining)

    def run(self, console: Console) -> None:
        """Train, judge and time every method, then print the ranking and write the report."""
        from ..experiments.compare.budget import find_budget
        from ..experiments.compare.outlook import AHEAD
        from ..experiments.compare.prepare import TextSource, check_positions, prepare_job
        from ..experiments.compare.ranking import rank
        from ..experiments.compare.report import write_report
        from ..experiments.compare.run import DEFAULT_POSITIONS, DEFAULT_STEPS, QUICK_POSITIONS, QUICK_STEPS, compare
        from ..positions import position_names
        from ..runs.folder import open_folder
        from ..runs.jobs import number_of_jobs
        from .tables.compare import print_ranking, print_unsettled
        from .terminal import Bar, say

        check_range(self, jobs=(1, MOST_JOBS))
        check_positive(self, "minutes")
        if self.minutes is not None and self.training.steps is not None:
            raise InputError("minutes", "expected either `minutes` or `steps`, got both")
        names: Sequence[str] = QUICK_POSITIONS if self.quick else DEFAULT_POSITIONS
        if self.positions is not None:
            names = position_names() if self.positions == "all" else self.positions.split(",")
        training = self.training.checked()
        sizes = training.sizes(QUICK_STEPS if self.quick else DEFAULT_STEPS)
        names = check_positions(names, sizes)
        device = find_device(self.device)
        seeds, budget = training.all_seeds, None
        with open_folder(self.out):
            if self.minutes is not None:
                with console.status("measuring the speed of each method"):
                    budget = find_budget(self.out, self.minutes, sizes, names, training.seeds, device)
                sizes, seeds = replace(sizes, steps=budget.steps), training.seeds_from(budget.seeds)
                console.print(
                    f"{self.minutes:g} minutes: {budget.steps:,} steps for each method, seeds: {budget.seeds}",
                    highlight=False,
                )
            with console.status("reading the text and training a tokenizer"):
                job = prepare_job(TextSource(self.data, self.column), sizes, names, seeds, device, self.out)
                job = replace(job, budget=budget, halving=budget is not None and training.seeds is None)
            text = job.text.facts
            console.print(
                f"{text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from {text.source}; "
                f"guessing by frequency: loss {text.unigram_entropy:.2f}",
                highlight=False,
            )
            with Bar(console) as progress:
                results = compare(job, self.out, progress, jobs=number_of_jobs(self.jobs, device))
            if not results.runs:
                raise InputError("learning_rate", "; ".join(results.failed.values()))
            ranking = rank(results)
            report = self.out / "report.html"
            write_report(results, ranking, report)
            print_ranking(console, ranking.rows, sizes.length, "CPU time" if device.type == "cpu" else "time")
            console.print(ranking.verdict, style="bold", highlight=False)
            print_unsettled(console, ranking.unsettled, AHEAD)
            say(console, f"wrote {report} (open it in a browser) and {self.out / 'results.json'}")
            if results.failed:
                raise InputError("learning_rate", "; ".join(results.failed.values()))
