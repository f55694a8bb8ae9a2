"""Labeled text to fine-tune on: the GLUE tasks, from the Hub or a folder, and the user's own tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import LONGEST_NAME, InputError, shown, some_of
from .hub import downloaded
from .read import TableFile, open_table

HUB = "nyu-mll/glue"
LARGEST = 1e9
"""The largest number that a model can be trained to predict; squares of much larger ones overflow float32."""


@dataclass(frozen=True)
class Task:
    """A classification or regression task: which columns it reads and how it is judged.

    Args:
        name: the task's name.
        texts: its text columns, one or two.
        classes: names of the classes, in the order of the labels; None for a regression task.
        metrics: the metrics that judge it, names in :data:`whereformer.lab.training.metrics.METRICS`.
        label: its label column.
        judged: the splits that judge it, each with the name that result tables use for it.
    """

    name: str
    texts: tuple[str, ...]
    classes: tuple[str, ...] | None
    metrics: tuple[str, ...]
    label: str = "label"
    judged: tuple[tuple[str, str], ...] = (("validation", ""),)


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
            judged=(("validation_matched", "matched"), ("validation_mismatched", "mismatched")),
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
    """Labeled rows: one or two texts each, and a label: a class index or a number."""

    texts: list[tuple[str, ...]]
    labels: list[Any]


@dataclass(frozen=True)
class Data:
    """A task with its rows.

    Args:
        task: the task.
        train: the rows to train on.
        judged: those to judge by, by the name that result tables use.
        source: where they come from, for people to read.
        parts: the splits that contain only part of the official split.
    """

    task: Task
    train: Split
    judged: dict[str, Split]
    source: str
    parts: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each split."""
        names = [split for split, _ in self.task.judged]
        return dict(zip(("train", *names), (len(s.labels) for s in (self.train, *self.judged.values())), strict=True))


def load_glue(names: Sequence[str], folder: Path | None, train_rows: int | None = None) -> list[Data]:
    """Load GLUE tasks.

    Args:
        names: names in :data:`GLUE`; "all" alone means every task.
        folder: a folder that has the tasks as Parquet files; None downloads them from the Hub.
        train_rows: train on a random sample of this number of rows per task; None uses all.
    Raises:
        InputError: if a task is unknown, or its data is missing, empty or has a label outside the classes.
    """
    if tuple(names) == ("all",):
        names = tuple(GLUE)
    for name in names:
        if name not in GLUE:
            raise InputError("task", f"expected {', '.join(GLUE)} or all, got {shown(name)}")
    if folder is not None and not folder.is_dir():
        raise InputError("data", f"no such folder: {shown(str(folder), LONGEST_NAME)}")
    return [_glue(GLUE[name], folder, train_rows) for name in names]


def _glue(task: Task, folder: Path | None, train_rows: int | None) -> Data:
    place = (folder or downloaded(HUB, task.name)) / task.name
    files = {split: _file(place, split) for split in ("train", *(split for split, _ in task.judged))}
    tables = {split: open_table("data", file) for split, file in files.items()}
    parts = [split for split, file in files.items() if file.stem.endswith("_subset")]
    return _data(task, tables, HUB if folder is None else str(place), parts, train_rows)


def _file(folder: Path, split: str) -> Path:
    """Find a split's file, named as on the Hub or more simply. ``_subset`` marks a part of the official split."""
    for name in (f"{split}.parquet", f"{split}_subset.parquet", f"{split}-00000-of-00001.parquet"):
        if (folder / name).is_file():
            return folder / name
    raise InputError("data", f"expected {folder / split}.parquet (or {split}_subset.parquet), found neither")


