"""The contents of an extension's ``results.json``, with its table and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...lab.json_files import check_that
from ...lab.sheet import Column, Sheet
from ...lab.store import Results
from .settings import ExtendSettings

SHORT, CHUNKS, FOUND = "like the original", "like its chunks", "passages found"
"""What is measured on held-out text."""


@dataclass(frozen=True)
class ExtendText:
    """The text that was read: documents, ``held_out`` of which judge the model."""

    source: str
    documents: int
    held_out: int


@dataclass(frozen=True)
class Judged:
    """A model on held-out documents.

    Args:
        step: the steps of training so far.
        short: the mean cosine with the original's vectors, of windows that the original can read.
        chunks: the mean cosine with the mean of the original's vectors of chunks, of whole documents.
        found: the share of passages that are nearest to the vector of their document.
    """

    step: int
    short: float
    chunks: float
    found: float


@dataclass(frozen=True, kw_only=True)
class ExtendResults(Results):
    """How an encoder learned to read longer texts.

    Args:
        kind: transformers' name for this kind of model.
        limit: the tokens that the original reads.
        settings: what decides the new model.
        text: facts about the text.
        original: the share of held-out passages that the mean of the original's chunks finds.
        curve: the model on held-out documents, before, during and after training.
        losses: each part of the training loss, by step.
        cpu_seconds: the time that the training took on all of the CPU's cores together, judging included.
    """

    FORMAT = "extend 1"
    INDENT = 1

    kind: str
    limit: int
    settings: ExtendSettings
    text: ExtendText
    original: float
    curve: list[Judged]
    losses: dict[str, list[float]]
    cpu_seconds: float

    def check(self) -> None:
        check_that(bool(self.curve), "curve", "at least one row")
        steps = all(len(values) == self.settings.steps for values in self.losses.values())
        check_that(steps, "losses", f"{self.settings.steps} numbers each")

    def sheets(self) -> Sequence[Sheet]:
        columns = [Column("step"), Column(SHORT, "cosine"), Column(CHUNKS, "cosine"), Column(FOUND)]
        rows = [(f"{row.step:,}", f"{row.short:.4f}", f"{row.chunks:.4f}", f"{row.found:.1%}") for row in self.curve]
        return [Sheet.of(f"On {self.text.held_out} documents that were held out", columns, rows)]

    def sentences(self) -> Sequence[str]:
        last = self.curve[-1]
        return [
            f"The model reads {self.settings.length:,} tokens, the original {self.limit:,}.",
            f"One vector of a document finds {last.found:.1%} of its passages among {self.text.held_out} documents; "
            f"the mean of the original's chunks finds {self.original:.1%}.",
            f"Its vectors of texts that the original can read have a cosine of {last.short:.4f} with the original's.",
        ]

    def report(self) -> str:
        from ...lab.report.page import render

        return render(
            Path(__file__).with_name("report.html.j2"),
            title="A model that reads more",
            sentences=self.sentences(),
            sheets=self.sheets(),
            settings=self.settings,
            text=self.text,
            facts_of={"Settings": asdict(self.settings), "Machine": self.machine},
            command=None,
        )
