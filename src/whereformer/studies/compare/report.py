"""The HTML report of ``whereformer compare``: which method suits the text, and what its heads learned."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from markupsafe import Markup

from ...files import write_atomically
from ...lab.report import figures, heads, losses, page
from ...lab.report.page import Cell, Column
from ...lab.seeds import Spread
from ...positions import describe, method_names
from .outlook import AHEAD, SHARES
from .ranking import RankedMethod, Ranking, noise_of
from .results import BASELINE, CompareResults, CompareTask, Run

TEMPLATE = Path(__file__).with_suffix(".html.j2")
TIMES = "\N{MULTIPLICATION SIGN}"


def write_report(results: CompareResults, ranking: Ranking, path: Path) -> None:
    """Write the report to ``path``. An old page stays until the new one is complete."""
    write_atomically(path, build_report(results, ranking))


def build_report(results: CompareResults, ranking: Ranking) -> str:
    """Build the page. Equal results give identical pages."""
    settings, text, rows = results.settings, results.text, ranking.rows
    runs = {row.position: results.runs[row.position] for row in rows}
    # Looks follow the order in which the methods were given, so a method looks the same whatever its rank.
    order = [name for name in results.runs if name in runs]
    all_looks = figures.series(len(order), order.index(BASELINE) if BASELINE in order else None)
    looks = {row.position: all_looks[order.index(row.position)] for row in rows}
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    first_run = next(iter(runs[rows[0].position].values()))
    sizes = sorted({run.parameters for by_seed in runs.values() for run in by_seed.values()})
    notes = cannot_notes(rows)
    return page.render(
        TEMPLATE,
        title="Which position method suits this text?",
        verdict=ranking.verdict,
        settings=asdict(settings),
        text=asdict(text),
        machine=results.machine,
        predicted_tokens=results.predicted_tokens,
        seeds=seeds,
        layers=len(first_run.attention),
        sizes=list(dict.fromkeys((sizes[0], sizes[-1]))),
        seed_noise=noise_of(results) / len(seeds) ** 0.5,
        task=results.task,
        columns=columns(sorted(rows[0].loss), results.task),
        rows=[(row, [*table_cells(row, notes)]) for row in rows],
        notes=notes,
        unsettled=[f"{better} before {worse}" for better, worse in ranking.unsettled],
        ahead=AHEAD,
        predicted=any(row.outlook for row in rows),
        failed=list(results.failed),
        trials={name: tried for name, tried in results.trials.items() if name in runs},
        factors=[f"{factor:g}" for factor in settings.rate_factors],
        looks=looks,
        loss_over_steps=losses.over_steps(
            {name: mean_curve(by_seed) for name, by_seed in runs.items()},
            looks,
            text.unigram_entropy,
            f"Training loss of {page.listed(list(runs))} over {settings.steps} steps",
            {
                row.position: ([float(share * settings.steps) for share in SHARES], row.outlook.curve)
                for row in rows
                if row.outlook is not None
            },
        ),
        loss_over_length=losses.over_length(
            {row.position: measured(row) for row in rows},
            looks,
            "Held-out loss of each method over the number of tokens read at a time; the numbers are in the table",
        ),
        methods=[method(row, runs[row.position], looks[row.position], index) for index, row in enumerate(rows)],
        even_share=1 / settings.length,
        command=command(order, results, seeds),
    )


def columns(lengths: Sequence[int], task: CompareTask | None = None) -> list[Column]:
    """Return the table's columns.

    Args:
        lengths: those with losses, with the training length first.
        task: the labeled table that ranks the methods; None if held-out text does.
    """
    trained, *longer = lengths
    return [
        Column("rank"),
        Column("position"),
        *([Column(task.metric, "of labels", "descending")] if task else []),
        Column("loss", f"{trained} tokens"),
        Column("accuracy", f"{trained} tokens", "descending"),
        *(Column("loss", f"{length} tokens, {length / trained:.3g}{TIMES}") for length in longer),
        Column("change", "with twice the steps"),
        Column("loss", f"predicted for {AHEAD}{TIMES} the steps"),
        Column("rate", "of learning", "descending"),
        Column("speed", f"{BASELINE} = 1", "descending"),
        Column("memory", "of a step"),
        Column("parameters", "of position"),
    ]


def cannot_notes(rows: Sequence[RankedMethod]) -> dict[str, str]:
    """For each method that lacks a loss at some length, return the reason at the first such length."""
    notes: dict[str, str] = {}
    for row in rows:
        for _, cell in sorted(row.loss.items()):
            if cell.median is None:
                notes.setdefault(row.position, cell.why_not)
    return notes


def table_cells(row: RankedMethod, notes: dict[str, str]) -> Sequence[Cell]:
    """Return a method's cells, after its rank and name."""

    def number(of: Spread, form: str, unit: str = "") -> Cell:
        if of.median is None or of.low is None or of.high is None:
            return Cell(of.why_not)
        spread = f"{of.low:{form}}\N{EN DASH}{of.high:{form}}" if of.low != of.high else ""
        return Cell(f"{of.median:{form}}{unit}", spread, of.median)

    def loss(of: Spread) -> Cell:
        if of.median is None:
            reasons = list(dict.fromkeys(notes.values()))
            return Cell("no: out of range", note=1 + reasons.index(notes[row.position]))
        return number(of, ".3f")

    trained, *longer = (row.loss[length] for length in sorted(row.loss))
    memory = row.peak_memory
    score = [] if row.score is None else [_score(row, number(row.score, ".3f"))]
    return [
        *score,
        loss(trained),
        number(row.accuracy, ".1%"),
        *(loss(of) for of in longer),
        *outlook_cells(row, min(row.loss)),
        Cell(f"{row.learning_rate:.2g}", order=row.learning_rate),
        number(row.relative_speed, ".2f", TIMES),
        Cell("\N{EN DASH}") if memory is None else Cell(f"{memory / 2**20:,.1f} MiB", order=memory),
        Cell(page.count(row.positional_parameters), order=row.positional_parameters),
    ]


