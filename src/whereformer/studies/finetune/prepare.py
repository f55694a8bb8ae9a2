"""Prepare fine-tuning: load the tasks, tokenize them, and check that every model can read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ...data import glue, rows
from ...data.glue import Data
from ...data.rows import RowCache, Rows
from ...errors import InputError
from ...lab import ranks
from ...lab.options import listed
from ...lab.training.trainer import quiet_transformers
from ...models import EncoderConfig
from ...positions import PositionRangeError
from .models import Classifier, fingerprint_of, load
from .results import ParameterCounts, TaskFacts
from .settings import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .run import FinetuneJob


def load_tasks(settings: DataSettings) -> list[Data]:
    """Load the rows of every task that the settings name.

    Raises:
        InputError: if a task is unknown, or its data is missing, empty or has a label outside the classes.
    """
    if settings.train is None:
        return glue.load_glue(listed("task", settings.task or ""), settings.data, settings.train_rows)
    own = settings.word_task() if settings.per_word else settings.own_task()
    return [own.load(settings.train_rows)]


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


def encode(job: FinetuneJob, data: Data, config: EncoderConfig, cache: RowCache) -> Encoded:
    """Open a task's tokenized rows, or tokenize them, for a model with this configuration."""
    train, *judged = cache.rows(
        [data.facts.fingerprint, _described(job.tokenizer)],
        [data.train, *data.judged.values()],
        job.tokenizer,
        job.tuning.max_length,
        config,
        regression=data.task.classes is None,
        per_word=data.task.per_word,
    )
    return Encoded(data, train, dict(zip(data.judged, judged, strict=True)))


def _described(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return all that decides how a tokenizer encodes rows."""
    options = [
        type(tokenizer).__name__,
        tokenizer.model_input_names,
        tokenizer.truncation_side,
        # The backend's JSON does not tell whether names of special tokens in text are plain text.
        tokenizer.split_special_tokens,
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps([*options, str(tokenizer.init_kwargs), sorted(tokenizer.get_vocab().items())])
    # What an earlier call truncated or padded does not matter to the next.
    return json.dumps([*options, {**json.loads(backend.to_str()), "truncation": None, "padding": None}])


@dataclass(frozen=True)
class Checked:
    """What fine-tuning starts from: tasks and variants by name. Every model has read the longest row."""

    tasks: dict[str, Encoded]
    weights: str
    """The fingerprint of the pretrained weights."""
    parameters: dict[str, ParameterCounts]


@torch.no_grad()
def prepare(job: FinetuneJob, cache: RowCache) -> Checked:
    """Load all tasks, tokenize their text or find it in the cache, and let every model read the longest row.

    Raises:
        InputError: if a task can't be loaded, a model, method or tokenizer does not fit, or rows are too long.
    """
    loaded = load_tasks(job.data)
    per_word = job.data.per_word
    tasks: list[Encoded] = []
    weights, parameters = "", {}
    with quiet_transformers():
        for variant in job.variants.values():
            model = load(job.model, variant, 2, per_word=per_word)
            if not tasks:
                rows.check_tokenizer(job.tokenizer, model.config.vocab_size, per_word=per_word)
                if job.tuning.packed and "-" in model.config.blocks:
                    raise InputError("packed", "a funnel would pool across the ends of rows; leave it out")
                weights = fingerprint_of(model)
                with ranks.main_first():
                    tasks = [encode(job, data, model.config, cache) for data in loaded]
            _read_the_longest_row(model, tasks)
            parameters[variant.name] = _count_parameters(model)
    return Checked({task.data.task.name: task for task in tasks}, weights, parameters)


def _read_the_longest_row(model: Classifier, tasks: Sequence[Encoded]) -> None:
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


def _count_parameters(model: Classifier) -> ParameterCounts:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    positional = {name: size for name, size in sizes.items() if name.startswith("encoder.position.")}
    assert model.loading_report is not None
    fresh = sum(positional.get(name, 0) for name in model.loading_report.initialised)
    return ParameterCounts(sum(sizes.values()), sum(positional.values()), fresh)
