"""LongEmbed's two synthetic tasks: does one vector of a long text keep a sentence that a question asks for?

Run: .venv/bin/python benchmarks/longembed.py --model all-MiniLM-L6-v2 --text wikitext2/train.parquet

Every candidate is a text of --lengths tokens with one sentence hidden at a random place. Passkey: "the pass key of
Olivia Hart is 53187", among sentences that are repeated over and over. Needle: a made-up fact about a town, in --text.
A question about the sentence should be nearest to its own candidate. The share of questions that are equals ndcg@1,
since each has one right answer. Sizes in LongEmbed are 50 questions and 100 candidates of each length (Zhu et
al. 2024, arXiv 2404.12096); its needles are facts in essays.

Candidates' vectors are the original's, which cuts them off at its own limit or where its position embeddings end; the
mean of its vectors of chunks, and all of them; with the position embeddings stretched, so that each token has one;
with `whereformer extend --steps 0`, and --extended, folders of `whereformer extend` from --model.

Every finished part is a file in --out and is not repeated. Writes results.json.
"""

from __future__ import annotations

import random
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmark import Benchmark, main
from parts import keep
from rich.console import Console
from rich.table import Table
from torch import Tensor

from whereformer.data.corpus import TextSource
from whereformer.errors import InputError
from whereformer.lab.sentence_encoders import SentenceEncoder, find_position_table, lengthen, load_encoder
from whereformer.models import Encoder
from whereformer.recipes.extend import chunk_means

AS_IS, ALL_POSITIONS, CHUNKS, EACH = "cut off", "cut off at the last position", "mean of chunks", "each chunk"
STRETCHED, EXTEND = "positions stretched", "extend, untrained"
ROWS = (AS_IS, ALL_POSITIONS, CHUNKS, EACH, STRETCHED, EXTEND)
GARBAGE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
FIRST = ("Olivia", "Liam", "Amara", "Noah", "Sofia", "Kenji", "Priya", "Mateo", "Ingrid", "Tariq")
LAST = ("Hart", "Okafor", "Lindgren", "Morrow", "Tanaka", "Silva", "Novak", "Bennett", "Rahman", "Fischer")
TOWNS = (
    *("Aldermoor", "Brinvale", "Castlewick", "Dunmere", "Eastholm", "Farrowby", "Glenhaven", "Hollowford"),
    *("Ivybridge", "Kestrel Bay", "Larkspur", "Mossgate", "Northwick", "Oakhurst", "Pinecrest", "Quarrydale"),
    *("Ravensport", "Silverton", "Thornbury", "Umberfield"),
)
FACTS = (
    ("The best thing to do in {} is to eat {}.", "What is the best thing to do in {}?"),
    ("The mayor of {} keeps {} in the town hall.", "What does the mayor of {} keep in the town hall?"),
    ("Every child in {} learns in school to draw {}.", "What do children in {} learn to draw?"),
    ("The museum of {} is famous for {}.", "What is the museum of {} famous for?"),
    ("On the first day of spring, people in {} paint {}.", "What do people in {} paint in spring?"),
)
THINGS = ("plum dumplings", "a copper kettle", "old maps", "wooden boats", "paper lanterns", "two grey owls")


