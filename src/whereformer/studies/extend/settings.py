"""The options of an extension. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ...lab.options import MOST_COUNT, MOST_SEED, TextOptions, Threads, check_range
from ...lab.study import Study

if TYPE_CHECKING:
    from .run import ExtendJob

FEWEST_DOCUMENTS = 32
"""The fewest documents of a text, so that two are held out and a step has several."""
Rows = Literal["repeat", "interpolate"]
"""How there are more position embeddings."""


@dataclass(frozen=True, kw_only=True)
class ExtendSettings:
    """What decides the model that is written. ``text`` is a hash of the tokens that were read."""

    model: str
    length: int
    rows: Rows
    steps: int
    documents: int
    seed: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Extend(TextOptions, Threads, Study):
    """Teach a pretrained sentence encoder to read longer texts, in a few minutes of training.

    The position embeddings are repeated until there are --length of them, and each token attends to those near it. Then
    the model learns from the original. On texts that are short enough for the original, its outputs should be the same.
    On longer texts, its vector should be close to the mean of the original's vectors of the parts, and closer to those
    of the text's own passages than to those of others. The position embeddings are trained first, then all weights with
    a small learning rate.

    Writes model/, which sentence-transformers loads, results.json and report.html. A run that was interrupted continues
    from its last checkpoint. With --steps 0 nothing is trained.
    """

    FLAGS: ClassVar = {"model": "MODEL"}
    MAKES_FILES: ClassVar = True

    model: str
    """The folder of a sentence-transformers model, or of a transformers encoder with position embeddings (BERT,
    RoBERTa, MPNet, DistilBERT...), whose token states are averaged into one vector."""

    length: int = 1024
    """The most tokens that the new model can read."""

    rows: Rows = "repeat"
    """How training begins. repeat: with the position embeddings that the original reads, again and again, and windows
    in which no two are the same. interpolate: with all of them stretched, without windows."""

    steps: int = 80
    """Steps of training."""

    documents: int = 700
    """The most documents to learn from. Each has at least --length tokens; anything beyond that is ignored."""

    seed: int = 0
    """Random seed."""

    out: Path = Path("runs/extend")
    """Folder for the model and the results."""

    def job(self) -> ExtendJob:
        check_range(self, length=(16, 2**16), documents=(FEWEST_DOCUMENTS, 2**20))
        check_range(self, steps=(0, MOST_COUNT), seed=(0, MOST_SEED))
        self.check_threads()

        from .run import ExtendJob

        return ExtendJob(
            path=self.model,
            length=self.length,
            rows=self.rows,
            steps=self.steps,
            documents=self.documents,
            seed=self.seed,
            data=self.data,
            column=self.column,
            threads=self.threads,
        )

    def usage(self) -> str:
        return f'After "import whereformer.models", load the model with SentenceTransformer("{self.out / "model"}").'
