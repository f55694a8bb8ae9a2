"""Labeled text to fine-tune on: the GLUE tasks, from the Hub or a folder, and the user's own tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checks import check_choice
from ..errors import MAX_NAME, InputError, list_some, short_repr
from .read import Table, download

HUB = "nyu-mll/glue"
LARGEST = 1e9
"""The largest number that a model can be trained to predict; squares of much larger ones overflow float32."""


@dataclass(frozen=True)
class Task:
    """A classification or regression task: its columns and its evaluation."""

    name: str
    texts: tuple[str, ...]  # the text columns, one or two
    classes: tuple[str, ...] | None  # names of the classes, in the order of the labels; None for a regression task
    metrics: tuple[str, ...]  # the metrics of its evaluation, names in `whereformer.analysis.metrics.METRICS`
    label: str = "label"  # the label column
    # The splits that it is evaluated on, each with its name in result tables.
    eval_splits: tuple[tuple[str, str], ...] = (("validation", ""),)


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
GLUE = {
    task.name: task
    for task in (
        Task("sst2", ("sentence",), ("negative", "positive"), ("accuracy",)),
        Task(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            eval_splits=(("validation_matched", "matched"), ("validation_mismatched", "mismatched")),
        ),
        Task("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), ("f1", "accuracy")),
        Task("stsb", _PAIR, None, ("pearson", "spearman")),
        Task("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews",)),
        Task("mrpc", _PAIR, ("not_equivalent", "equivalent"), ("f1", "accuracy")),
        Task("qnli", ("question", "sentence"), _ENTAILMENT, ("accuracy",)),
        Task("rte", _PAIR, _ENTAILMENT, ("accuracy",)),
        Task("wnli", _PAIR, ("not_entailment", "entailment"), ("accuracy",)),
    )
}
"""The GLUE tasks in the order of the TISA paper's Table 3, with the columns, classes and metrics of GLUE on the Hub."""


@dataclass(frozen=True)
class Split:
    """Labeled rows: one or two texts each, and a label: the number of a class, or a number to predict."""

    texts: list[tuple[str, ...]]
    labels: list[Any]


@dataclass(frozen=True)
class Data:
    """A task with its rows."""

    task: Task
    splits: dict[str, Any]  # the rows of each split, "train" first: a `Split`, or the result of `convert`
    source: str  # where the rows come from, for people to read

    @property
    def train(self) -> Any:
        """The rows to train on."""
        return self.splits["train"]

    @property
    def eval_splits(self) -> dict[str, Any]:
        """The rows to evaluate on, by their name in result tables."""
        return {shown: self.splits[split] for split, shown in self.task.eval_splits}

    def convert(self, convert: Callable[[Any], object]) -> Data:
        """Return the task with the rows of each split replaced by the result of a function."""
        return replace(self, splits={name: convert(split) for name, split in self.splits.items()})

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each split."""
        return {name: len(split.labels) for name, split in self.splits.items()}


def load_glue(names: Sequence[str], folder: Path | None, train_rows: int | None = None) -> list[Data]:
    """Load GLUE tasks.

    Args:
        names: names in :data:`GLUE`; ("all",) means every task.
        folder: a folder that has the tasks as Parquet files; None downloads them from the Hub.
        train_rows: train on a random sample of this number of rows per task; None uses all.

    Raises:
        InputError: if a task is unknown, or its data is missing, empty or has a label outside the classes.
    """
    if tuple(names) == ("all",):
        names = tuple(GLUE)
    for name in names:
        check_choice("task", name, [*GLUE, "all"])
    if folder is not None and not folder.is_dir():
        raise InputError("data", f"the folder does not exist: {short_repr(str(folder), MAX_NAME)}")
    return [_load_glue_task(GLUE[name], folder, train_rows) for name in names]


def _load_glue_task(task: Task, folder: Path | None, train_rows: int | None) -> Data:
    splits = ("train", *(split for split, _ in task.eval_splits))
    tables = {split: Table("data", _find_file(folder, task.name, split)) for split in splits}
    class_numbers = {str(number): number for number in range(len(task.classes or ()))}
    rows = {split: _number_labels(_read(table, task), task, table, class_numbers) for split, table in tables.items()}
    return _build_data(task, rows, HUB if folder is None else str(folder / task.name), train_rows)


def _find_file(folder: Path | None, task: str, split: str) -> Path:
    """Find a split's file, named as on the Hub or more simply. ``_subset`` marks a part of the official split."""
    if folder is None:
        [path] = download([f"hub:{HUB}:{task}:{split}"])
        return Path(path)
    for name in (f"{split}.parquet", f"{split}_subset.parquet", f"{split}-00000-of-00001.parquet"):
        if (folder / task / name).is_file():
            return folder / task / name
    raise InputError("data", f"expected {folder / task / split}.parquet (or {split}_subset.parquet), found neither")


