"""The contents of a comparison's ``results.json``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

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
