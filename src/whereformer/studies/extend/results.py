"""The contents of an extension's ``results.json``, with its table and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...lab.sheet import Column, Sheet
from ...lab.store import Results
from .settings import ExtendSettings

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

SHORT, CHUNKS, FOUND, LEAD = "like the original", "like its chunks", "passages found", "lead"
"""What is measured on held-out text."""
FEW = 12
"""With fewer held-out documents, nearly every model finds nearly every passage."""


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
        lead: how much nearer that is than the nearest of other documents, as a mean difference of cosines.
    """

    step: int
    short: float
    chunks: float
    found: float
    lead: float


@dataclass(frozen=True, kw_only=True)
class ExtendResults(Results):
    """How an encoder learned to read longer texts.

    Args:
        kind: transformers' name for this kind of model.
        limit: the tokens that the original reads.
        settings: what decides the new model.
        text: facts about the text.
        chunks_found, chunks_lead: the same for the mean of the original's vectors of chunks.
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
    chunks_found: float
    chunks_lead: float
    curve: list[Judged]
    losses: dict[str, list[float]]
    cpu_seconds: float

    def sheets(self) -> Sequence[Sheet]:
        columns = [
            Column("step"),
            Column(SHORT, "cosine"),
            Column(CHUNKS, "cosine"),
            Column(FOUND),
            Column(LEAD, "cosine"),
        ]
        rows = [
            (f"{row.step:,}", f"{row.short:.4f}", f"{row.chunks:.4f}", f"{row.found:.1%}", f"{row.lead:.4f}")
            for row in self.curve
        ]
        rows.append(("chunks", "", "", f"{self.chunks_found:.1%}", f"{self.chunks_lead:.4f}"))
        return [Sheet.of(f"On {self.text.held_out} documents that were held out", columns, rows)]

    def sentences(self) -> Sequence[str]:
        last, documents = self.curve[-1], self.text.held_out
        few = f"Among {documents} documents, passages are easy to find: give more text to see a difference."
        return [
            f"The model reads {self.settings.length:,} tokens, the original {self.limit:,}.",
            f"One vector of a document finds {last.found:.1%} of its passages among {documents} documents; "
            f"the mean of the original's chunks finds {self.chunks_found:.1%}.",
            *([few] if documents < FEW else ()),
            f"The vector of its own document is nearer to a passage than any other by {last.lead:.4f} on average; with "
            f"chunks, by {self.chunks_lead:.4f}.",
            f"Its vectors of texts that the original can read have a cosine of {last.short:.4f} with the original's.",
        ]

    def report(self) -> str:
        from ...lab.report.page import render

        return render(
            Path(__file__).with_name("report.html.j2"),
            title="A model that reads more",
            sentences=self.sentences(),
            sheets=self.sheets(),
            figure=self._figure() if self.settings.steps else None,
            settings=self.settings,
            text=self.text,
            facts_of={"Settings": asdict(self.settings), "Machine": self.machine},
            command=None,
        )

    def _figure(self) -> Markup:
        """Draw each part of the loss over the steps of training."""
        from ...lab.report import figures
        from ...lab.report.losses import smoothed

        def paint(figure: Figure) -> None:
            axes = figure.add_subplot()
            for (name, losses), look in zip(self.losses.items(), figures.series(len(self.losses)), strict=True):
                axes.plot(*smoothed(losses), label=name, **look.line)
            axes.set(xlabel="training step", ylabel="loss", yscale="log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.legend(frameon=False)

        return figures.draw("loss-over-steps", "The parts of the loss over the steps of training.", 560, 320, paint)
