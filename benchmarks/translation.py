"""Compare how well position methods translate: train every method, language and seed with the same budget.

Run: .venv/bin/python benchmarks/translation.py --data multi30k [--languages de,fr] [--seeds 3] [--workers 2]

The folder has train.parquet, validation.parquet and test.parquet (here test_2016_flickr) with a column for each
language. Every run calls whereformer.translate, and its test set is translated and scored. Finished runs
are not repeated, and an interrupted run continues. The results have for each method the scores of every seed, and of
sentences by length. Prints the means.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmark import Among, Benchmark, main
from parts import in_processes
from rich.console import Console
from rich.table import Table
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

import whereformer
from whereformer.data.parallel import Pairs
from whereformer.errors import InputError
from whereformer.files import write_atomically
from whereformer.lab.options import find_device
from whereformer.lab.recipe import Names
from whereformer.lab.run import read_records, threads
from whereformer.lab.translation import load, translate_lines

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shaw": ("shaw", {"clip": 16}),
    "shaw-keys": ("shaw", {"clip": 16, "values": False}),
    "shaw-clip-4": ("shaw", {"clip": 4}),
    "shaw-clip-2": ("shaw", {"clip": 2}),
}
"""Names that stand for a method with options."""

MINE = ("data", "methods", "languages", "seeds", "workers")
"""Options that a run's results do not depend on; the others, except the test file, are options of a training."""

METHODS = ("sinusoidal", "learned", "rope", "t5", "tisa", "shaw", "shaw-keys", "shaw-clip-4", "shaw-clip-2")


