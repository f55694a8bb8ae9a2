"""Judge what each method can do on each task, and claim nothing that chance could explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...lab.report.page import listed
from ...lab.score import Cannot
from ...lab.seeds import Spread
from .results import Failed, ProbeResults, Run

SOLVED = 0.95
"""The accuracy from which a task counts as solved."""
ERRORS = 4
"""How many standard errors a method has to be ahead of guessing. Chance does that once in 30,000 cells, and a table has
a hundred."""


class Level(StrEnum):
    """What a method can do on a task at one length."""

    SOLVED = "solved"
    """With every seed, at least SOLVED of the answers are right."""
    BETTER = "better"
    """With every seed, it is clearly better than guessing without positions."""
    GUESSING = "guessing"
    """With no seed, it is clearly better than guessing without positions."""
    MIXED = "mixed"
    """With some seeds it is clearly better than guessing, and with others it is not."""
    CANNOT = "cannot"
    """It has no positions at this length."""
    FAILED = "failed"
    """With some seed, training ended without a model."""
    MISSING = "not tried"
    """It was not tried."""


@dataclass(frozen=True)
class Judged:
    """A method on a task at one length: what it can do, and its accuracy over seeds, or why there is none.

    ``may_solve`` says whether chance in the rows may be all that keeps it from SOLVED.
    """

    level: Level
    accuracy: Spread
    may_solve: bool = False


@dataclass(frozen=True)
class Table:
    """All methods on all tasks at one length, in symbols.

    ``guesses`` has the accuracy of the best guess without positions, by task. ``rows`` has what a method can do, by
    method and task.
    """

    length: int
    guesses: Mapping[str, float]
    rows: Mapping[str, Mapping[str, Judged]]

    def solved(self, position: str) -> list[str]:
        """Return the tasks that a method solves."""
        return [task for task, judged in self.rows[position].items() if judged.level is Level.SOLVED]


def tables(results: ProbeResults) -> list[Table]:
    """Return a table for each length, that of training first. Rows and columns are in the order of the runs."""
    positions = list(dict.fromkeys(position for (_, position, _), _ in results.each()))
    lengths = sorted({length for task in results.runs for length in results.guesses[task]})
    return [
        Table(
            length,
            {task: results.guesses[task][length] for task in results.runs},
            {
                name: {task: judge(methods.get(name, {}), length) for task, methods in results.runs.items()}
                for name in positions
            },
        )
        for length in lengths
    ]


def judge(by_seed: Mapping[int, Run | Failed], length: int) -> Judged:
    """Judge the runs of a method on a task at one length."""
    if not by_seed:
        return Judged(Level.MISSING, Spread(None, why_not="this was not tried with this method"))
    scores = []
    for seed, run in by_seed.items():
        if isinstance(run, Failed):
            return Judged(Level.FAILED, Spread(None, why_not=f"with seed {seed}, {run.failed}"))
        score = run.scores[length]
        if isinstance(score, Cannot):
            return Judged(Level.CANNOT, Spread(None, why_not=score.cannot))
        scores.append(score)
    clear = [score.ahead > ERRORS * score.error for score in scores]
    level = Level.BETTER if all(clear) else Level.MIXED if any(clear) else Level.GUESSING
    if all(score.accuracy >= SOLVED for score in scores):
        level = Level.SOLVED
    may_solve = all(score.accuracy + ERRORS * score.error >= SOLVED for score in scores)
    return Judged(level, Spread.of([score.accuracy for score in scores]), may_solve)


def verdict(found: Sequence[Table]) -> list[str]:
    """Return the result in a few sentences, from the tables, that of the trained length first."""
    if not found or not found[0].rows:
        return ["Nothing was tried."]
    return [_most(found[0], "; train longer"), *(_most(table, "") for table in found[1:][-1:])]


def _most(table: Table, advice: str) -> str:
    """Return which methods solve the most tasks at a length."""
    counts = {position: len(table.solved(position)) for position in table.rows}
    best, total, at = max(counts.values()), len(table.guesses), f"at {table.length} symbols"
    if not best:
        return f"No method solves a task {at}{advice}."
    leaders = [position for position, count in counts.items() if count == best]
    may_solve = {position: sum(judged.may_solve for judged in row.values()) for position, row in table.rows.items()}
    rivals = [position for position, count in counts.items() if count < best <= may_solve[position]]
    verb = "solves" if len(leaders) == 1 else "solve"
    if best == total:
        what = {1: "the task", 2: "both tasks"}.get(total, f"all {total} tasks")
        sentence = f"{listed(leaders)} {verb} {what} {at}"
    elif len(leaders) == len(counts):
        sentence = f"{listed(leaders)} {verb} {best} of {total} tasks {at}"
    else:
        sentence = f"{listed(leaders)} {verb} the most tasks {at}, {best} of {total}"
    return f"{sentence}; {listed(rivals)} may solve as many." if rivals else f"{sentence}."


def about_seeds(results: ProbeResults) -> str:
    """Return what the number of seeds allows to say, in a sentence."""
    seeds = {seed for (_, _, seed), _ in results.each()}
    if len(seeds) == 1:
        return (
            "This is one seed. With another seed or more steps, a method may learn a task that it has not learned "
            "here; several seeds show how often."
        )
    solved = f"Solved means solved with each of {len(seeds)} seeds"
    if any(len(by_seed) < len(seeds) for methods in results.runs.values() for by_seed in methods.values()):
        solved = f"Solved means solved with each seed that was tried, up to {len(seeds)}"
    return f"{solved}. More steps may change what was not learned."
