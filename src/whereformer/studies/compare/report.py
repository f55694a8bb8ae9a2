"""The table of a comparison, and its HTML report: which method suits the text, and what its heads learned."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...lab.encoders import BASELINE
from ...lab.report import figures, heads, losses, page
from ...lab.seeds import Spread
from ...lab.sheet import Cell, Column, Row, Sheet
from ...lab.study import command_line
from ...positions import METHODS, describe, method_names
from .outlook import AHEAD, SHARES
from .ranking import SEED_NOISE, RankedMethod, Ranking, predicted, rank
from .results import CompareResults, Score
from .settings import Compare

TEMPLATE = Path(__file__).with_suffix(".html.j2")
DASH = "\N{EN DASH}"
WIDE = 0.2
"""The table shows the range of a speed if it is wider than this share of the median."""


def sheets(results: CompareResults) -> list[Sheet]:
    """Return the ranking."""
    return [ranking_sheet(results, rank(results))] if results.runs else []


def ranking_sheet(
    results: CompareResults, ranking: Ranking, looks: Mapping[str, figures.Series] | None = None
) -> Sheet:
    """Return the ranking as a table, in which methods have their looks on a page."""
    rows = ranking.rows
    goal = "causal" if results.settings.causal else "masked"
    title = f"Held-out {goal}-LM loss, trained on {results.settings.length} tokens at a time (lower is better)"
    columns = [
        Column("#"),
        Column("position", left=True),
        *(Column("loss", f"@{length}") for length in sorted(rows[0].loss)),
        Column("accuracy", "", "descending"),
        Column("twice", "steps"),
        Column("loss", f"{AHEAD}x steps", page=True),
        Column("rate", "", "descending", page=True),
        Column("speed", f"{BASELINE} = 1", "descending"),
        Column("MiB"),
        Column("params"),
    ]
    best = any(row.rank is not None and row.rank > 1 for row in rows)
    return Sheet.of(
        title,
        columns,
        [Row(tuple(_cells(row, ranking, results, looks)), "best" if row.rank == 1 and best else "") for row in rows],
        notes=(_reading(ranking, results),),
        named=1,
        sortable=True,
        kind="ranking cards",
    )


def _reading(ranking: Ranking, results: CompareResults) -> str:
    """Return the sentences that say how to read the table."""
    notes = ["Methods with the same # cannot be told apart."]
    if ranking.waiting:
        notes.append(f"Without #: not yet learning, since the loss is not clearly lower than that of {BASELINE}.")
    notes.append("twice steps: expected change of the loss with twice as many steps.")
    clock = "CPU time" if results.settings.device == "cpu" else "time"
    notes.append(
        f"speed: training speed relative to {BASELINE}, by {clock}, with the range of the rounds below if it is wide. "
        "MiB: peak memory of a training step. params: parameters of position."
    )
    return " ".join(notes)


def _cells(
    row: RankedMethod, ranking: Ranking, results: CompareResults, looks: Mapping[str, figures.Series] | None
) -> list[Cell]:
    """Return a method's cells."""
    seeds = len(_seeds(results))
    few = f"{len(row.runs)} of {seeds} seeds" if len(row.runs) != seeds else ""
    look = None if looks is None else looks[row.position]
    by_length = [of for _, of in sorted(row.loss.items())]
    # One note says it for all lengths.
    why_not = next((of.why_not for of in by_length if of.median is None), "")
    run, *_ = row.runs.values()
    trained = [each.scores[results.settings.length] for each in row.runs.values()]
    accuracy = Spread.of([score.accuracy for score in trained if isinstance(score, Score)])
    cells = [
        Cell(DASH, title="not yet learning") if row.rank is None else Cell(str(row.rank), order=row.rank),
        Cell(row.position, "not learning" if row.rank is None else few, order=row.position, swatch=look),
    ]
    cells += [
        Cell("cannot", note=why_not) if of.median is None else _number(of, "{:.3f}".format, "{:.2f}".format)
        for of in by_length
    ]
    cells.append(_number(accuracy, "{:.1%}".format))
    cells += _heading(row, results.settings.length, row.position in ranking.uncertain)
    cells.append(Cell(f"{run.learning_rate:.2g}", order=run.learning_rate))
    if (speed := results.speed.get(row.position)) is None:
        cells += [Cell(DASH, title="not measured"), Cell(DASH)]
    else:
        wide = speed.highest - speed.lowest > WIDE * speed.relative_speed
        of = Spread(speed.relative_speed, speed.lowest, speed.highest)
        cells.append(_number(of, "{:.2f}".format, "{:.2f}".format if wide else None))
        cells.append(Cell(f"{speed.peak_memory / 2**20:,.0f}", order=speed.peak_memory))
    return [*cells, Cell(page.count(run.positional_parameters), order=run.positional_parameters)]


def _number(of: Spread, shown: Callable[[float], str], end: Callable[[float], str] | None = None) -> Cell:
    """Return the cell of a median, with its range below if ``end`` formats the range's ends."""
    if of.median is None or of.low is None or of.high is None:
        return Cell(DASH, title=of.why_not)
    spread = f"{end(of.low)}{DASH}{end(of.high)}" if end is not None and of.low != of.high else ""
    return Cell(shown(of.median), spread, of.median)


