"""The command ``whereformer translate run``: translate lines with a trained model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rich.console import Console

from ..errors import InputError, printable
from ..files import check_regular
from ..lab.options import find_device
from ..lab.recipe import Range, WithPlugin

WINDOW = 1024
"""Lines that are read before any is translated, so that a batch has lines of similar length."""


@dataclass(frozen=True)
class TranslateRun(WithPlugin):
    """Translate the lines of standard input.

    Each line of the input gives one line of the output, in the same order; empty lines stay empty. The command reads,
    translates and writes 1024 lines at a time. Only translations go to standard output.
    """

    FLAGS: ClassVar = {"model": "MODEL"}
    EXAMPLE: ClassVar = "whereformer translate run my_model < text.en"
    INTERRUPTED: ClassVar = "all lines that were written are complete"

    model: str
    """The folder model/ of a training, or an id on the Hugging Face Hub."""
    references: Path | None = None
    """The correct translations, line by line, for BLEU and chrF of sacrebleu, which go to standard error."""
    beams: Annotated[int, Range(1, 1000)] = 4
    """Number of beams. 1 is greedy search."""
    length_penalty: Annotated[float, Range(-10, 10)] = 0.6
    """A translation's log-probability is divided by its length to this power. A larger power favors longer
    translations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. "auto" is a GPU if there is one."""

    def run(self, console: Console) -> None:
        """Translate the lines."""
        from ..data.read import decode_lines, read_lines
        from ..lab.translation import load, scores, translate_lines

        references = None
        if self.references is not None:
            check_regular("references", self.references)
            references = list(read_lines("references", self.references))
        model, tokenizer = load(self.model, find_device(self.device))
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        lines = decode_lines(None, "the standard input", sys.stdin.buffer)
        window = 1 if sys.stdin.isatty() else WINDOW
        written: list[str] = []
        while batch := list(islice(lines, window)):
            translations = translate_lines(
                model, tokenizer, batch, beams=self.beams, length_penalty=self.length_penalty
            )
            print("\n".join(map(printable, translations) if sys.stdout.isatty() else translations), flush=True)
            written += translations
        if references is not None:
            if len(references) != len(written):
                expected = f"{len(written):,} lines as the input has"
                raise InputError("references", f"expected {expected}, got {len(references):,}")
            print(*scores(written, references), sep="\n", file=sys.stderr)
