"""The command ``whereformer analyze``: show what a model learned about position."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from ..errors import InputError
from ..lab.options import MOST_COUNT, MOST_THREADS, check_range


@dataclass(frozen=True)
class Analyze:
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

    FLAGS: ClassVar = {"model": "MODEL", "models": "MODEL", "text": "--no-text"}

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")] = ()
    """Folders, or ids on the Hugging Face Hub."""

    scores: str | None = None
    """A score for each model, such as its GLUE average, to compare Toeplitzness with."""

    length: int | None = None
    """Number of positions to look at. Default: those of the model, at most 512."""

    data: tuple[str, ...] = ()
    """Text to measure attention over: files, patterns such as 'data/**/*.txt' (in quotes), or folders with .txt, .md,
    .rst, .parquet, .jsonl. Default: the documentation that comes with Python."""

    column: str | None = None
    """The column of Parquet and JSON Lines files that holds the text. Default: "text", or the only column of text."""

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

    def run(self, console: Console) -> None:
        """Read the models, print what was found and write the report."""
        check_range(self, length=(1, 2**16), tokens=(1, MOST_COUNT), max_kernels=(1, 16), threads=(1, MOST_THREADS))
        if not self.models:
            raise InputError("model", "expected at least one folder or id on the Hugging Face Hub, got none")
        if not self.text and (self.data or self.column):
            raise InputError("text", "does not read text, so `data` and `column` can't be used with it")
        import torch

        from ..data import corpus
        from ..lab.folder import open_folder
        from ..lab.terminal import Bar, say
        from ..studies.analyze.report import write_report
        from ..studies.analyze.results import facts_of, write_results
        from ..studies.analyze.run import analyze
        from ..studies.analyze.settings import AnalyzeOptions
        from ..studies.analyze.sources import parsed_scores, sources_of
        from ..studies.analyze.text import pages_of
        from .tables.analyze import print_analysis

        sources = sources_of(self.models, parsed_scores(self.scores))
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with open_folder(self.out):
            pages = None
            if self.text:
                with console.status("reading the text"):
                    documents = corpus.load_documents(self.data, self.column)
                    pages = pages_of(documents)
            options = AnalyzeOptions(
                length=self.length,
                max_kernels=self.max_kernels,
                pages=pages,
                text_source=corpus.source_of(self.data),
                text_needed=bool(self.data),
                tokens=self.tokens,
            )
            with Bar(console) as progress:
                models, notes = analyze(sources, options, progress)
            facts = facts_of(options, self._words(), notes)
            write_results(models, facts, self.out / "results.json")
            print_analysis(console, models)
            with console.status("drawing"):
                written = write_report(models, facts, self.out)
            pictures = len(written) - 1
            say(
                console,
                f"wrote {self.out / 'report.html'} (open it in a browser), {self.out / 'results.json'}"
                + (f" and {pictures} pictures in {self.out / 'pictures'}" if pictures else ""),
            )

    def _words(self) -> list[str]:
        """Return the command that repeats this analysis."""
        words = ["whereformer", "analyze", *self.models]
        for option in ("scores", "length", "column", "threads"):
            value = getattr(self, option)
            words += [] if value is None else [f"--{option}", str(value)]
        words += ["--data", *self.data] if self.data else []
        words += [] if self.text else ["--no-text"]
        if self.tokens != Analyze.tokens:
            words += ["--tokens", str(self.tokens)]
        if self.max_kernels != Analyze.max_kernels:
            words += ["--max-kernels", str(self.max_kernels)]
        return [*words, "--out", str(self.out)]
