"""Put the results of all experiments into one table: a row for each position method, a column for each question.

Run: .venv/bin/python benchmarks/which_position.py

Reads the results that other commands wrote into benchmarks/results, writes docs/images/which-position-*.svg and prints
the table of docs/results/which-position.md. A cell is dark if the experiment cannot separate the method from the best
one: their gap is at most the column's noise. It is pale if the gap is more than three times the noise.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark import main
from pictures import box, save, text
from rich.console import Console

from whereformer.analysis.ranking import SEED_NOISE
from whereformer.lab.recipe import WithPlugin

METHODS = (
    "none",
    "sinusoidal",
    "learned",
    "rope",
    "rope+logn",
    "rope/rope/rope/none",
    "alibi",
    "t5",
    "shaw",
    "tisa",
    "learned+tisa",
    "inkling",
    "fox",
    "deberta",
)
MACHINE = "amd-epyc-2-cores-avx512"
BEST, BEHIND, FAR, UNKNOWN = "good", "near", "far", "unknown"
NAMES, CELL, ROW = 136, 57, 22
WIDTH = NAMES + 4 * CELL
"""Pixels of the methods' names, of a cell, and of a picture of four columns."""
SOLVED = 0.95


@dataclass(frozen=True)
class Column:
    """A question, and each method's answer to it.

    Args:
        title: the question, in two short lines.
        values: the answers of the methods that were tried; None means that a method cannot do it.
        noise: how far two answers have to differ before it means anything.
        digits: digits after the point.
        less_is_better: whether small answers are good.
    """

    title: str
    values: Mapping[str, float | None]
    noise: float
    digits: int
    less_is_better: bool = False

    def cell(self, method: str) -> tuple[str, str]:
        """Return the cell's text, and how good it is."""
        if method not in self.values:
            return "?", UNKNOWN
        value = self.values[method]
        if value is None:
            return "cannot", FAR
        known = [number for number in self.values.values() if number is not None]
        gap = value - min(known) if self.less_is_better else max(known) - value
        kind = BEST if gap <= self.noise else BEHIND if gap <= 3 * self.noise else FAR
        return f"{value:.{self.digits}f}", kind


@dataclass(frozen=True)
class Comparison:
    """A comparison's training length, its models by method and seed, and speeds relative to none."""

    length: int
    runs: dict[str, dict[str, Any]]
    speed: dict[str, float]

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """Read a comparison that is kept in benchmarks/results."""
        results = json.loads(path.read_text())
        speed = {name: measured["relative_speed"] for name, measured in results["speed"].items()}
        return cls(results["settings"]["length"], results["runs"], speed)


