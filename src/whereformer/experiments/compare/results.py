"""The contents of a comparison's ``results.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...runs.results import Results, refuse_other_settings
from ...training.text import TextFacts
from .settings import Sizes

BASELINE = "none"
"""The method that training speed is measured against; its own speed is 1."""


@dataclass(frozen=True)
class CompareSettings(Sizes):
    """The settings that all runs in a folder share.

    Args:
        text: the text's fingerprint.
        device: the kind of device, such as "cpu".
    """

    text: str
    device: str


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
class Cannot:
    """The reason why a method has no score at one length."""

    cannot: str


@dataclass(frozen=True)
class Run:
    """One trained model.

    Args:
        seconds: training time.
        train_loss: the training loss at each step.
        scores: the score at each length, in tokens read at a time.
        window_losses: the mean held-out loss of each window.
        positional_parameters, parameters: number of parameters, of position and in all.
        curves: what each head adds to scores, [layer][head][offset]; None if that is not a curve over offsets.
        attention: the mean attention weight, [layer][head][offset]; None for layers between pooled sequences.
    """

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
    """A method's training speed relative to :data:`BASELINE`, and the bytes that a step allocates at its peak."""

    relative_speed: float
    lowest: float
    highest: float
    peak_memory: int


@dataclass(frozen=True)
class CompareResults(Results):
    """The results of a comparison, finished or so far.

    Args:
        settings: the settings that all runs share.
        runs: the finished runs, by method and seed.
        text: facts about the text.
        predicted_tokens: number of masked tokens in the held-out text.
        speed: the speed of each method that has been measured.
    """

    FORMAT = 1

    settings: CompareSettings
    runs: dict[str, dict[int, Run]]
    text: CompareText
    predicted_tokens: int
    speed: dict[str, Speed] = field(default_factory=dict)

    def run(self, position: str, seed: int) -> Run | None:
        """Return the finished run of a method and seed, or None."""
        return self.runs.get(position, {}).get(seed)

    def with_run(self, position: str, seed: int, run: Run) -> CompareResults:
        """Return these results with a finished run added."""
        return replace(self, runs={**self.runs, position: {**self.runs.get(position, {}), seed: run}})


def earlier_results(out: Path, settings: CompareSettings) -> CompareResults | None:
    """Return the results that an earlier run with these settings left in a folder, or None.

    Raises:
        InputError: if the folder holds results for other settings, or its ``results.json`` is something else.
    """
    found = CompareResults.load_if_there(out / "results.json")
    if found is not None:
        refuse_other_settings(out, asdict(found.settings), asdict(settings))
    return found
