"""The settings of a fine-tuning: tasks and training. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import InputError
from ...lab.options import MOST_COUNT, MOST_SIZE, check_positive, check_range
from ..labeled import TableSettings


@dataclass(frozen=True)
class DataSettings(TableSettings):
    """What to fine-tune on: GLUE tasks by name, or a table of your own."""

    task: str | None = None
    """GLUE tasks, separated by commas: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; or "all"."""

    data: Path | None = None
    """A folder with GLUE as Parquet: cola/train.parquet, cola/validation.parquet... (train_subset.parquet for a part of
    it). Default: nyu-mll/glue from the Hugging Face Hub."""

    train_rows: int | None = None
    """Number of rows of each task to train on, drawn once for all runs. Default: all of them."""

    def checked(self) -> DataSettings:
        """Check the settings and return them.

        Raises:
            InputError: if a field is out of range or does not fit the others; it names the field.
        """
        check_range(self, train_rows=(1, MOST_COUNT))
        self.check_table()
        if self.train is None:
            if self.task is None:
                raise InputError("task", "expected a GLUE task (or `train` FILE for a task of your own), got none")
            return self
        for name in ("task", "data"):
            if getattr(self, name) is not None:
                raise InputError(name, "GLUE tasks and a task of your own (`train`) need separate runs")
        return self


@dataclass(frozen=True)
class TuningSettings:
    """How every run is trained."""

    epochs: float = 3.0
    """How many times each row is read."""

    batch_size: int = 32
    """Rows in a training step."""

    learning_rate: float = 3e-5
    """Peak of the learning rate. It rises in the first tenth of the steps and falls to zero in the rest."""

    kernel_learning_rate: float | None = None
    """Peak of the learning rate of TISA's kernels, which are new, while the rest is pretrained. Default: the same."""

    max_length: int | None = None
    """Number of tokens to truncate longer rows to. Default: no row is truncated, and a row that is too long for the
    model is an error."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the arithmetic. bfloat16 is mixed precision, for GPUs and CPUs that are fast at it; the weights stay
    float32."""

    packed: bool = False
    """Join the rows of a batch into one without padding. The scores are the same up to rounding and dropout."""

    def checked(self) -> TuningSettings:
        """Check the settings and return them.

        Raises:
            InputError: if a field is out of range; it names the field.
        """
        check_range(self, batch_size=(1, MOST_SIZE), max_length=(4, MOST_SIZE))
        check_positive(self, "epochs", "learning_rate", "kernel_learning_rate")
        return self
