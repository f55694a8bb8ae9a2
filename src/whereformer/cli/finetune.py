"""The command ``whereformer finetune``: fine-tune a model with and without a position method."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro
from rich.console import Console

from ..errors import InputError
from ..lab.options import (
    MOST_JOBS,
    MOST_SEED,
    MOST_SEEDS,
    MOST_THREADS,
    check_range,
    find_device,
    listed,
    listed_numbers,
)
from ..studies.finetune.settings import DataSettings, TuningSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..studies.finetune.gains import GainsTable
    from ..studies.finetune.results import FinetuneResults


MOST_KERNELS = 1024
"""The most TISA kernels of a head."""


@dataclass(frozen=True)
class Finetune:
    """What does a position method add to a pretrained model? Fine-tunes with and without it, on GLUE or your own task.

    This is Table 3 of the TISA paper. By default, 0, 1, 3 and 5 TISA kernels are added to the model's position
    embeddings, and each model is fine-tuned on each task with several seeds. The table shows medians and ranges, the
    largest gain over the baseline, and the share of the baseline's errors that it removes.

    The text may be larger than memory: it is tokenized once, into cache/, and read from there a row at a time. Also
    writes results.json, results.md and report.html (with what each head learned). Ctrl-C keeps every finished run; the
    same command then does the missing ones.
    """

    MANY: ClassVar = True

    model: str
    """The pretrained model: a folder, or an id on the Hugging Face Hub."""

    tokenizer: str | None = None
    """The tokenizer. Default: the one that was saved with the model."""

    position: Annotated[str, tyro.conf.arg(metavar="A,B+C")] = "learned+tisa"
    """Position methods; each gets its own table. "learned+tisa" adds to the model's position embeddings, "tisa"
    replaces them, and "own" leaves the model as it is; `whereformer positions` lists others."""

    kernels: str = "0,1,3,5"
    """Numbers of TISA kernels per head. 0 is the baseline, the same model without TISA."""

    seeds: int = 5
    """Number of seeds to repeat every run with."""

    seed: int = 0
    """The first seed."""

    out: Path = Path("runs/finetune")
    """Folder for the results."""

    cache: Path | None = None
    """Folder for the tokenized rows, which are made once and then read a row at a time. Default: cache/ in --out."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. "auto" is a GPU if there is one."""

    threads: int | None = None
    """Threads on the CPU. Default: torch's."""

    dry_run: bool = False
    """Check everything, print what would be done and stop."""

    jobs: int | None = None
    """Number of runs at a time, each in a process of its own. On the CPU they share the threads. Default: one for each
    GPU, or 1 on the CPU and in processes that a launcher started, which share each run."""

    task: DataSettings = field(default_factory=DataSettings)
    tuning: TuningSettings = field(default_factory=TuningSettings)

    def run(self, console: Console) -> None:
        """Fine-tune every model on every task, then print the gains and write the report."""
        data, tuning = self.task.checked(), self.tuning.checked()
        check_range(self, seeds=(1, MOST_SEEDS), threads=(1, MOST_THREADS), jobs=(1, MOST_JOBS))
        check_range(self, seed=(0, MOST_SEED + 1 - self.seeds))
        kernels = listed_numbers("kernels", self.kernels, 0, MOST_KERNELS)
        import torch

        from ..data.rows import RowCache
        from ..lab import ranks
        from ..lab.folder import open_or_scratch
        from ..lab.jobs import number_of_jobs
        from ..lab.terminal import Bar
        from ..lab.training.shared import check_rows
        from ..lab.training.telling import tell_slow_dtype
        from ..studies.finetune.gains import tables
        from ..studies.finetune.models import load_tokenizer
        from ..studies.finetune.prepare import FinetuneJob, load_tasks, prepare
        from ..studies.finetune.run import begin, finetune
        from ..studies.finetune.variants import settings_of
        from .tables.finetune import print_finetuning, print_gains

        check_rows(tuning.batch_size)
        if ranks.size() > 1 and self.jobs not in (None, 1):
            raise InputError("jobs", f"expected 1 in {ranks.size()} processes, which share each run, got {self.jobs}")
        device = find_device(self.device)
        ranks.join(device)
        settings = settings_of(listed("position", self.position), sorted(kernels))
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        seeds = list(range(self.seed, self.seed + self.seeds))
        tokenizer = load_tokenizer(self.model, self.tokenizer)
        with open_or_scratch(self.out, dry_run=self.dry_run) as scratch:
            with Bar(console) as progress:
                progress.begin("reading rows and models")
                job = FinetuneJob(self.model, tokenizer, load_tasks(data), settings, seeds, tuning, device)
                checked = prepare(job, RowCache(self.cache or self.out / "cache", scratch, progress))
            results = ranks.from_main(lambda: begin(job, checked, self.out))
            print_finetuning(console, job, checked)
            tell_slow_dtype(console, tuning.dtype, device)
            if self.dry_run:
                return
            jobs = 1 if ranks.size() > 1 else number_of_jobs(self.jobs, device)
            with Bar(console) as progress:
                results = finetune(job, checked, results, self.out, progress, jobs)
            found = tables(results)
            print_gains(console, found)
            if ranks.is_main():
                self._write(console, results, found)

    def _write(self, console: Console, results: FinetuneResults, found: Sequence[GainsTable]) -> None:
        """Write the table as Markdown and as an HTML page."""
        from ..files import write_atomically
        from ..lab.terminal import say
        from ..studies.finetune.report import build_markdown, build_report

        files = {"results.md": build_markdown(results, found), "report.html": build_report(results, found)}
        for name, text in files.items():
            write_atomically(self.out / name, text)
        written = " and ".join(str(self.out / name) for name in ("results.json", "results.md"))
        say(console, f"wrote {self.out / 'report.html'} (open it in a browser), {written}")
