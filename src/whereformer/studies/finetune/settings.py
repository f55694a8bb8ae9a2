"""The options and the settings of fine-tuning. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import InputError
from ...lab.options import (
    MOST_COUNT,
    MOST_JOBS,
    MOST_SIZE,
    DryRun,
    Jobs,
    Optimization,
    Seeds,
    Threads,
    Tracked,
    check_positive,
    check_range,
    find_device,
    listed,
    listed_numbers,
    part,
)
from ...lab.study import Study

if TYPE_CHECKING:
    from ...data.glue import OwnTask
    from .run import FinetuneJob

MOST_KERNELS = 1024
"""The most TISA kernels of a head."""


@dataclass(frozen=True)
class DataSettings:
    """What to fine-tune on: GLUE tasks by name, or a table of your own."""

    task: str | None = None
    """GLUE tasks, separated by commas: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; or "all"."""

    data: Path | None = None
    """A folder with GLUE as Parquet: cola/train.parquet, cola/validation.parquet... (train_subset.parquet for a part of
    it). Default: nyu-mll/glue from the Hugging Face Hub."""

    train_rows: int | None = None
    """Number of rows of each task to train on, drawn once for all runs. Default: all of them."""

    train: Path | None = None
    """Your own task: training rows, as .csv, .tsv, .jsonl or .parquet."""

    validation: Path | None = None
    """Your own task: validation rows."""

    text: str | None = None
    """Your own task: the column with the text, or two for a pair of texts, such as question,answer."""

    label: str | None = None
    """Your own task: the column of classes, or with ``regression`` the numbers."""

    regression: bool = False
    """Your own task: predict a number instead of a class."""

    def check_data(self) -> None:
        """Check what to fine-tune on.

        Raises:
            InputError: if a field is out of range or does not fit the others; it names the field.
        """
        check_range(self, train_rows=(1, MOST_COUNT))
        own = {"validation": self.validation, "text": self.text, "label": self.label}
        if self.train is None:
            for name, value in {**own, "regression": self.regression or None}.items():
                if value is not None:
                    raise InputError(name, "only with `train`, for a task of your own")
            if self.task is None:
                raise InputError("task", "expected a GLUE task (or `train` FILE for a task of your own), got none")
            return
        for name, value in own.items():
            if value is None:
                raise InputError(name, "a task of your own (`train`) needs it")
        if len(self.columns) > 2:
            raise InputError("text", f"expected one column or two, got {self.text!r}")
        for name in ("task", "data"):
            if getattr(self, name) is not None:
                raise InputError(name, "GLUE tasks and a task of your own (`train`) need separate runs")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns with the text of a task of your own."""
        return listed("text", self.text or "", spaces=True)

    def own_task(self) -> OwnTask:
        """Return the task that the checked settings describe; there must be one."""
        from ...data.glue import OwnTask

        assert self.train is not None
        assert self.validation is not None
        return OwnTask(self.train, self.validation, self.columns, self.label or "", self.regression)


@dataclass(frozen=True)
class TuningSettings(Optimization):
    """How every run is trained."""

    epochs: float = 3.0
    """How many times each row is read."""

    batch_size: int = 32
    """Rows in a training step."""

    learning_rate: float = 3e-5
    """Peak learning rate. It rises in the first tenth of the steps."""

    kernel_learning_rate: float | None = None
    """Peak learning rate of TISA's kernels, which are new, while the rest is pretrained. Default: the same."""

    max_length: int | None = None
    """Number of tokens to truncate longer rows to. Default: no row is truncated, and a row that is too long for the
    model is an error."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the arithmetic. bfloat16 is mixed precision, for GPUs and CPUs that are fast at it; the weights stay
    float32."""

    packed: bool = False
    """Join the rows of a batch into one without padding. The scores are the same up to rounding and dropout."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TuningSettings):
    """The settings that all runs in a folder share."""

    weights: str
    """The fingerprint of the pretrained weights."""
    device: str
    """The kind of device, such as "cpu"."""
    tokenizer: str
    """The fingerprint of the tokenizer's vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Finetune(Jobs, Seeds, Threads, Tracked, DryRun, TuningSettings, DataSettings, Study):
    """What does a position method add to a pretrained model? Fine-tunes with and without it, on GLUE or your own task.

    This is Table 3 of the TISA paper. By default, 0, 1, 3 and 5 TISA kernels are added to the model's position
    embeddings, and each model is fine-tuned on each task with several seeds. The table shows medians and ranges, the
    largest gain over the baseline, and the share of the baseline's errors that it removes.

    Writes results.json, results.md and report.html (with what each head learned). Ctrl-C keeps every finished run; the
    same command then does the missing ones.
    """

    METAVARS: ClassVar = {"position": "A,B+C"}
    MANY: ClassVar = True

    model: str
    """The pretrained model: a folder, or an id on the Hugging Face Hub."""

    tokenizer: str | None = None
    """The tokenizer. Default: the one that was saved with the model."""

    position: str = "learned+tisa"
    """Position methods; each gets its own table. "learned+tisa" adds to the model's position embeddings, "tisa"
    replaces them, and "own" leaves the model as it is; `whereformer positions` lists others."""

    kernels: str = "0,1,3,5"
    """Numbers of TISA kernels per head. 0 is the baseline, the same model without TISA."""

    seeds: int = 5
    """How many seeds to repeat every run with."""

    out: Path = Path("runs/finetune")
    """Folder for the results."""

    jobs: int | None = None
    """How many runs at a time, each in a process of its own. On the CPU they share the threads. Default: one for each
    GPU, or 1 on the CPU and in processes that a launcher started, which share each run."""

    report_to: Literal["trackio", "wandb", "tensorboard", "none"] = "none"
    """Program to report the losses of each run to. It is named after --out, with the task, the variant and the seed."""

    def job(self) -> FinetuneJob:
        self.check_data()
        check_range(self, batch_size=(1, MOST_SIZE), max_length=(4, MOST_SIZE), jobs=(1, MOST_JOBS))
        check_positive(self, "epochs", "learning_rate", "kernel_learning_rate")
        self.check_threads()
        self.check_report_to()
        self.check_seeds()
        kernels = listed_numbers("kernels", self.kernels, 0, MOST_KERNELS)

        from ...lab import ranks
        from ...lab.jobs import number_of_jobs
        from ...lab.training.shared import check_rows
        from .models import load_tokenizer
        from .run import FinetuneJob
        from .variants import settings_of

        check_rows(self.batch_size)
        if ranks.size() > 1 and self.jobs not in (None, 1):
            raise InputError("jobs", f"expected 1 in {ranks.size()} processes, which share each run, got {self.jobs}")
        device = find_device(self.device)
        ranks.join(device)
        return FinetuneJob(
            self.model,
            load_tokenizer(self.model, self.tokenizer),
            part(self, DataSettings),
            settings_of(listed("position", self.position), sorted(kernels)),
            list(self.all_seeds),
            part(self, TuningSettings),
            device,
            jobs=1 if ranks.size() > 1 else number_of_jobs(self.jobs, device),
            threads=self.threads,
            report_to=self.report_to,
        )
