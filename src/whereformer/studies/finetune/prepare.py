"""Prepare fine-tuning: load the tasks, tokenize them, and check that every model can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ...data import glue
from ...data.glue import Data
from ...data.rows import Rows, check_tokenizer, tokenized
from ...errors import InputError
from ...lab.loading import quiet_transformers
from ...lab.options import listed
from ...lab.progress import Progress
from ...models import EncoderConfig, EncoderForSequenceClassification
from ...positions import PositionRangeError
from .models import fingerprint_of, load
from .results import ParameterCounts, TaskFacts
from .settings import DataSettings

if TYPE_CHECKING:
    from .run import FinetuneJob


def load_tasks(settings: DataSettings) -> list[Data]:
    """Load the rows of every task that the settings name.

    Raises:
        InputError: if a task is unknown, or its data is missing, empty or has a label outside the classes.
    """
    if settings.train is None:
        return glue.load_glue(listed("task", settings.task or ""), settings.data, settings.train_rows)
    return [settings.own_task().load(settings.train_rows)]


@dataclass(frozen=True)
class Encoded:
    """A task's tokenized rows: the training split, and each split to judge by."""

    data: Data
    train: Rows
    judged: dict[str, Rows]

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each row of every split."""
        return [length for split in (self.train, *self.judged.values()) for length in split.lengths]

    @cached_property
    def facts(self) -> TaskFacts:
        """Facts about the rows, for the results file and the report."""
        task, training = self.data.task, sorted(self.train.lengths)
        return TaskFacts(
            **vars(self.data.facts),
            judged=list(self.judged),
            metrics=list(task.metrics),
            classes=None if task.classes is None else list(task.classes),
            tokens_of_a_row={"median": training[len(training) // 2], "most": max(self.lengths)},
            cut_rows=sum(split.cut for split in (self.train, *self.judged.values())),
        )


def encode(job: FinetuneJob, data: Data, config: EncoderConfig, progress: Progress) -> Encoded:
    """Tokenize a task's rows for a model with this configuration."""
    train, *judged = (
        tokenized(
            split,
            job.tokenizer,
            job.tuning.max_length,
            config,
            regression=data.task.classes is None,
            progress=progress,
        )
        for split in (data.train, *data.judged.values())
    )
    return Encoded(data, train, dict(zip(data.judged, judged, strict=True)))


@dataclass(frozen=True)
class Checked:
    """What fine-tuning starts from: tasks and variants by name. Every model has read the longest row."""

    tasks: dict[str, Encoded]
    weights: str
    """The fingerprint of the pretrained weights."""
    parameters: dict[str, ParameterCounts]


@torch.no_grad()
def prepare(job: FinetuneJob, progress: Progress) -> Checked:
    """Load all tasks, tokenize their text, and let every model read the longest row.

    Raises:
        InputError: if a task can't be loaded, a model, method or tokenizer does not fit, or rows are too long.
    """
    loaded = load_tasks(job.data)
    tasks: list[Encoded] = []
    weights, parameters = "", {}
    with quiet_transformers():
        for variant in job.variants.values():
            model = load(job.model, variant, 2)
            if not tasks:
                check_tokenizer(job.tokenizer, model.config.vocab_size)
                if job.tuning.packed and "-" in model.config.blocks:
                    raise InputError("packed", "a funnel would pool across the ends of rows; leave it out")
                weights = fingerprint_of(model)
                splits = [split for data in loaded for split in (data.train, *data.judged.values())]
                progress.start(sum(len(split.labels) for split in splits))
                progress.begin("tokenizing the rows")
                tasks = [encode(job, data, model.config, progress) for data in loaded]
            _read_the_longest_row(model, tasks)
            parameters[variant.name] = _count_parameters(model)
    return Checked({task.data.task.name: task for task in tasks}, weights, parameters)


def _read_the_longest_row(model: EncoderForSequenceClassification, tasks: Sequence[Encoded]) -> None:
    splits = [split for task in tasks for split in (task.train, *task.judged.values())]
    widest = max(splits, key=lambda split: max(split.lengths))
    most = max(widest.lengths)
    longest = widest.padded([widest[widest.lengths.index(most)]])
    del longest["labels"]
    try:
        model(**longest)
    except PositionRangeError as error:
        limit = model.config.max_position_embeddings - tasks[0].train.end
        longer = sum(length > limit for task in tasks for length in task.lengths)
        raise InputError(
            "max_length",
            f"{longer:,} rows are longer than the {limit} tokens that the model covers, the longest has {most}; "
            f"set `max_length` {limit} to truncate them ({error})",
        ) from None


def _count_parameters(model: EncoderForSequenceClassification) -> ParameterCounts:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    positional = {name: size for name, size in sizes.items() if name.startswith("encoder.position.")}
    assert model.loading_report is not None
    fresh = sum(positional.get(name, 0) for name in model.loading_report.initialised)
    return ParameterCounts(sum(sizes.values()), sum(positional.values()), fresh)