def _score(row: RankedMethod, cell: Cell) -> Cell:
    """Return the cell of a labeled table's score, with its standard error."""
    return replace(cell, text=f"{cell.text} \N{PLUS-MINUS SIGN}{row.score_error:.3f}")


def outlook_cells(row: RankedMethod, length: int) -> list[Cell]:
    """Return the cells that say where a method's loss at a length is heading."""
    now = row.loss[length].median
    if row.outlook is None or now is None:
        return [Cell("too few steps")] * 2

    def cell(value: float, error: float) -> Cell:
        return Cell(f"{value:.2f}", f"\N{PLUS-MINUS SIGN}{error:.2f}", value)

    double, ahead = row.outlook.double, row.outlook.ahead
    return [cell(-double.value, double.error), cell(now - ahead.value, ahead.error)]


def mean_curve(by_seed: Mapping[int, Run]) -> list[float]:
    """Return the training loss at each step, averaged over seeds."""
    return [statistics.fmean(step) for step in zip(*(run.train_loss for run in by_seed.values()), strict=True)]


def measured(row: RankedMethod) -> dict[int, tuple[float, float, float]]:
    """Return the (lowest, median, highest) loss at each length where the method has one."""
    return {
        length: (cell.low, cell.median, cell.high)
        for length, cell in sorted(row.loss.items())
        if cell.low is not None and cell.median is not None and cell.high is not None
    }


@dataclass(frozen=True)
class MethodSection:
    """The part of the page about one method's heads."""

    row: RankedMethod
    what: list[str]
    curves: Markup | None
    attention: Markup
    wide: bool


def method(row: RankedMethod, by_seed: Mapping[int, Run], look: figures.Series, index: int) -> MethodSection:
    """Draw the heads of a method's first seed."""
    run = by_seed[min(by_seed)]
    name, curves, first = row.position, run.curves, run.attention[0]
    adds = f"What {name} adds to scores, per head and offset"
    looks_at = f"Mean attention with {name}, per head and offset"
    return MethodSection(
        row,
        summaries(name),
        curves=heads.offset_curves(curves, look, f"curves-{index}", adds) if curves else None,
        attention=heads.attention_shares(run.attention, look, f"attention-{index}", looks_at),
        wide=first is not None and len(first) > 6,
    )


def summaries(position: str) -> list[str]:
    """Return a sentence about each part of a method. Parts that are not registered here are skipped."""
    sentences = []
    for part in method_names(position):
        try:
            sentences.append(describe(part)[0])
        except ValueError:
            continue
    return sentences


def command(order: Sequence[str], results: CompareResults, seeds: Sequence[int]) -> str:
    """Return the command that reproduces these results."""
    options = {
        "positions": ",".join(order),
        **{name: value for name, value in asdict(results.settings).items() if name not in ("text", "task")},
        "rate_factors": ",".join(f"{factor:g}" for factor in results.settings.rate_factors),
        "lengths": ",".join(map(str, results.settings.lengths)),
        "seeds": len(seeds),
        "seed": seeds[0],
    }
    parts = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in options.items() if value is not None
    ]
    if results.task is not None:
        files = {"train": results.task.train, "validation": results.task.validation}
        table = {**files, "text": ",".join(results.task.text), "label": results.task.label}
        named = [f"--{name} {shlex.quote(value)}" for name, value in table.items()]
        return " ".join(["whereformer compare", *named, *([] if results.task.classes else ["--regression"]), *parts])
    if results.text.column:
        parts.insert(0, f"--column {shlex.quote(results.text.column)}")
    if results.text.data:
        parts.insert(0, f"--data {shlex.join(results.text.data)}")
    return " ".join(["whereformer compare", *parts])