@dataclass(frozen=True, kw_only=True)
class LongEmbed(Benchmark):
    """Measure how well vectors of long texts keep one hidden sentence."""

    model: Path
    """The original's folder, with position embeddings."""
    text: tuple[str, ...]
    """Text that hides the needles."""
    extended: tuple[Path, ...] = ()
    """Folders of `whereformer extend` from --model; their last names are the names of rows."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Tokens of a candidate."""
    tasks: tuple[str, ...] = ("passkey", "needle")
    """Kinds of hidden sentences."""
    queries: int = 50
    """Questions of a task and length."""
    candidates: int = 100
    """Candidates of a task and length; the questions ask for the first ones."""
    out: Path = Path("runs/longembed")

    def measure(self, console: Console) -> dict[str, Any]:
        """Make the missing parts, then print all."""
        if not 1 <= self.queries <= self.candidates <= len(FIRST) * len(LAST):
            raise InputError("queries", f"expected queries <= candidates <= 100, got {self.queries}, {self.candidates}")
        rows: dict[str, dict[str, Any]] = {}
        names = (*ROWS, *(folder.name for folder in self.extended))
        for length, task, name in product(self.lengths, self.tasks, names):
            file = self.out / f"{task}-{length}-{name.replace(' ', '-').replace(',', '')}.json"
            settings = {"queries": self.queries, "candidates": self.candidates}
            scores = keep(file, settings, partial(self._score, task, length, name))
            rows.setdefault(name, {})[f"{task} {length}"] = scores
            console.print(f"{name}, {task} {length}: {scores['ndcg@1']:.2f}", highlight=False)
        table = Table("candidates' vectors", *next(iter(rows.values())), "CPU, s")
        for name, row in rows.items():
            seconds = sum(scores["cpu_seconds"] for scores in row.values())
            table.add_row(name, *(f"{scores['ndcg@1']:.2f}" for scores in row.values()), f"{seconds:.0f}")
        console.print(table)
        return {"settings": self.settings("model", "text", "extended"), "rows": rows}

    def _score(self, task: str, length: int, name: str) -> dict[str, float]:
        """Return the share of questions whose candidate has the nearest vector, and the CPU time of the candidates."""
        texts, questions = self._task(task, length)
        began = time.process_time()
        vectors = self._vectors(name, texts, length)
        seconds = time.process_time() - began
        room = self._teacher.room
        rows = [torch.tensor([self._teacher.ids(question)[:room]]) for question in questions]
        question_vectors = torch.cat([_vectors(self._teacher, row) for row in rows])
        nearest = (question_vectors @ vectors.flatten(0, 1).T).argmax(1) // vectors.shape[1]
        right = (nearest == torch.arange(len(questions))).double().mean()
        return {"ndcg@1": float(right), "cpu_seconds": round(seconds, 1)}

    def _vectors(self, name: str, texts: Tensor, length: int) -> Tensor:
        """Return vectors of texts, (texts, vectors of each, hidden_size), in the way of a row."""
        teacher = self._teacher
        if name == CHUNKS:
            return torch.cat([chunk_means(teacher, few, teacher.room) for few in texts.split(2)])[:, None]
        if name == EACH:
            return torch.stack([_vectors(teacher, chunk) for chunk in texts.split(teacher.room, dim=1)], 1)
        encoders = {
            AS_IS: lambda: teacher,
            ALL_POSITIONS: lambda: replace(teacher, limit=teacher.model.config.max_position_embeddings),
            STRETCHED: lambda: stretch(teacher, length),
            EXTEND: lambda: lengthen(teacher, length) if length > teacher.limit else teacher,
        }
        folders = {folder.name: folder for folder in self.extended}
        encoder = encoders[name]() if name in encoders else load_encoder(str(folders[name] / "model"))
        return _vectors(encoder, texts[:, : encoder.room])[:, None]

    def _task(self, task: str, length: int) -> tuple[Tensor, list[str]]:
        """Return candidates of a task, (candidates, length - extra) token ids, and the questions for the first ones."""
        draw, room = random.Random(f"{task}/{length}"), length - self._teacher.extra
        rows, questions = [], []
        if task == "passkey":
            names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], self.candidates)
            filler = self._teacher.ids(GARBAGE) * length
        else:
            facts = draw.sample([(town, *fact) for town in TOWNS for fact in FACTS], self.candidates)
        for index in range(self.candidates):
            if task == "passkey":
                name, key = names[index], draw.randrange(10_000, 100_000)
                hidden = f"{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}."
                question = f"What is the pass key for {name}?"
            else:
                town, fact, ask = facts[index]
                hidden, question = fact.format(town, draw.choice(THINGS)), ask.format(town)
                filler = self._filler[index * length :]
            ids = self._teacher.ids(hidden)
            start = draw.randrange(room - len(ids) + 1)
            rows.append([*filler[:start], *ids, *filler[start : room - len(ids)]])
            questions.append(question)
        return torch.tensor(rows), questions[: self.queries]

    @cached_property
    def _teacher(self) -> SentenceEncoder:
        return load_encoder(str(self.model))

    @cached_property
    def _filler(self) -> list[int]:
        """Token ids of --text, enough for all candidates."""
        needed, ids = self.candidates * max(self.lengths), list[int]()
        for document in TextSource(self.text).documents():
            ids += self._teacher.ids("".join(document))
            if len(ids) >= needed:
                return ids
        raise InputError("text", f"expected {needed:,} tokens, got {len(ids):,}")


def stretch(encoder: SentenceEncoder, length: int) -> SentenceEncoder:
    """Return a copy with position embeddings for ``length`` tokens: the original's at positions 0, 1/2, 1, ..."""
    model, config = encoder.model, deepcopy(encoder.model.config)
    table = find_position_table(model)
    if table is None:
        raise InputError("model", f"expected one with position embeddings, got {config.position!r}")
    rows, last = table.weight.detach(), len(table.weight) - 1
    points = (torch.arange(length) * (len(rows) / length)).clamp(max=last)
    low = points.long()
    stretched = torch.lerp(rows[low], rows[(low + 1).clamp(max=last)], (points % 1)[:, None])
    config.max_position_embeddings = length
    longer = Encoder(config).eval()
    name = next(name for name, weight in model.named_parameters() if weight is table.weight)
    longer.load_state_dict({**model.state_dict(), name: stretched})
    return replace(encoder, model=longer, limit=length)


def _vectors(encoder: SentenceEncoder, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([encoder.vectors(batch) for batch in rows.split(2)])


if __name__ == "__main__":
    main(LongEmbed)