@dataclass(frozen=True, kw_only=True)
class WhichPosition(WithPlugin):
    """Draw and print the results of all experiments about each position method."""

    results: Path = Path("benchmarks/results")
    """Folder with a folder of results for each machine."""
    out: Path = Path("docs/images")
    """Folder for the pictures."""

    def run(self, console: Console) -> None:
        """Draw the pictures and print its tables in Markdown."""
        parts = [self._losses(), [*self._speeds(), self._glue(), *self._translation(), *self._probes()]]
        for columns in parts:
            titles = [column.title.replace("\n", " ") for column in columns]
            lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(columns) + 1) + "|"]
            lines += [
                f"| `{method}` | " + " | ".join(self._marked(column, method) for column in columns) + " |"
                for method in METHODS
            ]
            lines += ["| *noise* | " + " | ".join(f"{column.noise:.{column.digits}f}" for column in columns) + " |", ""]
            console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
        losses, scores = parts
        longer = "4 times\nas long", "8 times\nas long"
        for name, title, columns, heads in (
            ("masked", "Loss of masked words, 64 tokens", losses[:4], ("\nloss", "equal\ntime", *longer)),
            ("next", "Loss of the next word, 64 tokens", losses[6:9], ("\nloss", "equal\ntime", longer[1])),
            (
                "256",
                "Loss, 256 tokens",
                losses[4:6] + losses[9:],
                ("masked\nwords", longer[1], "next\nword", longer[1]),
            ),
            ("speed", "Speed, and GLUE", scores[:3], ("masked\nwords", "next\nword", "GLUE,\n4 tasks")),
            ("translation", "Translation, BLEU", scores[3:6], ("\nGerman", "4 times\nthe steps", "\nFrench")),
            ("probes", "Probes, tasks solved", scores[6:], ("\nof 7", "at twice\nthe length")),
        ):
            self._draw(name, title, columns, heads)

    def _marked(self, column: Column, method: str) -> str:
        text, kind = column.cell(method)
        return f"**{text}**" if kind == BEST else text

    def _read(self, name: str) -> Any:
        return json.loads((self.results / "amd-epyc-2-cores" / name).read_text())

    def _losses(self) -> list[Column]:
        """Return losses at the trained length and beyond it, with masked words and with the next one."""
        masked, absolute = self._masked()
        causal = self._runs("comparison_causal.json")
        wide, wide_causal = self._runs("comparison_masked_256.json"), self._runs("comparison_causal_256.json")
        return [
            _loss((absolute, masked), 1, "loss,\nmasked words"),
            _loss(self._equal_time("masked", absolute, masked), 1, "masked words,\nequal time"),
            _loss((absolute, masked), 4, "masked words,\n4 times as long"),
            _loss((absolute, masked), 8, "masked words,\n8 times as long"),
            _loss((wide,), 1, "masked words,\n256 tokens"),
            _loss((wide,), 8, "masked, 256,\n8 times as long"),
            _loss((causal,), 1, "loss,\nnext word"),
            _loss(self._equal_time("causal", causal), 1, "next word,\nequal time"),
            _loss((causal,), 8, "next word,\n8 times as long"),
            _loss((wide_causal,), 1, "next word,\n256 tokens"),
            _loss((wide_causal,), 8, "next, 256,\n8 times as long"),
        ]

    def _speeds(self) -> list[Column]:
        masked, absolute = self._masked()
        # The later of two comparisons counts where both have a method.
        speeds = {
            "masked words": absolute.speed | masked.speed,
            "next word": self._runs("comparison_causal.json").speed,
        }
        return [Column(f"speed,\n{task}", speed, 0.05, 2) for task, speed in speeds.items()]

    def _masked(self) -> tuple[Comparison, Comparison]:
        """Return two comparisons with the same text, settings and seeds: of most methods, and of absolute ones."""
        return self._runs("comparison_masked.json"), self._runs("comparison_absolute.json")

    def _equal_time(self, task: str, *equal_steps: Comparison) -> tuple[Comparison, ...]:
        """Return comparisons of a method each, with the steps that it takes in the time of all steps of ``none``.

        Methods that are as fast as ``none`` within 1% have the steps of all.
        """
        same = []
        for results in equal_steps:
            fast = {name for name, speed in results.speed.items() if abs(speed - 1) < 0.01}
            same.append(replace(results, runs={name: runs for name, runs in results.runs.items() if name in fast}))
        folder = self.results / MACHINE / "equal_time" / task
        return *same, *(Comparison.load(file) for file in sorted(folder.glob("*.json")))

    def _runs(self, name: str) -> Comparison:
        return Comparison.load(self.results / MACHINE / name)

    def _glue(self) -> Column:
        """Return the mean score over the tasks of GLUE, after pretraining from scratch."""
        methods = self._read("tisa_from_start.json")["methods"]
        means = {
            name: [100 * statistics.fmean(model["glue"].values()) for model in models]
            for name, models in methods.items()
        }
        return Column(
            "4 GLUE\ntasks", {name: statistics.median(seeds) for name, seeds in means.items()}, _noise(means), 1
        )

    def _translation(self) -> list[Column]:
        columns = []
        for file, language, title in (
            ("translation.json", "de", "BLEU,\nGerman"),
            ("translation_long.json", "de", "German,\n{} steps"),
            ("translation.json", "fr", "BLEU,\nFrench"),
        ):
            results = self._read(file)
            methods = results["languages"][language]
            scores = {name: [seed["bleu"] for seed in method["seeds"].values()] for name, method in methods.items()}
            means = {name: statistics.fmean(seeds) for name, seeds in scores.items()}
            columns.append(Column(title.format(f"{results['settings']['steps']:,}"), means, _noise(scores), 1))
        # One seed says nothing about noise, so the noise of three seeds stands in.
        noise = max(column.noise for column in columns)
        return [Column(column.title, column.values, column.noise or noise, 1) for column in columns]

    def _probes(self) -> list[Column]:
        """Return how many tasks each method solves at the trained length and at twice it.

        One task more or less may be chance, where there is one seed.
        """
        results = self._read("probes.json")
        length, columns = results["settings"]["length"], []
        for factor, title in ((1, "tasks solved\nout of {}"), (2, "at twice\nthe length")):
            solved: dict[str, float | None] = {}
            for methods in results["runs"].values():
                for name, runs in methods.items():
                    accuracies = [run["scores"][str(factor * length)].get("accuracy", 0.0) for run in runs.values()]
                    solved[name] = (solved.get(name) or 0) + (statistics.median(accuracies) >= SOLVED)
            columns.append(Column(title.format(len(results["runs"])), solved, 1.0, 0))
        return columns

    def _draw(self, name: str, title: str, columns: list[Column], heads: tuple[str, ...]) -> None:
        """Draw a table whose cells are colored, as wide as a phone."""
        height = 46 + ROW * len(METHODS)
        parts = [text(0, 13, title)]
        for x, column, head in zip(range(NAMES, NAMES + CELL * len(heads), CELL), columns, heads, strict=True):
            for y, line in zip((29, 42), head.split("\n"), strict=True):
                parts.append(text(x + CELL / 2, y, line, "muted middle"))
            for y, method in zip(range(46, height, ROW), METHODS, strict=True):
                words, kind = column.cell(method)
                parts.append(box(x + 1, y + 1, CELL - 2, ROW - 2, kind))
                parts.append(text(x + CELL / 2, y + 15, words, f"middle on-{kind}"))
        for y, method in zip(range(46, height, ROW), METHODS, strict=True):
            parts.append(text(NAMES - 6, y + 15, method, "end"))
        save(self.out / f"which-position-{name}.svg", WIDTH, height, f"{title}, by position method", parts)


def _loss(sources: tuple[Comparison, ...], factor: int, title: str) -> Column:
    """Return the held-out loss of texts that are ``factor`` times as long as in training.

    Where several sources have a method, the last one counts.
    """
    noise = SEED_NOISE / min(len(runs) for results in sources for runs in results.runs.values()) ** 0.5
    losses = {
        name: _median([run["scores"][str(factor * results.length)] for run in runs.values()])
        for results in sources
        for name, runs in results.runs.items()
    }
    return Column(title, losses, noise, 2, less_is_better=True)


def _median(scores: list[dict[str, Any]]) -> float | None:
    """Return the median loss over seeds; None if the method cannot read the length."""
    return None if any("cannot" in score for score in scores) else statistics.median(score["loss"] for score in scores)


def _noise(scores: Mapping[str, list[float]]) -> float:
    """Return the largest range over the seeds of one method."""
    return max(max(seeds) - min(seeds) for seeds in scores.values())


if __name__ == "__main__":
    main(WhichPosition)