@dataclass(frozen=True, kw_only=True)
class Translation(Benchmark):
    """Measure the BLEU of small translation models with each position method, all trained the same way."""

    data: Path
    """Folder with train.parquet, validation.parquet and the test file."""
    test: str = "test.parquet"
    """The test file in that folder."""
    languages: Names = ("de", "fr")
    """Columns to translate into, from English."""
    methods: Annotated[Names, Among([*METHODS, "none"])] = METHODS
    """Position methods."""
    seeds: int = 3
    """Number of runs of each method, with seeds 0, 1, 2 and so on. All methods run with one seed before the next."""
    hidden_size: int = 128
    """Width of the model, which has three encoder layers, three decoder layers and four heads."""
    intermediate_size: int = 512
    """Width within the feed-forward layers."""
    dropout: float = 0.0
    """Dropout on embeddings and on the output of sublayers. Training is too short to memorize the text."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision; bfloat16 is mixed precision."""
    steps: int = 1000
    """Training steps of each run."""
    batch_tokens: int = 2048
    """Tokens in each step, on either side."""
    learning_rate: float = 5e-3
    """Peak of the learning rate."""
    warmup: int = 400
    """Number of steps while the learning rate rises."""
    workers: int = 1
    """Number of runs at a time, each on one thread."""
    out: Path = Path("runs/translation")

    def measure(self, console: Console) -> dict[str, Any]:
        for file in ("train.parquet", "validation.parquet", self.test):
            if not (self.data / file).is_file():
                raise InputError("data", f"expected {file} in {self.data}")
        runs = [
            (name, language, seed) for seed in range(self.seeds) for language in self.languages for name in self.methods
        ]
        facts = {}
        for run, facts[run] in in_processes(self._facts, runs, self.workers):
            console.print(f"{' '.join(map(str, run))}: BLEU {facts[run]['seed']['bleu']}", highlight=False)
        settings = self.settings(*MINE)
        results: dict[str, Any] = {"settings": settings, "languages": {}}
        for name, language, seed in runs:
            run_facts = facts[name, language, seed]
            about = run_facts["about"]
            results |= {**run_facts["origin"], "epochs": about["epochs"], "signature": run_facts["signature"]}
            method = results["languages"].setdefault(language, {}).setdefault(name, {"seeds": {}})
            method |= {key: about[key] for key in ("parameters", "positional_parameters")}
            method["seeds"][seed] = run_facts["seed"]
        for language, methods in results["languages"].items():
            self._print(console, language, methods)
        return results

    def _facts(self, run: tuple[str, str, int]) -> dict[str, Any]:
        """Return the scores of a run and the facts of its training; it is made first if it is missing."""
        name, language, seed = run
        folder = self.out / language / name / str(seed)
        file = folder / "scores.json"
        if not file.exists():
            position, options = VARIANTS.get(name, (name, {}))
            columns = f"en,{language}"
            with threads(1):
                whereformer.translate(
                    data=self.data / "train.parquet",
                    columns=columns,
                    validation=self.data / "validation.parquet",
                    preset="small",
                    out=folder,
                    seed=seed,
                    position=position,
                    position_options=json.dumps(options),
                    every=max(1, self.steps // 20),
                    average=5,
                    quiet=True,
                    **self.settings(*MINE, "test"),
                )
            test = Pairs("data", (self.data / self.test,), columns)
            sources, targets = zip(*test, strict=True)
            with threads(1):
                written = translate_lines(*load(str(folder / "model"), find_device("auto")), sources)
            write_atomically(file, json.dumps(score(written, targets, sources)) + "\n")
        scores = json.loads(file.read_text())
        first = json.loads((folder / "records.jsonl").read_text().partition("\n")[0])
        training = read_records(folder / "records.jsonl")[1]['["train"]']["value"]
        return {
            "origin": {fact: first[fact] for fact in ("date", "commit", "machine", "versions")},
            "about": training["about"],
            "signature": scores["bleu_signature"],
            "seed": {
                "bleu": scores["bleu"],
                "chrf": scores["chrf"],
                "held_out_loss": training["saved"]["loss"],
                "held_out_losses": [(step, score["loss"]) for step, score in training["scores"]],
                "bleu_by_words": scores["bleu_by_words"],
            },
        }

    def _print(self, console: Console, language: str, methods: dict[str, Any]) -> None:
        first = next(iter(next(iter(methods.values()))["seeds"].values()))["bleu_by_words"]
        parts = [f"{part['from']}-{part['to'] or ''}" for part in first]
        table = Table("", "BLEU", "seeds", "chrF", "loss", *parts, title=f"en-{language}; BLEU by words")
        for name, method in methods.items():
            seeds = list(method["seeds"].values())
            bleu = [seed["bleu"] for seed in seeds]
            by_words = [
                statistics.fmean(seed["bleu_by_words"][part]["bleu"] for seed in seeds) for part in range(len(parts))
            ]
            table.add_row(
                name,
                f"{statistics.fmean(bleu):.1f}",
                f"{min(bleu):.1f}-{max(bleu):.1f}",
                f"{statistics.fmean(seed['chrf'] for seed in seeds):.1f}",
                f"{statistics.fmean(seed['held_out_loss'] for seed in seeds):.3f}",
                *(f"{value:.1f}" for value in by_words),
            )
        console.print(table)


def score(hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    """Return BLEU and chrF by sacrebleu, and BLEU of the lines whose sources have up to 8, 12, 16 and 24 words."""
    bleu, chrf = BLEU(), CHRF()
    words = [len(line.split()) for line in sources]
    parts = []
    for low, high in itertools.pairwise((0, 8, 12, 16, 24, None)):
        rows = [row for row, count in enumerate(words) if (low or 0) < count + (low == 0) and count <= (high or count)]
        if rows:
            part = BLEU().corpus_score([hypotheses[row] for row in rows], [[references[row] for row in rows]])
            parts.append({"from": low + 1 if low else 0, "to": high, "lines": len(rows), "bleu": round(part.score, 2)})
    return {
        "lines": len(references),
        "bleu": round(bleu.corpus_score(hypotheses, [references]).score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": round(chrf.corpus_score(hypotheses, [references]).score, 2),
        "bleu_by_words": parts,
    }


if __name__ == "__main__":
    main(Translation)
