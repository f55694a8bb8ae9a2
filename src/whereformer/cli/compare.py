"""The command ``whereformer compare``: train and rank position methods on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from rich.console import Console

from ..errors import InputError
from ..lab.options import MOST_JOBS, MOST_SEEDS, check_positive, check_range, find_device
from ..studies.compare.settings import CompareTraining
from ..studies.labeled import TableSettings

TABLE_SEEDS = 3
"""Number of seeds with a labeled table."""


@dataclass(frozen=True)
class Compare:
    """Which position method suits your text? Trains the same small encoder once per method and compares them.

    Without --data, the text is the documentation that comes with Python: about 2 MB, and nothing is downloaded. All
    methods start from the same weights and see the same batches and masks, so they differ only in position.

    With --train, --validation, --text and --label, the text is that of a table of yours: after it, each method is
    fine-tuned on the table's labels, and ranked by how well it predicts those of the validation rows.

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
    GPU, or for each thread on the CPU, but there at most 8."""

    minutes: float | None = None
    """Wall time for the whole comparison, instead of --steps. The number of steps follows from a short measurement, and
    is the same for all methods. A tenth of the time is kept for all but training; a large text takes longer to read."""

    table: TableSettings = field(default_factory=TableSettings)
    training: CompareTraining = field(default_factory=CompareTraining)

    def run(self, console: Console) -> None:
        """Train, judge and time every method, then print the ranking and write the report."""
        from ..lab.folder import open_folder
        from ..lab.jobs import number_of_jobs
        from ..lab.terminal import Bar, say
        from ..positions import position_names
        from ..studies.compare.budget import find_budget
        from ..studies.compare.outlook import AHEAD
        from ..studies.compare.prepare import TextSource, check_positions, prepare_job
        from ..studies.compare.ranking import rank
        from ..studies.compare.report import write_report
        from ..studies.compare.run import DEFAULT_POSITIONS, DEFAULT_STEPS, QUICK_POSITIONS, QUICK_STEPS, compare
        from .tables.compare import print_ranking, print_task, print_unsettled

        check_range(self, jobs=(1, MOST_JOBS))
        check_positive(self, "minutes")
        if self.minutes is not None and self.training.steps is not None:
            raise InputError("minutes", "expected either `minutes` or `steps`, got both")
        names: Sequence[str] = QUICK_POSITIONS if self.quick else DEFAULT_POSITIONS
        if self.positions is not None:
            names = position_names() if self.positions == "all" else self.positions.split(",")
        training = self._checked_training()
        sizes = training.sizes(QUICK_STEPS if self.quick else DEFAULT_STEPS)
        names = check_positions(names, sizes)
        device = find_device(self.device)
        jobs = number_of_jobs(self.jobs, device, small=True)
        seeds, budget = training.all_seeds, None
        with open_folder(self.out):
            if self.minutes is not None:
                with console.status("measuring the speed of each method"):
                    tuned = self.table.train is not None
                    budget = find_budget(
                        self.out, self.minutes, sizes, names, training.seeds, device, tuned=tuned, jobs=jobs
                    )
                sizes, seeds = replace(sizes, steps=budget.steps), training.seeds_from(budget.seeds)
                console.print(
                    f"{self.minutes:g} minutes: {budget.steps:,} steps for each method, seeds: {budget.seeds}",
                    highlight=False,
                )
            with console.status("reading the text and training a tokenizer"):
                table = None if self.table.train is None else self.table.own_task()
                source = TextSource(self.data, self.column, table)
                job = prepare_job(source, sizes, names, seeds, device, self.out)
                job = replace(job, budget=budget, halving=budget is not None and training.seeds is None)
            text = job.text.facts
            console.print(
                f"{text.training_tokens:,} training and {text.held_out_tokens:,} held-out tokens from {text.source}; "
                f"guessing by frequency: loss {text.unigram_entropy:.2f}",
                highlight=False,
            )
            if job.rows is not None:
                print_task(console, job.rows.facts, sizes.length)
            with Bar(console) as progress:
                results = compare(job, self.out, progress, jobs=jobs)
            if not results.runs:
                raise InputError("learning_rate", "; ".join(results.failed.values()))
            ranking = rank(results)
            report = self.out / "report.html"
            write_report(results, ranking, report)
            clock = "CPU time" if device.type == "cpu" else "time"
            print_ranking(console, ranking.rows, sizes.length, clock, results.task)
            console.print(ranking.verdict, style="bold", highlight=False)
            print_unsettled(console, ranking.unsettled, AHEAD)
            say(console, f"wrote {report} (open it in a browser) and {self.out / 'results.json'}")
            if results.failed:
                raise InputError("learning_rate", "; ".join(results.failed.values()))

    def _checked_training(self) -> CompareTraining:
        """Check the table and the training, and return the latter; with a table, there are several seeds by default.

        Raises:
            InputError: if an option is out of range or does not fit the others; it names the option.
        """
        self.table.check_table()
        if self.table.train is None:
            return self.training.checked()
        for name in ("data", "column"):
            if getattr(self, name):
                raise InputError(name, "only without `train`, whose rows are the text")
        if self.training.seeds is not None:
            # How much a seed changes the score of a table can only be measured with several.
            check_range(self.training, seeds=(2, MOST_SEEDS))
        return replace(self.training, seeds=self.training.seeds or TABLE_SEEDS).checked()
