"""The contents of a comparison's ``results.json``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from ...data.encode import TextFacts
from ...errors import InputError
from ...lab.score import Cannot
from ...lab.store import RunResults
from .settings import CompareSettings

if TYPE_CHECKING:
    from ...lab.sheet import Sheet


@dataclass(frozen=True)
class CompareText(TextFacts):
    """Facts about the text.

    Args:
        data: its paths, as the user gave them; empty for Python's documentation.
        column: the text column of tables, if the user named one.
    """

    data: list[str]
    column: str | None


@dataclass(frozen=True)
class CompareTask:
    """Facts about a labeled table.

    Args:
        train, validation: its files, as the user gave them.
        text: its columns of text.
        label: its column of labels.
        classes: the classes; None for numbers.
        metric: "accuracy", or "spearman" for numbers.
        training_rows, validation_rows: number of rows.
        cut_rows: number of rows that are longer than the training length, and are cut.
        guessing: the score of always predicting the training rows' most frequent class; 0 for numbers.
        whole_length: a length at which nine rows in ten are whole; None if no row is cut.
    """

    train: str
    validation: str
    text: list[str]
    label: str
    classes: list[str] | None
    metric: Literal["accuracy", "spearman"]
    training_rows: int
    validation_rows: int
    cut_rows: int
    guessing: float
    whole_length: int | None = None

    def shown(self, score: float) -> str:
        """Format a score."""
        return f"{score:.1%}" if self.classes else f"{score:.3f}"

    def about_cut(self, length: int) -> str:
        """Return how many rows are cut and what to do about it, in a sentence; empty if none is."""
        if not self.cut_rows:
            return ""
        rows = self.training_rows + self.validation_rows
        advice = f"; --length {self.whole_length} reads nine in ten of them whole" if self.whole_length else ""
        return f"{self.cut_rows:,} of {rows:,} rows were cut to {length} tokens{advice}."


@dataclass(frozen=True)
class TaskScore:
    """The score of a fine-tuned model, and each validation row's share of it: their mean is the score."""

    score: float
    rows: list[float]


@dataclass(frozen=True)
class Score:
    """Held-out loss in nats and accuracy from 0 to 1, at one length."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Budget:
    """The steps and seeds that were chosen for a number of minutes."""

    minutes: float
    steps: int
    seeds: int


@dataclass(frozen=True)
class Trial:
    """The training loss at the end of a short training with a learning rate; None if it was not finite."""

    rate: float
    loss: float | None

    def __str__(self) -> str:
        return f"{self.rate:g}: {'not finite' if self.loss is None else f'{self.loss:.3f}'}"


@dataclass(frozen=True)
class Run:
    """One trained model.

    Args:
        learning_rate: the peak of the learning rate.
        seconds: training time.
        train_loss: the training loss at each step.
        scores: the score at each length, in tokens read at a time.
        window_losses: the mean held-out loss of each window.
        positional_parameters, parameters: number of parameters, of position and in all.
        curves: what each head adds to scores, [layer][head][offset]; None if that is not a curve over offsets.
        attention: the mean attention weight, [layer][head][offset]; None for layers between pooled sequences.
        task: the score of fine-tuning; None without a labeled table.
    """

    learning_rate: float
    seconds: float
    train_loss: list[float]
    scores: dict[int, Score | Cannot]
    window_losses: list[float]
    positional_parameters: int
    parameters: int
    curves: list[list[list[float]]] | None
    attention: list[list[list[float]] | None]
    task: TaskScore | None = None

    @property
    def errors(self) -> list[float]:
        """What a method is ranked by (lower is better): each window's loss, or each row's share of the task's error."""
        return self.window_losses if self.task is None else [1 - share for share in self.task.rows]


@dataclass(frozen=True)
class Speed:
    """A method's training speed relative to the method without positions, and the peak bytes of a step."""

    relative_speed: float
    lowest: float
    highest: float
    peak_memory: int


@dataclass(frozen=True)
class CompareResults(RunResults):
    """The results of a comparison, finished or so far.

    Args:
        settings: the settings that all runs share.
        runs: the finished runs, by method and seed.
        text: facts about the text.
        predicted_tokens: number of tokens of the held-out text that are predicted: masked ones, or all.
        speed: the speed of each method that has been measured.
        budget: what was chosen for a number of minutes; None if the steps were given.
        trials: the learning rates that were tried for each method.
        failed: the reason, for each method whose loss was not finite.
        task: facts about a labeled table; None without one.
        characters: how many characters were read of a longer text; None if all of it was.
        plugin: the file that registered methods; None without one.
        sources: the hash of the file of each method that a plugin registered.
    """

    FORMAT = 3
    KEYS = 2

    settings: CompareSettings
    runs: dict[str, dict[int, Run]]
    text: CompareText
    predicted_tokens: int
    speed: dict[str, Speed] = field(default_factory=dict)
    budget: Budget | None = None
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    task: CompareTask | None = None
    characters: int | None = None
    plugin: str | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def without(self, names: Container[str]) -> Self:
        """Return these results without all that is known of some methods."""

        def left(of: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in of.items() if name not in names}

        return replace(self, runs=left(self.runs), trials=left(self.trials), speed=left(self.speed))

    def sheets(self) -> Sequence[Sheet]:
        from .report import sheets

        return sheets(self)

    def sentences(self) -> Sequence[str]:
        from .ranking import sentences

        return sentences(self)

    def report(self) -> str | None:
        from .report import build_report

        return build_report(self) if self.runs else None

    def problem(self) -> InputError | None:
        return InputError("learning_rate", "; ".join(self.failed.values())) if self.failed else None