def _heading(row: RankedMethod, length: int, uncertain: bool) -> list[Cell]:
    """Return the cells that say where a method's loss at the training length is heading.

    If the prediction is too uncertain to say whether the method overtakes better ones, the cell shows only a range, and
    sorting puts it last.
    """
    ahead = predicted(row, length)
    if row.outlook is None or ahead is None:
        why = "not yet learning" if row.rank is None else "too few steps"
        return [Cell(DASH, title=why)] * 2

    def cell(value: float, error: float, sign: str = "") -> Cell:
        return Cell(f"{value:{sign}.2f}", f"\N{PLUS-MINUS SIGN}{error:.2f}", value)

    double = row.outlook.double
    change = cell(-double.value, double.error, "+")
    if uncertain:
        low, high = max(0.0, ahead.value - 2 * ahead.error), ahead.value + 2 * ahead.error
        return [change, Cell(DASH, f"{low:.2f}{DASH}{high:.2f}", title="too uncertain to change the order")]
    return [change, cell(ahead.value, ahead.error)]


def _seeds(results: CompareResults) -> list[int]:
    return sorted({seed for (_, seed), _ in results.each()})


def build_report(results: CompareResults) -> str:
    """Build the page. Equal results give identical pages."""
    ranking, settings, order = rank(results), results.settings, list(results.runs)
    rows, seeds = ranking.rows, _seeds(results)
    # Looks follow the order in which the methods were given, so a method looks the same whatever its rank.
    series = dict(
        zip(order, figures.series(len(order), order.index(BASELINE) if BASELINE in order else None), strict=True)
    )
    looks = {row.position: series[row.position] for row in rows}
    about = {name: value for name, value in asdict(settings).items() if value is not None}
    trials = {name: ", ".join(map(str, tried)) for name, tried in results.trials.items()}
    return page.render(
        TEMPLATE,
        title="Which position method suits this text?",
        sentences=results.sentences(),
        results=results,
        settings=settings,
        ranking=ranking,
        facts_of={
            "Settings": about,
            "Text": asdict(results.text),
            **({"Losses of short trainings by learning rate": trials} if trials else {}),
            "Machine": results.machine,
        },
        seeds=seeds,
        layers=len(next(iter(rows[0].runs.values())).attention),
        sizes=sorted({run.parameters for _, run in results.each()}),
        seed_noise=SEED_NOISE / len(seeds) ** 0.5,
        table=ranking_sheet(results, ranking, looks),
        baseline=BASELINE,
        ahead=AHEAD,
        cannot=[row.position for row in rows if any(of.median is None for of in row.loss.values())],
        predicted=any(row.outlook for row in rows),
        looks=looks,
        loss_over_steps=losses.over_steps(
            {row.position: _mean_curve(row) for row in rows},
            looks,
            results.text.unigram_entropy,
            f"Training loss of {page.listed([row.position for row in rows])} over {settings.steps} steps",
            {
                row.position: ([float(share * settings.steps) for share in SHARES], row.outlook.curve)
                for row in rows
                if row.outlook is not None and row.position not in ranking.uncertain
            },
        ),
        loss_over_length=losses.over_length(
            {row.position: _ranges(row) for row in rows},
            looks,
            "Held-out loss of each method over the number of tokens read at a time; the numbers are in the table",
        ),
        methods=[_method(row, looks[row.position], index) for index, row in enumerate(rows)],
        command=command_line(_options(results, seeds), "compare"),
    )


def _mean_curve(row: RankedMethod) -> list[float]:
    """Return the training loss at each step, averaged over seeds."""
    return [statistics.fmean(step) for step in zip(*(run.train_loss for run in row.runs.values()), strict=True)]


def _ranges(row: RankedMethod) -> dict[int, tuple[float, float, float]]:
    """Return the (lowest, median, highest) loss at each length where the method has one."""
    return {
        length: (of.low, of.median, of.high)
        for length, of in sorted(row.loss.items())
        if of.low is not None and of.median is not None and of.high is not None
    }


def _method(row: RankedMethod, look: figures.Series, index: int) -> dict[str, Any]:
    """Return the part of the page about the heads of a method's first seed."""
    name, run = row.position, row.runs[min(row.runs)]
    # A method that has not learned to add anything has a curve, but nothing to draw.
    drawn = any(value for layer in run.curves or () for head in layer for value in head)
    adds = f"What {name} adds to scores, per head and offset"
    looks_at = f"Mean attention with {name}, per head and offset"
    return {
        "row": row,
        # Parts that are not registered here have no summary.
        "what": [describe(part)[0] for part in method_names(name) if part in METHODS],
        "curves": heads.offset_curves(run.curves, look, f"curves-{index}", adds) if run.curves and drawn else None,
        "attention": heads.attention_shares(run.attention, look, f"attention-{index}", looks_at),
        "wide": len(run.attention[0] or ()) > 6,
    }


def _options(results: CompareResults, seeds: Sequence[int]) -> Compare:
    """Return the options with which the command gives these results again."""
    about = asdict(results.settings)
    del about["text"]
    about["rate_factors"] = ",".join(f"{factor:g}" for factor in results.settings.rate_factors)
    about["lengths"] = ",".join(map(str, results.settings.lengths))
    return Compare(
        data=tuple(results.text.data),
        column=results.text.column,
        positions=",".join(results.runs),
        quick=results.characters is not None,
        plugin=None if results.plugin is None else Path(results.plugin),
        seeds=len(seeds),
        seed=seeds[0],
        **about,
    )
