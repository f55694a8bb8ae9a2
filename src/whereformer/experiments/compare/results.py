"""What ``results.json`` of a comparison holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...runs.results import Results, refuse_other_settings
from ...training.text import TextFacts
from .settings import Sizes

BASELINE = "none"
"""The method whose training speed is 1."""


@dataclass(frozen=True)
class CompareSettings(Sizes):
    """All that the runs of one folder have in common.

    Args:
        text: the text's fingerprint.
        device: the kind of device.
    """

    text: str
    device: str


@dataclass(frozen=True)
class CompareText(TextFacts):
    """What is known about the text.

    Args:
        data: where it is, as the user gave it; empty for Python's documentation.
        column: the tables' column that holds it, if the user named one.
    """

    data: list[str]
    column: str | None


@dataclass(frozen=True)
class Score:
    """Held-out loss in nats and accuracy in 0..1 at one length."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Cannot:
    """Why a method has no score at one length."""

    cannot: str


@dataclass(frozen=True)
class Run:
    """One trained model.

    Args:
        seconds: of training.
        train_loss: at each step.
        scores: by the number of tokens that are read at a time.
        window_losses: the mean held-out loss of each window.
        positional_parameters, parameters: numbers of parameters, of position and in all.
        curves: what each head adds to scores, [layer][head][offset]; None if that is no curve.
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
    """Training speed of a method, relative to :data:`BASELINE`, and bytes that a step allocates at its peak."""

    relative_speed: float
    lowest: float
    highest: float
    peak_memory: int


@dataclass(frozen=True)
class CompareResults(Results):
    """A comparison as far as it has come.

    Args:
        settings: what its runs have in common.
        runs: by method and seed.
        text: what it was trained on.
        predicted_tokens: masked tokens of the held-out text.
        speed: by method, as soon as it is measured.
    """

    FORMAT = 1

    settings: CompareSettings
    runs: dict[str, dict[int, Run]]
    text: CompareText
    predicted_tokens: int
    speed: dict[str, Speed] = field(default_factory=dict)

    def run(self, position: str, seed: int) -> Run | None:
        """The finished run of a method and seed, if there is one."""
        return self.runs.get(position, {}).get(seed)

    def with_run(self, position: str, seed: int, run: Run) -> CompareResults:
        """These results and a finished run."""
        return replace(self, runs={**self.runs, position: {**self.runs.get(position, {}), seed: run}})


def earlier_results(out: Path, settings: CompareSettings) -> CompareResults | None:
    """What an earlier run with these settings left in a folder.

    Raises:
        InputError: if the folder holds results of other settings, or something else under that name.
    """
    found = CompareResults.load_if_there(out / "results.json")
    if found is not None:
        refuse_other_settings(out, asdict(found.settings), asdict(settings))
    return found
