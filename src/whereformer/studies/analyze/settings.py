"""The options and the settings of an analysis. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...errors import InputError
from ...lab.options import MOST_COUNT, MOST_THREADS, TextOptions, check_range
from ...lab.study import Study

if TYPE_CHECKING:
    from .run import AnalyzeJob


@dataclass(frozen=True, kw_only=True)
class Analyze(TextOptions, Study):
    """What did a model learn about position? Reads it off the weights, fits and names every head, and draws it.

    The analysis is that of the TISA paper. It measures how close the position embeddings are to Toeplitz (whether they
    know more than distances) and shows what position alone adds to each head's scores: as a heatmap, as a curve over
    offsets and as TISA's kernels, in every layer if the method acts in every layer. Over text, it measures how much of
    the attention the offset alone explains.

    It reads BERT, ALBERT, RoBERTa, ELECTRA and Funnel-Transformer checkpoints of transformers and models of this
    library. Of others, such as GPT-2, BART, DistilBERT, ViT or T5, it reads only the table of position embeddings or
    buckets. Several models are compared. A folder with checkpoint-* folders (as `whereformer pretrain` makes) shows how
    the model learned. Writes report.html (open it in a browser), results.json and pictures.
    """

    FLAGS: ClassVar = {"model": "MODEL", "text": "--no-text"}

    model: tuple[str, ...] = ()
    """Folders, or ids on the Hugging Face Hub."""

    scores: str | None = None
    """A score for each model, such as its GLUE average, to compare Toeplitzness with."""

    length: int | None = None
    """Number of positions to look at. Default: those of the model, at most 512."""

    text: bool = True
    """Leave out the attention over text, which takes longer than the rest."""

    tokens: int = 8192
    """Number of tokens of text to measure it over."""

    max_kernels: int = 5
    """Largest number of TISA kernels to fit to each head's curve, from 1 up."""

    threads: int | None = None
    """Threads on the CPU. Default: torch's."""

    out: Path = Path("runs/analyze")
    """Folder for the results."""

    def job(self) -> AnalyzeJob:
        check_range(self, length=(1, 2**16), tokens=(1, MOST_COUNT), max_kernels=(1, 16), threads=(1, MOST_THREADS))
        if not self.model:
            raise InputError("model", "expected at least one folder or id on the Hugging Face Hub, got none")
        if not self.text and (self.data or self.column):
            raise InputError("text", "does not read text, so `data` and `column` can't be used with it")

        from .run import AnalyzeJob
        from .sources import parsed_scores, sources_of

        return AnalyzeJob(self, sources_of(self.model, parsed_scores(self.scores)))
