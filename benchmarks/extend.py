"""Does an extended sentence encoder find passages in long documents, and is it as good on short texts as it was?

Run: .venv/bin/python benchmarks/extend.py --model all-MiniLM-L6-v2 --extended runs/extend/posts-0 \\
     --documents 20newsgroups/train.parquet --pairs stsb/validation.parquet

``--extended`` are folders that `whereformer extend` made from --model, such as one for each of several seeds. For each
long document, the original makes the vectors of passages from places spread evenly over it. A passage is found if its
document has the nearest vector of all. The rows of the table are ways to make documents' vectors: the original as it
is, which reads the first tokens only; the mean of its vectors of chunks, as long as it can read and shorter; all
vectors of the shortest chunks; the original with its position embeddings repeated and windows, as `whereformer extend`
begins, without training; and each extended model. Pairs of texts with a number for their similarity measure, by the
rank correlation of the cosines, how good the vectors of short texts are.

Every finished row is a file in --out and is not repeated.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark import Benchmark, main
from parts import keep
from rich.console import Console
from rich.table import Table
from torch import Tensor

from whereformer.analysis.metrics import METRICS
from whereformer.data import read
from whereformer.data.corpus import TextSource
from whereformer.errors import InputError
from whereformer.lab.sentence_encoders import SentenceEncoder, lengthen, load_encoder
from whereformer.recipes.extend import chunk_means

AS_IS, REPEATED, BY_CHUNK = "as it is", "repeated, untrained", "a vector for each chunk"


@dataclass(frozen=True, kw_only=True)
class Extended(Benchmark):
    """Measure how well one vector of a long document finds the document's passages."""

    model: Path
    """The original's folder."""
    documents: tuple[str, ...]
    """Text with long documents."""
    pairs: Path
    """A table of pairs of texts, with columns sentence1, sentence2 and label."""
    extended: tuple[Path, ...] = ()
    """Folders of `whereformer extend` from --model; their last names are the names of rows."""
    length: int = 1024
    """Tokens of a document that are read. Shorter documents are left out."""
    count: int = 150
    """Documents, drawn from all that are long enough."""
    passages: int = 7
    """Passages of a document."""
    passage: int = 64
    """Tokens of a passage."""
    chunks: tuple[int, ...] = (254, 128, 64)
    """Tokens of a chunk; each number has a row of the table."""
    out: Path = Path("runs/extend-benchmark")

    def measure(self, console: Console) -> dict[str, Any]:
        """Make the missing rows, then print all."""
        rows = {}
        for name in (AS_IS, *self._sizes, BY_CHUNK, REPEATED, *(folder.name for folder in self.extended)):
            file = self.out / f"{name.replace(' ', '-').replace(',', '')}.json"
            rows[name] = keep(file, self._settings, partial(self._scores, name))
            console.print(f"{name}: found {rows[name]['found']:.3f}", highlight=False)
        table = Table("vectors of documents", "pairs, Spearman", *(f"at {start}" for start in self._starts), "mean")
        for name, row in rows.items():
            shares = (f"{share:.3f}" for share in row["by_place"])
            table.add_row(name, f"{row['spearman']:.4f}", *shares, f"{row['found']:.3f} ± {row['error']:.3f}")
        console.print(table)
        return {"settings": self._settings, "rows": rows}

    @property
    def _settings(self) -> dict[str, Any]:
        return self.settings("model", "documents", "pairs", "extended") | {"starts": self._starts}

    @property
    def _sizes(self) -> dict[str, int]:
        """The names of the rows for chunks, and their tokens."""
        return {f"mean of chunks of {tokens}": tokens for tokens in self.chunks}

    @property
    def _starts(self) -> list[int]:
        """The first token of each passage of a document."""
        room = self.length - 2 - self.passage
        return [round(room * (index + 0.5) / self.passages) for index in range(self.passages)]

    def _scores(self, name: str) -> dict[str, Any]:
        """Return how well the vectors of a row of the table do, and the CPU time that the documents took."""
        student, rows = self._encoder(name), self._rows
        began = time.process_time()
        if name in self._sizes:
            vectors = chunk_means(student, rows, self._sizes[name])
        elif name == BY_CHUNK:
            chunks = rows.split(min(self.chunks), dim=1)
            vectors = torch.stack([_vectors(student, list(chunk)) for chunk in chunks], 1).flatten(0, 1)
        else:
            vectors = _vectors(student, list(rows[:, : student.room]))
        seconds = time.process_time() - began
        # Of all vectors, one is nearest to each of the passages, (documents, passages, hidden_size).
        nearest = (self._passages @ vectors.T).argmax(-1) // (len(vectors) // len(rows))
        right = (nearest == torch.arange(len(rows))[:, None]).double()
        by_document = right.mean(1)
        return {
            "found": float(right.mean()),
            "error": float(by_document.std() / len(by_document) ** 0.5),
            "by_place": right.mean(0).tolist(),
            "spearman": self._spearman(student),
            "cpu_seconds": round(seconds, 1),
        }

    def _encoder(self, name: str) -> SentenceEncoder:
        if name in (AS_IS, BY_CHUNK, *self._sizes):
            return self._teacher
        if name == REPEATED:
            return lengthen(self._teacher, self.length)
        return load_encoder(str(next(folder for folder in self.extended if folder.name == name) / "model"))

    @cached_property
    def _teacher(self) -> SentenceEncoder:
        return load_encoder(str(self.model))

    @cached_property
    def _rows(self) -> Tensor:
        """Token ids of documents, (count, length - 2), without special ones."""
        body, rows = self.length - 2, []
        for document in TextSource(self.documents).documents():
            text = "".join(document)
            ids = self._teacher.ids(text[: body * 12]) if len(text) >= body else []
            if len(ids) >= body:
                rows.append(ids[:body])
        if len(rows) < self.count:
            raise InputError("documents", f"expected {self.count} of {self.length} tokens, got {len(rows)}")
        return torch.tensor(random.Random(0).sample(rows, self.count))

    @cached_property
    def _passages(self) -> Tensor:
        """The original's vectors of passages, (count, passages, hidden_size)."""
        parts = [row[start : start + self.passage] for row in self._rows for start in self._starts]
        return _vectors(self._teacher, parts).view(len(self._rows), self.passages, -1)

    def _spearman(self, encoder: SentenceEncoder) -> float:
        names = ["sentence1", "sentence2"]
        *sides, labels = zip(*read.Table("pairs", self.pairs).rows([*names, "label"]), strict=True)
        first, second = (
            _vectors(encoder, [torch.tensor(self._teacher.ids(text)) for text in texts]) for texts in sides
        )
        return METRICS["spearman"](np.asarray(labels, float), (first * second).sum(-1).double().numpy())


@torch.no_grad()
def _vectors(encoder: SentenceEncoder, rows: list[Tensor]) -> Tensor:
    """Return the vectors of texts, (rows, hidden_size); texts of the same length are read together."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    alike = [torch.stack([rows[row] for row in group]) for _, group in groupby(order, lambda row: len(rows[row]))]
    parts = [encoder.vectors(part) for group in alike for part in group.split(max(1, 4096 // (group.shape[1] + 2)))]
    return torch.cat(parts)[torch.tensor(order).argsort()]


if __name__ == "__main__":
    main(Extended)
