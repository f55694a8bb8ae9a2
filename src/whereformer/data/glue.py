"""Labelled text to fine-tune on: GLUE's tasks, from the Hub or a folder, and the user's own tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..experiments.finetune.settings import DataSettings
from ..experiments.settings import listed
from .corpus import fingerprint
from .tables import Columns, columns_of, read_table

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        name: of the task.
        texts: its columns of text, one or two.
        classes: their names, in the order of the labels; None where a number is predicted.
        metrics: by which it is judged, names of :data:`~.metrics.METRICS`.
        label: its column of labels.
        judged: the splits that it is judged by, and what a table calls each.
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
"""In the order of the TISA paper's Table 3. Columns, classes and metrics are those of GLUE as it is on the Hub."""


@dataclass(frozen=True)
class Split:
    """Rows: one text or two of each, and its label, a class or a number."""

    texts: list[tuple[str, ...]]
    labels: list[float]


@dataclass(frozen=True)
class Data:
    """A task's rows.

    Args:
        task: what they are.
        train: to learn from.
        judged: to judge by, by what a table calls each.
        facts: where they come from, how many there are and which are only a part of the official split.
    """

    task: Task
    train: Split
    judged: dict[str, Split]
    facts: dict[str, Any]


def load(settings: DataSettings) -> list[Data]:
    """The rows of every task.

    Raises:
        InputError: for what is unknown, missing, empty or has a label outside the classes.
    """
    if settings.train is not None:
        return [_own(settings)]
    names = listed("task", settings.task or "")
    if names == ("all",):
        names = tuple(GLUE)
    for name in names:
        if name not in GLUE:
            raise InputError("task", f"expected {', '.join(GLUE)} or all, got {name!r}")
    if settings.data is not None and not settings.data.is_dir():
        raise InputError("data", f"no such folder: {str(settings.data)!r}")
    return [_glue(GLUE[name], settings) for name in names]


def _glue(task: Task, settings: DataSettings) -> Data:
    splits = ("train", *(split for split, _ in task.judged))
    source, parts = HUB, []
    if settings.data is None:
        tables = _hub(task.name, splits)
    else:
        tables = {}
        for split in splits:
            file = _file(settings.data / task.name, split)
            tables[split] = read_table("data", file)
            if file.stem.endswith("_subset"):
                parts.append(split)
        source = str(settings.data / task.name)
    rows = {split: _split(tables[split], task, f"{source}, {split}") for split in splits}
    return _data(task, rows, source, parts, settings.train_rows)


def _file(folder: Path, split: str) -> Path:
    """Where a split is; ``_subset`` ends the name of a part of it."""
    for name in (f"{split}.parquet", f"{split}_subset.parquet", f"{split}-00000-of-00001.parquet"):
        if (folder / name).is_file():
            return folder / name
    raise InputError("data", f"expected {folder / split}.parquet (or {split}_subset.parquet), found neither")


def _hub(name: str, splits: Sequence[str]) -> dict[str, Columns]:
    import datasets

    try:
        return {
            split: columns_of(datasets.load_dataset(HUB, name, split=split).with_format("arrow")[:]) for split in splits
        }
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0]
        raise InputError("data", f"cannot get {name} from the Hub ({reason}); or give a folder that has it") from None


def _own(settings: DataSettings) -> Data:
    assert settings.train is not None
    assert settings.validation is not None
    texts, label = listed("text", settings.text or ""), settings.label or ""
    tables = {
        split: read_table(split, file, texts)
        for split, file in (("train", settings.train), ("validation", settings.validation))
    }
    classes = None
    if not settings.regression:
        found = {str(value) for value in tables["train"].get(label, []) if value is not None}
        # Numbers in their order, so that 10 comes after 9.
        classes = tuple(sorted(found, key=lambda name: (float(name) if _is_number(name) else math.inf, name)))
        if label in tables["train"] and len(classes) < 2:
            raise InputError("label", f"expected at least two classes in {settings.train}, got {list(classes)}")
    metrics = ("pearson", "spearman") if settings.regression else ("accuracy", "matthews")
    task = Task(settings.train.stem, texts, classes, metrics, label)
    if classes is not None:
        places: dict[str, int] = {name: place for place, name in enumerate(classes)}
        for columns in tables.values():
            if label in columns:
                columns[label] = [places.get(str(value), str(value)) for value in columns[label]]
    rows = {
        split: _split(columns, task, str(file))
        for (split, columns), file in zip(tables.items(), (settings.train, settings.validation), strict=True)
    }
    return _data(task, rows, f"{settings.train}, {settings.validation}", [], settings.train_rows)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _split(columns: Columns, task: Task, where: str) -> Split:
    """A table's rows.

    Raises:
        InputError: naming what is wrong with them.
    """
    for name in (*task.texts, task.label):
        if name not in columns:
            raise InputError(None, f"{where}: expected a column {name!r}, found {', '.join(columns) or 'none'}")
    texts = list(zip(*(columns[name] for name in task.texts), strict=True))
    labels = columns[task.label]
    if not texts:
        raise InputError(None, f"{where}: expected at least one row, got none")
    for number, row in enumerate(texts):
        if not all(isinstance(text, str) for text in row):
            raise InputError(None, f"{where}, row {number}: expected text in {' and '.join(task.texts)}, got {row!r}")
    for number, label in enumerate(labels):
        whole = isinstance(label, int) and not isinstance(label, bool)
        if task.classes is None:
            if not (whole or (isinstance(label, float) and math.isfinite(label))):
                raise InputError(None, f"{where}, row {number}: expected a number in {task.label!r}, got {label!r}")
        elif not (whole and 0 <= label < len(task.classes)):
            known = ", ".join(f"{place} ({name})" for place, name in enumerate(task.classes))
            raise InputError(None, f"{where}, row {number}: expected a label of {known}, got {label!r}")
    return Split(texts, labels)


def _data(task: Task, rows: Mapping[str, Split], source: str, parts: list[str], train_rows: int | None) -> Data:
    train = rows["train"]
    facts: dict[str, Any] = {"source": source, "rows": {split: len(found.texts) for split, found in rows.items()}}
    if train_rows is not None and train_rows < len(train.texts):
        train = _sample(train, train_rows)
        facts["rows"]["train"] = train_rows
        parts = [*parts, *(["train"] if "train" not in parts else [])]
    # Scores of a part must not be read as those of the official split.
    facts["subsets"] = parts
    facts["fingerprint"] = fingerprint(
        text
        for split in (train, *(rows[name] for name, _ in task.judged))
        for row, label in zip(split.texts, split.labels, strict=True)
        for text in (*row, str(label))
    )
    return Data(task, train, {shown: rows[split] for split, shown in task.judged}, facts)


def _sample(split: Split, count: int) -> Split:
    """So many rows, the same in every run."""
    chosen = torch.randperm(len(split.texts), generator=torch.Generator().manual_seed(0))[:count].sort().values.tolist()
    return Split([split.texts[row] for row in chosen], [split.labels[row] for row in chosen])
