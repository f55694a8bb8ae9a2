"""Do the verdicts of ``whereformer compare`` hold? Compare with few steps, then with four times the steps, and count.

Run: .venv/bin/python benchmarks/compare_check.py --data text.txt [--steps 600] [--positions none,learned,rope,t5,tisa]

Choose a text that nothing was tuned on, and choose it last. Each comparison is evaluated on that text's held-out pages.
The first one names the pairs of methods whose order is not settled. The table shows each method's loss, first and with
more steps. A pair that is clearly ordered in the first comparison is still clearly ordered in the second, or too close
to rank, or reversed.

Writes results.json next to both comparisons. After an interruption, the same command does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from benchmark import Benchmark, main
from rich import box
from rich.console import Console
from rich.table import Table

import whereformer
from whereformer.analysis.ranking import STEP_FACTOR, Models, clearly_better, rank
from whereformer.recipes.compare import load

CLEAR, CLOSE, REVERSED = "still clear", "too close to tell", "reversed"
"""Outcomes, in the second comparison, of a pair that is clearly ordered in the first."""


@dataclass(frozen=True, kw_only=True)
class CompareCheck(Benchmark):
    """Check the ranks of a comparison with one of four times the steps."""

    data: str
    """Text that nothing was tuned on."""
    steps: int = 600
    """Steps of the first comparison."""
    positions: str = "none,sinusoidal,learned,rope,t5,shaw,tisa,learned+tisa"
    """The methods."""
    seeds: int = 1
    """Number of seeds."""
    options: str = "{}"
    """More options of whereformer.compare for both, as JSON, such as '{"length": 32, "hidden_size": 32}'."""
    out: Path = Path("runs/compare_check")

    def measure(self, console: Console) -> dict[str, Any]:
        """Run both comparisons and print the table."""
        short, long = (self._compare(steps) for steps in (self.steps, STEP_FACTOR * self.steps))
        methods, pairs = check(short, long, self.steps)
        print_check(console, methods, pairs)
        return {"steps": self.steps, "methods": methods, "pairs": pairs}

    def _compare(self, steps: int) -> dict[str, Models]:
        """Compare with a number of steps. Return the models of each method."""
        options = self.settings("options") | {"steps": steps} | json.loads(self.options)
        whereformer.compare(**options, out=self.out / str(steps))
        return {**load(self.out / str(steps))[1]}


def check(
    short: Mapping[str, Models], long: Mapping[str, Models], steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return both losses of each method, and the outcome of each pair that is clearly ordered."""
    ranking = rank(short, "none", steps)
    later = {row.position: row for row in rank(long, "none", STEP_FACTOR * steps).rows}
    methods = [
        {"position": row.position, "rank": row.rank, "later_rank": later[row.position].rank}
        | {"loss": row.loss, "later_loss": later[row.position].loss}
        for row in ranking.rows
    ]
    pairs = [
        {
            "better": better.position,
            "worse": worse.position,
            "settled": worse.rank is not None and (better.position, worse.position) not in ranking.unsettled,
            "became": _outcome(long[better.position], long[worse.position]),
        }
        for better, worse in permutations(ranking.rows, 2)
        if clearly_better(short[better.position], short[worse.position])
    ]
    return methods, pairs


def _outcome(better: Models, worse: Models) -> str:
    """Return a pair's outcome, from the runs of its better and its worse method in the second comparison."""
    if clearly_better(better, worse):
        return CLEAR
    return REVERSED if clearly_better(worse, better) else CLOSE


def print_check(console: Console, methods: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    """Print a row per method, and the outcomes of the pairs."""
    table = Table(box=box.SIMPLE_HEAD, title=f"Held-out loss, and at {STEP_FACTOR} times the steps")
    for title in ("#", "position", "loss", "became", "# later"):
        table.add_column(title, justify="left" if title == "position" else "right", no_wrap=True)
    for row in methods:
        table.add_row(
            *(str(row["rank"]), row["position"], f"{row['loss']:.3f}"),
            *(f"{row['later_loss']:.3f}", str(row["later_rank"])),
        )
    console.print(table)
    for settled, name in ((True, "settled"), (False, "not settled")):
        outcomes = [pair["became"] for pair in pairs if pair["settled"] is settled]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in (CLEAR, CLOSE, REVERSED))
        console.print(f"{name} ({len(outcomes)} pairs): {counts}", highlight=False)


if __name__ == "__main__":
    main(CompareCheck)