def load_own(
    train: Path,
    validation: Path,
    texts: tuple[str, ...],
    label: str,
    *,
    regression: bool = False,
    train_rows: int | None = None,
) -> Data:
    """Load a task from the user's tables.

    Its columns ``texts``, one or two, have text, and ``label`` has classes or, in a ``regression``, numbers to predict.

    Raises:
        InputError: if a table can't be read, a column is missing, or labels are invalid.
    """
    tables = {split: Table(split, file) for split, file in (("train", train), ("validation", validation))}
    task = Task(train.stem, texts, None, ("pearson", "spearman"), label)
    splits = {split: _read(table, task) for split, table in tables.items()}
    if not regression:
        classes = tuple(sorted({name for name in map(_class_name, splits["train"].labels) if name is not None}))
        if len(classes) < 2:
            raise InputError("label", f"expected at least two classes in {train}, got {list_some(classes)}")
        task = replace(task, classes=classes, metrics=("accuracy", "matthews"))
    class_numbers = {name: number for number, name in enumerate(task.classes or ())}
    splits = {name: _number_labels(split, task, tables[name], class_numbers) for name, split in splits.items()}
    return _build_data(task, splits, f"{train}, {validation}", train_rows)


def _class_name(label: object) -> str | None:
    """Return the name of a class; None if a row has no label: an empty cell of a CSV or TSV file is an empty text."""
    return None if label is None or not str(label).strip() else str(label)


def _to_number(label: Any) -> float | None:
    """Return a number to predict; None if the label is not a number, or too large."""
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def _read(table: Table, task: Task) -> Split:
    """Read the texts and labels of all rows, and check that there are rows and that texts are texts."""
    split = Split([], [])
    rows = list(table.rows((*task.texts, task.label)))  # all at once, so that a missing column is the first error
    for number, (*texts, label) in enumerate(rows, 1):
        if not all(isinstance(text, str) for text in texts):
            expected = f"expected text in {' and '.join(task.texts)}, got {short_repr(tuple(texts))}"
            raise InputError(table.field, f"{table.file}, row {number}: {expected}")
        split.texts.append(tuple(texts))
        split.labels.append(label)
    if not split.labels:
        raise InputError(table.field, f"{table.file}: expected at least one row, got none")
    return split


def _number_labels(split: Split, task: Task, table: Table, class_numbers: Mapping[str, int]) -> Split:
    """Check the labels of a table, and return them as numbers: the numbers of classes, or numbers to predict."""
    labels: list[float] = []
    for row, label in enumerate(split.labels, 1):
        number = class_numbers.get(_class_name(label) or "") if task.classes else _to_number(label)
        if number is None:
            expected = f"a number of at most {LARGEST:g} in {task.label!r}"
            if task.classes:
                expected = f"one of {list_some(class_numbers)}"
            raise InputError(table.field, f"{table.file}, row {row}: expected {expected}, got {short_repr(label)}")
        labels.append(number)
    return Split(split.texts, labels)


def _build_data(task: Task, splits: dict[str, Split], source: str, train_rows: int | None) -> Data:
    train = splits["train"]
    if train_rows is not None and train_rows < len(train.labels):
        # A random sample, the same in every run.
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
        rows = sorted(order[:train_rows].tolist())
        sample = Split([train.texts[row] for row in rows], [train.labels[row] for row in rows])
        splits = {**splits, "train": sample}
    return Data(task, splits, source)
