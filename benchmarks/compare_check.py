"""Do the verdicts of ``whereformer compare`` hold? Compare with few steps, then with four times as many, and count.

Run: .venv/bin/python benchmarks/compare_check.py --data text.txt [--steps 600] [--positions none,learned,rope,t5,tisa]

Choose a text that nothing was tuned on, and choose it last. Each comparison is judged on held-out pages of that text.
The first one names the pairs of methods whose order is not settled. The table shows each method's loss, and what it
became. A pair that is clearly ordered in the first comparison is, in the second, still clearly ordered, or too close to
tell, or the other way round.

Writes check.json beside both comparisons. After an interruption, the same command does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import whereformer
from whereformer.analysis.ranking import STEP_FACTOR, Models, clearly_better, rank
from whereformer.cli.main import execute
from whereformer.provenance import write_results
from whereformer.recipes.compare import load

KEPT, CLOSE, REVERSED = "still clear", "too close to tell", "reversed"
"""What a pair that is clearly ordered in the first comparison can be in the second."""


@dataclass(frozen=True)
class CompareCheck:
    """Check the ranks of a comparison with one of four times the steps."""

    data: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """Text that nothing was tuned on."""
    steps: int = 600
    """Steps of the first comparison."""
    positions: Annotated[str, tyro.conf.arg(metavar="A,B")] = "none,sinusoidal,learned,rope,t5,shaw,tisa,learned+tisa"
    """The methods."""
    seeds: int = 1
    """Number of seeds."""
    options: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """More options of whereformer.compare for both, such as '{"length": 32, "hidden_size": 32}'."""
    out: Path = Path("runs/compare_check")
    """Folder for the results."""

    def run(self, console: Console) -> None:
        """Run both comparisons, print the table and write check.json."""
        short, long = (self._compare(steps) for steps in (self.steps, STEP_FACTOR * self.steps))
        methods, pairs = check(short, long, self.steps)
        print_check(console, methods, pairs)
        write_results(self.out / "check.json", {"steps": self.steps, "methods": methods, "pairs": pairs})

    def _compare(self, steps: int) -> dict[str, Models]:
        """Compare with a number of steps. Return the models of each method."""
        given = {"data": self.data, "positions": self.positions, "steps": steps, "seeds": self.seeds}
        whereformer.compare(**given, **json.loads(self.options), out=self.out / str(steps))
        return {**load(self.out / str(steps))[1]}


def check(
    short: Mapping[str, Models], long: Mapping[str, Models], steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the losses and what became of them, for each method, and for each pair that is clearly ordered."""
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
    """Return what became of a pair, given the runs of its better and its worse method in the second comparison."""
    if clearly_better(better, worse):
        return KEPT
    return REVERSED if clearly_better(worse, better) else CLOSE


def print_check(console: Console, methods: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    """Print a row per method, and what became of the pairs."""
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
        found = [pair["became"] for pair in pairs if pair["settled"] is settled]
        counts = ", ".join(f"{found.count(outcome)} {outcome}" for outcome in (KEPT, CLOSE, REVERSED))
        console.print(f"{name} ({len(found)} pairs): {counts}", highlight=False)


if __name__ == "__main__":
    execute(tyro.cli(CompareCheck))
