"""Does TISA help if it is there from the start? Pretrain small encoders with each method, then fine-tune them on GLUE.

Run: .venv/bin/python benchmarks/tisa_from_start.py --data 'wikipedia/train-*.parquet' --glue glue [--workers 2]

Every run calls whereformer.pretrain and whereformer.finetune. All methods see the same text, and train
with short windows first, because position embeddings otherwise learn nothing in so few steps. A method's models with
seeds 0, 1, 2 are each fine-tuned with the same seed. Finished runs are not repeated, and an interrupted run continues.

Also measures how close the position embeddings are to Toeplitz at every checkpoint, as in Figures 2 and 5 of the TISA
paper. A vector's product with itself is large, so even random embeddings look Toeplitz on account of the diagonal. So
the same measure is also taken without it. Prints the medians and ranges.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmark import Among, Benchmark, main
from parts import in_processes, spread
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor

import whereformer
from whereformer.analysis import diagonals
from whereformer.analysis.position_scores import read_position_vectors
from whereformer.analysis.toeplitz import pairs
from whereformer.lab.loading import load
from whereformer.lab.recipe import Names
from whereformer.lab.run import read_records, threads

METHODS = ("none", "learned", "tisa", "learned+tisa", "rope")
METRICS = {"sst2": "accuracy", "cola": "matthews", "stsb": "pearson", "mrpc": "f1"}
"""The tasks, and the metric of each in the paper's Table 3."""
CHECKPOINTS = 10
MINE = ("data", "glue", "methods", "tasks", "seeds", "workers")
"""Options that a run's results do not depend on; the others, except the epochs, are options of a pretraining."""
PRETRAINING = {"learning_rate": 5e-3, "mask_rate": 0.3, "grow": True, "dtype": "bfloat16"}
FINETUNING = {"learning_rate": 5e-4, "train_rows": 4000, "dtype": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class FromStart(Benchmark):
    """Pretrain encoders with each position method, fine-tune them on GLUE, and follow their Toeplitzness."""

    data: str
    """Text to pretrain on, as `whereformer pretrain` takes it."""
    glue: Path
    """GLUE as Parquet, as `whereformer finetune` takes it."""
    methods: Annotated[Names, Among(METHODS)] = METHODS
    """Position methods."""
    tasks: Annotated[Names, Among(METRICS)] = tuple(METRICS)
    """Tasks of GLUE."""
    seeds: int = 3
    """Number of models of each method. All methods are trained with one seed before the next."""
    steps: int = 2000
    """Steps of pretraining."""
    length: int = 64
    """Tokens in a pretraining window at the end; windows grow. Later rows are cut to this length."""
    batch_size: int = 32
    """Windows of this length in a step of pretraining. A step has more windows if they are shorter."""
    hidden_size: int = 128
    """Width of the encoder, which has four layers."""
    vocab_size: int = 4096
    """Size of the vocabulary."""
    epochs: float = 3.0
    """How many times fine-tuning reads each row."""
    workers: int = 1
    """Number of runs at a time, each on one thread."""
    out: Path = Path("runs/tisa_from_start")

    def measure(self, console: Console) -> dict[str, Any]:
        """Make the missing runs, then print everything."""
        tasks, names = self.tasks, self.methods
        models = [(name, seed) for seed in range(self.seeds) for name in names]
        work = partial(self._scores, tasks=tasks)
        for (name, seed), (loss, scores) in in_processes(work, models, self.workers):
            shown = " ".join(f"{task} {100 * score:.1f}" for task, score in scores.items())
            console.print(f"{name} {seed}: held-out loss {loss:.3f}, {shown}", highlight=False)
        settings = self.settings(*MINE)
        settings |= {"pretraining": PRETRAINING, "finetuning": FINETUNING}
        results = {name: [self._facts(name, seed, tasks) for seed in range(self.seeds)] for name in names}
        self._print(console, results, tasks)
        return {"settings": settings, "tasks": tasks, "methods": results}

    def _scores(self, model: tuple[str, int], *, tasks: Sequence[str]) -> tuple[float, dict[str, float]]:
        """Return the held-out loss and the score in each task of one model, which is trained first if need be."""
        name, seed = model
        folder = self.out / name / str(seed)
        if not (folder / "model" / "config.json").exists():
            with threads(1):
                whereformer.pretrain(
                    data=self.data,
                    out=folder,
                    cache=self.out / "cache",
                    position=name,
                    seed=seed,
                    **self.settings(*MINE, "epochs"),
                    every=self.steps // CHECKPOINTS,
                    keep=CHECKPOINTS,
                    quiet=True,
                    **PRETRAINING,
                )
        with threads(1):
            whereformer.finetune(
                model=str(folder / "model"),
                out=folder / "glue",
                data=self.glue,
                task=tasks,
                position="own",
                seeds=1,
                seed=seed,
                epochs=self.epochs,
                max_length=self.length,
                quiet=True,
                **FINETUNING,
            )
        facts = self._facts(name, seed, tasks)
        return facts["held_out"][-1]["loss"], facts["glue"]

    def _facts(self, name: str, seed: int, tasks: Sequence[str]) -> dict[str, Any]:
        """Return the results of both commands for one model, and how close its embeddings were to Toeplitz."""
        folder = self.out / name / str(seed)
        first = json.loads((folder / "records.jsonl").read_text().partition("\n")[0])
        trained = read_records(folder / "records.jsonl")[1]['["train"]']["value"]
        scores = {}
        for call, record in read_records(folder / "glue" / "records.jsonl")[1].items():
            function, *key = json.loads(call)
            if function == "tune" and key[0] in tasks and key[2] == seed:
                scores[key[0]] = record["value"]["scores"][""][METRICS[key[0]]]
        return {
            "seed": seed,
            "commit": first["commit"],
            "positional_parameters": trained["about"]["positional_parameters"],
            "held_out": [{"step": step, **score} for step, score in trained["scores"]],
            "toeplitzness": self._toeplitzness(folder) if "learned" in name.split("+") else [],
            "glue": scores,
        }

    def _toeplitzness(self, folder: Path) -> list[dict[str, float]]:
        """Return the R² of the Toeplitz part of the embeddings' products at each checkpoint (Figure 5).

        Both of all products, and of the products of different embeddings only.
        """
        points = []
        saved = {int(path.name.rpartition("-")[2]): path for path in (folder / "checkpoints").glob("checkpoint-*")}
        for step, path in sorted({**saved, self.steps: folder / "model"}.items()):
            vectors = read_position_vectors(load(str(path)), self.length)
            assert vectors is not None
            products = vectors.double() @ vectors.double().mT
            everything = float(diagonals(products).explained)
            points.append({"step": step, "all": everything, "others": _without_diagonal(products)})
        return points

    def _print(self, console: Console, results: dict[str, list[dict[str, Any]]], tasks: Sequence[str]) -> None:
        table = Table("", "loss", *(f"{task}, {METRICS[task]}" for task in tasks), "mean")
        for name, models in results.items():
            columns = [[100 * model["glue"][task] for model in models] for task in tasks]
            means = [statistics.fmean(scores) for scores in zip(*columns, strict=True)]
            losses = [model["held_out"][-1]["loss"] for model in models]
            cells = [spread(losses, 2), *(spread(column, 1) for column in (*columns, means))]
            table.add_row(name, *cells)
        console.print(table)
        for name, models in results.items():
            for model in models:
                if path := model["toeplitzness"]:
                    by_step = {score["step"]: score["loss"] for score in model["held_out"]}
                    quality = [-by_step[point["step"]] for point in path]
                    for which in ("all", "others"):
                        values = [point[which] for point in path]
                        console.print(
                            f"{name} {model['seed']}: Toeplitzness of {which} {values[0]:.3f} to {values[-1]:.3f}, "
                            f"rank correlation with quality over training {spearmanr(values, quality).statistic:.2f}",
                            highlight=False,
                        )


def _without_diagonal(matrix: Tensor) -> float:
    """Return the Toeplitzness of the entries (n, n) that are not on the main diagonal."""
    toeplitz, count = diagonals(matrix), pairs(len(matrix))
    count[len(matrix) - 1] = 0
    mean = (count * toeplitz.mean).sum() / count.sum()
    between, within = (count * (toeplitz.mean - mean) ** 2).sum(), (count * toeplitz.spread**2).sum()
    return float(between / (between + within))


if __name__ == "__main__":
    main(FromStart)
