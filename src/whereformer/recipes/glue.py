"""Labeled text to fine-tune on: the GLUE tasks, from the Hub or a folder, and the user's own tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..data.read import Table, download
from ..errors import MAX_NAME, InputError, list_some, short_repr, suggest

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
        metrics: the metrics that judge it, names in :data:`whereformer.analysis.metrics.METRICS`.
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
    """Labeled rows: one or two texts each, and a label: the number of a class, or a number to predict."""

    texts: list[tuple[str, ...]]
    labels: list[Any]


@dataclass(frozen=True)
class Data:
    """A task with its rows: texts, each split of which is a :class:`Split`, or what :meth:`converted` makes of them.

    Args:
        task: the task.
        splits: the rows of each split, "train" first.
        source: where they come from, for people to read.
    """

    task: Task
    splits: dict[str, Any]
    source: str

    @property
    def train(self) -> Any:
        """The rows to train on."""
        return self.splits["train"]

    @property
    def judged(self) -> dict[str, Any]:
        """Those to judge by, by the name that result tables use."""
        return {name: self.splits[split] for split, name in self.task.judged}

    def converted(self, convert: Callable[[Any], Any]) -> Data:
        """Return the task with what a function makes of the rows of each split."""
        return replace(self, splits={name: convert(split) for name, split in self.splits.items()})

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each split."""
        return {name: len(split.labels) for name, split in self.splits.items()}


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
            raise InputError("task", f"expected {', '.join(GLUE)} or all, got {short_repr(name)}{suggest(name, GLUE)}")
    if folder is not None and not folder.is_dir():
        raise InputError("data", f"no such folder: {short_repr(str(folder), MAX_NAME)}")
    return [_glue(GLUE[name], folder, train_rows) for name in names]


def _glue(task: Task, folder: Path | None, train_rows: int | None) -> Data:
    files = {split: _file(folder, task.name, split) for split in ("train", *(split for split, _ in task.judged))}
    tables = {split: Table("data", file) for split, file in files.items()}
    places = {str(place): place for place in range(len(task.classes or ()))}
    splits = {split: _numbered(_read(table, task), task, table, places) for split, table in tables.items()}
    return _data(task, splits, HUB if folder is None else str(folder / task.name), train_rows)


def _file(folder: Path | None, task: str, split: str) -> Path:
    """Find a split's file, named as on the Hub or more simply. ``_subset`` marks a part of the official split."""
    if folder is None:
        [found] = download([f"hub:{HUB}:{task}:{split}"])
        return Path(found)
    for name in (f"{split}.parquet", f"{split}_subset.parquet", f"{split}-00000-of-00001.parquet"):
        if (folder / task / name).is_file():
            return folder / task / name
    told = f"expected {folder / task / split}.parquet (or {split}_subset.parquet), found neither"
    raise InputError("data", told)


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

    Its columns ``texts``, one or two, have text, and ``label`` has classes or, in a ``regression``, numbers to predict.

    Raises:
        InputError: if a table can't be read, a column is missing, or labels are invalid.
    """
    tables = {split: Table(split, file) for split, file in (("train", train), ("validation", validation))}
    task = Task(train.stem, texts, None, ("pearson", "spearman"), label)
    splits = {split: _read(table, task) for split, table in tables.items()}
    if not regression:
        classes = tuple(sorted({name for name in map(_name, splits["train"].labels) if name is not None}))
        if len(classes) < 2:
            raise InputError("label", f"expected at least two classes in {train}, got {list_some(classes)}")
        task = replace(task, classes=classes, metrics=("accuracy", "matthews"))
    places = {name: place for place, name in enumerate(task.classes or ())}
    splits = {split: _numbered(each, task, tables[split], places) for split, each in splits.items()}
    return _data(task, splits, f"{train}, {validation}", train_rows)


def _name(label: Any) -> str | None:
    """Return the name of a class; None if a row has no label: an empty cell of a CSV or TSV file is an empty text."""
    return None if label is None or not str(label).strip() else str(label)


def _number(label: Any) -> float | None:
    """Return a number to predict; None if the label is none, or too large."""
    try:
        found = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) <= LARGEST else None


def _read(table: Table, task: Task) -> Split:
    """Read the texts and labels of all rows, and check that there are rows and that texts are texts."""
    found = Split([], [])
    rows = list(table.rows((*task.texts, task.label)))  # which tells of a column that no row has first
    for number, (*texts, label) in enumerate(rows, 1):
        if not all(isinstance(text, str) for text in texts):
            expected = f"expected text in {' and '.join(task.texts)}, got {short_repr(tuple(texts))}"
            raise InputError(table.field, f"{table.file}, row {number}: {expected}")
        found.texts.append(tuple(texts))
        found.labels.append(label)
    if not found.labels:
        raise InputError(table.field, f"{table.file}: expected at least one row, got none")
    return found


def _numbered(split: Split, task: Task, table: Table, places: Mapping[str, int]) -> Split:
    """Check the labels of a table, and return them as numbers: the places of classes, or numbers to predict."""
    labels: list[float] = []
    for number, label in enumerate(split.labels, 1):
        found = places.get(_name(label) or "") if task.classes else _number(label)
        if found is None:
            numbers = f"a number of at most {LARGEST:g} in {task.label!r}"
            expected, got = f"one of {list_some(places)}" if task.classes else numbers, short_repr(label)
            raise InputError(table.field, f"{table.file}, row {number}: expected {expected}, got {got}")
        labels.append(found)
    return Split(split.texts, labels)


def _data(task: Task, splits: dict[str, Split], source: str, train_rows: int | None) -> Data:
    train = splits["train"]
    if train_rows is not None and train_rows < len(train.labels):
        # A random sample, the same in every run.
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
        rows = sorted(order[:train_rows].tolist())
        sample = Split([train.texts[row] for row in rows], [train.labels[row] for row in rows])
        splits = {**splits, "train": sample}
    return Data(task, splits, source)
