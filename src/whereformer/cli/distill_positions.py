"""``whereformer distill-positions``: position embeddings into TISA's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from ..errors import InputError
from ..experiments.settings import check_range


@dataclass(frozen=True)
class DistillPositions:
    """Turn a pretrained model's position embeddings into TISA's kernels, head by head, without any training.

    Over text, the offset alone explains a part of each head's scores: a curve. What of it goes away with the position
    embeddings is fitted by TISA's kernels, layer by layer. Then the embeddings are dropped, and the command says how
    much of the model is left: how alike its states are to what they were, its masked-LM loss where it has a head for
    that, and with --pairs how well its sentence embeddings rank pairs of texts.

    Writes model/ (with the most kernels; fine-tune it with `whereformer finetune --position own`, or look at it with
    `whereformer analyze`) and results.json.
    """

    FLAGS: ClassVar = {"model": "MODEL"}

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder, or an id on the Hugging Face Hub: BERT, ALBERT, RoBERTa, ELECTRA or a model of this library."""

    kernels: str = "1,3,5"
    """Numbers of kernels a head to try."""

    data: tuple[str, ...] = ()
    """Text to fit to and to judge on: files or folders with .txt, .md, .rst, .parquet, .jsonl. Default: the
    documentation inside the running Python."""

    column: str | None = None
    """The text column of Parquet and JSON Lines files, if it isn't "text" or the only one."""

    tokens: int = 16384
    """Tokens of text; a quarter of them is kept for judging."""

    length: int | None = None
    """Tokens of a window. Default: 128."""

    pairs: Path | None = None
    """Pairs of texts with a number for how alike they are (.csv, .tsv, .jsonl, .parquet), for models of sentences."""

    text: str | None = None
    """The pairs' columns."""

    label: str | None = None
    """The column with how alike they are."""

    threads: int | None = None
    """Threads on the CPU. Default: torch's."""

    out: Path = Path("runs/distill-positions")
    """Folder for the model and the results."""

    def run(self, console: Console) -> None:
        """Do it."""
        check_range(self, length=(3, 2**16), tokens=(1, float("inf")), threads=(1, 2**20))
        kernels = self._kernels()
        import torch

        from ..data import corpus
        from ..experiments.analyze.text import pages_of
        from ..experiments.distill.pairs import read_pairs
        from ..experiments.distill.run import DistillOptions, distill
        from ..runs.folder import open_folder
        from .terminal import Bar, print_distilling, say

        if self.pairs is None and (self.text or self.label):
            raise InputError("text" if self.text else "label", "only with `pairs`, whose column it names")
        pairs = None if self.pairs is None else read_pairs(self.pairs, self.text, self.label)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with open_folder(self.out):
            with console.status("reading the text"):
                documents = corpus.documents_of(self.data, self.column)
            options = DistillOptions(
                path=self.model,
                kernels=kernels,
                length=self.length,
                tokens=self.tokens,
                pages=pages_of(documents),
                text_source=corpus.source_of(self.data),
                pairs=pairs,
            )
            with Bar(console) as progress:
                results = distill(options, self.out, progress)
            print_distilling(console, results)
            say(console, f"wrote {self.out / 'model'} ({max(kernels)} kernels a head) and {self.out / 'results.json'}")

    def _kernels(self) -> list[int]:
        parts = [part.strip() for part in self.kernels.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and 1 <= int(part) <= 16 for part in parts):
            raise InputError("kernels", f"expected numbers from 1 to 16 split by commas, got {self.kernels!r}")
        return sorted({int(part) for part in parts})
