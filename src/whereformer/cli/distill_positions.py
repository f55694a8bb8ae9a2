"""The command ``whereformer distill-positions``: replace position embeddings by TISA kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from ..errors import InputError
from ..lab.options import MOST_COUNT, MOST_THREADS, check_range, listed_numbers


@dataclass(frozen=True)
class DistillPositions:
    """Turn a pretrained model's position embeddings into TISA's kernels, head by head, without any training.

    Part of each head's scores over text depends only on the offset: a curve. Layer by layer, TISA's kernels are fitted
    to the part of that curve that the position embeddings cause. Then the embeddings are dropped, and the command
    measures how well the model still works: how similar its states are, its masked-LM loss if it has such a head, and,
    with --pairs, how well its sentence embeddings rank pairs of texts.

    Writes model/ (with the most kernels) and results.json. Fine-tune the model with `whereformer finetune --position
    own`, or look at it with `whereformer analyze`.
    """

    FLAGS: ClassVar = {"model": "MODEL"}

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A folder, or an id on the Hugging Face Hub: BERT, ALBERT, RoBERTa, ELECTRA or a model of this library."""

    kernels: str = "1,3,5"
    """Numbers of kernels per head to try, separated by commas."""

    data: tuple[str, ...] = ()
    """Text to fit to and to judge on: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md,
    .rst, .parquet, .jsonl. Default: the documentation that comes with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

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

    def run(self, console: Console) -> None:
        """Fit the kernels, judge the model without its embeddings and save it."""
        check_range(self, length=(3, 2**16), tokens=(1, MOST_COUNT), threads=(1, MOST_THREADS))
        kernels = sorted(listed_numbers("kernels", self.kernels, 1, 16))
        import torch

        from ..data import corpus
        from ..lab.folder import open_folder
        from ..lab.terminal import Bar, say
        from ..studies.analyze.text import pages_of
        from ..studies.distill.pairs import read_pairs
        from ..studies.distill.run import DistillOptions, distill
        from .tables.distill import print_distilling

        if self.pairs is None and (self.text or self.label):
            raise InputError("text" if self.text else "label", "only with `pairs`: it names a column of that table")
        pairs = None if self.pairs is None else read_pairs(self.pairs, self.text, self.label)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with open_folder(self.out):
            with console.status("reading the text"):
                documents = corpus.load_documents(self.data, self.column)
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
            model = self.out / "model"
            say(console, f"wrote {model} ({max(kernels)} kernels per head) and {self.out / 'results.json'}")
