"""Make a task that needs every token of plain text: to restore the case of its words and the marks behind them.

Run: .venv/bin/python benchmarks/restored_text.py --train wikipedia/train-*.parquet \\
     --test wikipedia/validation.parquet --out FOLDER

Writes train.parquet and test.parquet, with a sentence in small letters without marks in the column "text" and, in the
column "label", a class for each of its words: small, Title or CAPS (capitals elsewhere, too), and the mark behind it, a
comma or a point, if there is one. Semicolons and colons count as commas, question and exclamation marks as points.
benchmarks/funnel_pays.py reads such tables.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as arrow
import pyarrow.parquet as parquet
import tyro
from rich.console import Console

from whereformer.cli.main import execute
from whereformer.data.corpus import TextSource
from whereformer.errors import InputError

END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
WORD = re.compile(r"[\w'-]*\w")
"""What is left of a word without the marks around it."""
MARKS = {",": ",", ";": ",", ":": ",", ".": ".", "!": ".", "?": "."}


@dataclass(frozen=True)
class RestoredText:
    """Make a table whose words have lost their case and marks, and have them as classes."""

    train: Annotated[list[str], tyro.conf.arg(metavar="PATH")]
    """Text for training."""
    test: Annotated[list[str], tyro.conf.arg(metavar="PATH")]
    """Text to judge by."""
    out: Path
    """Folder for the tables."""
    train_rows: int = 60_000
    """Sentences for training, drawn at random."""
    test_rows: int = 2_000
    """Sentences to judge by."""
    least: int = 6
    """Words that a sentence has at least."""
    most: int = 60
    """Words that a sentence has at most."""

    def run(self, console: Console) -> None:
        """Write both tables."""
        self.out.mkdir(parents=True, exist_ok=True)
        for name, paths, count in (("train", self.train, self.train_rows), ("test", self.test, self.test_rows)):
            rows = list(self._rows(paths))
            if len(rows) < count:
                raise InputError(name, f"expected text of at least {count} sentences, got {len(rows)}")
            texts, labels = zip(*random.Random(0).sample(rows, count), strict=True)
            parquet.write_table(arrow.table({"text": texts, "label": labels}), self.out / f"{name}.parquet")
            console.print(f"{name}: {count:,} of {len(rows):,} sentences, such as", highlight=False)
            console.print(f"  {texts[0]}\n  {labels[0]}", highlight=False)

    def _rows(self, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
        for document in TextSource(paths).documents():
            for paragraph in "".join(document).splitlines():
                # A line without an end is a heading or an item of a list.
                for sentence in END.split(paragraph) if paragraph.endswith((".", "!", "?")) else ():
                    found = [labeled(word) for word in sentence.split()]
                    if self.least <= len(found) <= self.most and all(found):
                        words, classes = zip(*filter(None, found), strict=True)
                        yield " ".join(words), " ".join(classes)


def labeled(word: str) -> tuple[str, str] | None:
    """Return a word without case and marks, and its class; None if nothing is left of it."""
    found = WORD.search(word)
    if found is None:
        return None
    bare, after = found.group(), word[found.end() :]
    capitals = [letter.isupper() for letter in bare]
    case = "small" if not any(capitals) else "Title" if capitals[0] and not any(capitals[1:]) else "CAPS"
    return bare.lower(), case + next((MARKS[mark] for mark in reversed(after) if mark in MARKS), "")


if __name__ == "__main__":
    execute(tyro.cli(RestoredText))