def load_own(
    train: Path,
    validation: Path,
    texts: tuple[str, ...],
    label: str,
    *,
    regression: bool = False,
    train_rows: int | None = None,
) -> Data:
    """Load a task of the user's own tables.

    Args:
        train, validation: the table files.
        texts: their text columns, one or two.
        label: their label column, with classes or numbers.
        regression: whether labels are numbers to predict.
        train_rows: train on a random sample of this number of rows; None uses all.

    Raises:
        InputError: if a table can't be read, a column is missing, or labels are invalid.
    """
    tables = {split: open_table(split, file, texts) for split, file in (("train", train), ("validation", validation))}
    source = f"{train}, {validation}"
    if regression:
        task = Task(train.stem, texts, None, ("pearson", "spearman"), label)
        return _data(task, tables, source, [], train_rows)
    labels = _labels(tables["train"], texts, label)
    names = {str(value) for value in labels if not _is_missing(value)}
    # Numbers are sorted by their value, so that 10 comes after 9.
    classes = tuple(sorted(names, key=lambda name: (float(name) if _is_number(name) else math.inf, name)))
    if len(classes) < 2:
        raise InputError("label", f"expected at least two classes in {train}, got {some_of(classes)}")
    task = Task(train.stem, texts, classes, ("accuracy", "matthews"), label)
    return _data(task, tables, source, [], train_rows, named=True)


def _is_missing(label: Any) -> bool:
    """Whether a row has no label; an empty cell of a CSV or TSV file is an empty text."""
    return label is None or (isinstance(label, str) and not label.strip())


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _labels(table: TableFile, texts: Sequence[str], label: str) -> list[Any]:
    """Return the label of each row; check that there are rows, and all columns."""
    for name in (*texts, label):
        if name not in table.names:
            told = f"{table.file}: expected a column {shown(name)}, found {some_of(table.names)}"
            raise InputError(table.field, told)
    found = table.column(label)
    if not found:
        raise InputError(table.field, f"{table.file}: expected at least one row, got none")
    return found


def _texts(table: TableFile, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the texts of each row, and check that they are texts."""
    found = []
    for number, row in enumerate(table.rows(columns)):
        if not all(isinstance(text, str) for text in row):
            expected = f"expected text in {' and '.join(columns)}, got {shown(row)}"
            raise InputError(table.field, f"{table.file}, row {number}: {expected}")
        found.append(row)
    return found


def _data(
    task: Task,
    tables: Mapping[str, TableFile],
    source: str,
    parts: list[str],
    train_rows: int | None,
    named: bool = False,
) -> Data:
    """Read all rows, check them, and keep the labels: with ``named`` the names of classes, else their numbers."""
    splits: dict[str, Split] = {}
    for name, table in tables.items():
        labels = _labels(table, task.texts, task.label)
        if named:
            places = {each: place for place, each in enumerate(task.classes or ())}
            # A row without a label is not of a class named None.
            labels = [None if _is_missing(label) else places.get(str(label), str(label)) for label in labels]
        rows: Iterable[int] = range(len(labels))
        if name == "train" and train_rows is not None and train_rows < len(labels):
            # A random sample, the same in every run.
            rows = sorted(torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:train_rows].tolist())
            parts = [*dict.fromkeys((*parts, name))]
        texts = _texts(table, task.texts)
        _check_labels(labels, task, table, named)
        splits[name] = Split([texts[row] for row in rows], [labels[row] for row in rows])
    judged = {shown: splits[split] for split, shown in task.judged}
    return Data(task, splits["train"], judged, source, parts)


def _check_labels(labels: Sequence[Any], task: Task, table: TableFile, named: bool) -> None:
    if task.classes is None:
        expected = f"a number of at most {LARGEST:g} in {task.label!r}"
    elif named:
        expected = f"one of the training rows' classes, {some_of(task.classes)}"
    else:
        expected = f"a label of {some_of(f'{place} ({name})' for place, name in enumerate(task.classes))}"
    for number, label in enumerate(labels):
        is_whole = isinstance(label, int) and not isinstance(label, bool)
        if task.classes is None:
            fits = (is_whole or isinstance(label, float)) and abs(label) <= LARGEST
        else:
            fits = is_whole and 0 <= label < len(task.classes)
        if not fits:
            got = "none" if label is None else shown(label)
            raise InputError(table.field, f"{table.file}, row {number}: expected {expected}, got {got}")
