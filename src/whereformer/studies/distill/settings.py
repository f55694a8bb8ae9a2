"""The options of a distillation. Importing them is fast, so that --help is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...errors import InputError
from ...lab.options import MOST_COUNT, MOST_THREADS, TextOptions, check_range, listed_numbers
from ...lab.study import Study

if TYPE_CHECKING:
    from .run import DistillJob


@dataclass(frozen=True, kw_only=True)
class DistillPositions(TextOptions, Study):
    """Turn a pretrained model's position embeddings into TISA's kernels, head by head, without any training.

    Part of each head's scores over text depends only on the offset: a curve. Layer by layer, TISA's kernels are fitted
    to the part of that curve that the position embeddings cause. Then the embeddings are dropped, and the command
    measures how well the model still works: how similar its states are, its masked-LM loss if it has such a head, and,
    with --pairs, how well its sentence embeddings rank pairs of texts.

    Writes model/ (with the most kernels) and results.json. Fine-tune the model with `whereformer finetune --position
    own`, or look at it with `whereformer analyze`.
    """

    FLAGS: ClassVar = {"model": "MODEL"}

    model: str
    """A folder, or an id on the Hugging Face Hub: BERT, ALBERT, RoBERTa, ELECTRA or a model of this library."""

    kernels: str = "1,3,5"
    """Numbers of kernels per head to try, separated by commas."""

    tokens: int = 16384
    """Number of tokens of text. A quarter of them is for judging."""

    length: int | None = None
    """Tokens in a window. Default: 128."""

    pairs: Path | None = None
    """Pairs of texts with a number for their similarity (.csv, .tsv, .jsonl, .parquet), to judge sentence embeddings
    by."""

    text: str | None = None
    """The two columns of texts."""

    label: str | None = None
    """The column of similarities."""

    threads: int | None = None
    """Threads on the CPU. Default: torch's."""

    out: Path = Path("runs/distill-positions")
    """Folder for the model and the results."""

    def job(self) -> DistillJob:
        check_range(self, length=(3, 2**16), tokens=(1, MOST_COUNT), threads=(1, MOST_THREADS))
        kernels = sorted(listed_numbers("kernels", self.kernels, 1, 16))
        if self.pairs is None and (self.text or self.label):
            raise InputError("text" if self.text else "label", "only with `pairs`: it names a column of that table")

        from .pairs import read_pairs
        from .run import DistillJob

        return DistillJob(
            path=self.model,
            kernels=kernels,
            length=self.length,
            tokens=self.tokens,
            data=self.data,
            column=self.column,
            pairs=None if self.pairs is None else read_pairs(self.pairs, self.text, self.label),
            threads=self.threads,
        )
