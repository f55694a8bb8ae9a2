"""The tables of a comparison, and its HTML report: which method suits the text, and what its heads learned."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from markupsafe import Markup

from ...lab.encoders import BASELINE
from ...lab.report import figures, heads, losses, page
from ...lab.seeds import Spread
from ...lab.sheet import Cell, Column, Row, Sheet
from ...lab.study import command_line
from ...positions import describe, method_names
from .outlook import AHEAD, SHARES
from .ranking import RankedMethod, Ranking, noise_of, rank
from .results import CompareResults, CompareTask, Run
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
    """Return the ranking as a table.

    Args:
        results: the results.
        ranking: their ranking.
        looks: the look of each method on a page.
    """
    task, rows = results.task, ranking.rows
    title = f"Held-out masked-LM loss, trained on {results.settings.length} tokens at a time (lower is better)"
    if task is not None:
        kind = "Accuracy" if task.classes else "Spearman's correlation"
        title = f"{kind} on {task.validation_rows:,} rows (higher is better), and masked-LM loss"
    seeds = len({seed for by_seed in results.runs.values() for seed in by_seed})
    best = any(row.rank is not None and row.rank > 1 for row in rows)
    return Sheet(
        title,
        tuple(columns(sorted(rows[0].loss), task)),
        tuple(
            Row(
                tuple(_cells(row, seeds, task, None if looks is None else looks[row.position])),
                "best" if row.rank == 1 and best else "",
            )
            for row in rows
        ),
        notes=tuple(reading(ranking, results)),
        named=1,
        sortable=True,
        kind="ranking cards",
    )


def columns(lengths: Sequence[int], task: CompareTask | None = None) -> list[Column]:
    """Return the table's columns.

    Args:
        lengths: those with losses.
        task: the labeled table that ranks the methods; None if held-out text does.
    """
    score = [Column(task.metric, "of labels", "descending")] if task else []
    heading = [Column("twice", "steps"), Column("loss", f"{AHEAD}x steps", page=True)]
    return [
        Column("#"),
        Column("position", left=True),
        *score,
        *(Column("loss", f"@{length}") for length in lengths),
        Column("accuracy", "", "descending", page=task is not None),
        *([] if task else heading),
        Column("rate", "of learning", "descending", page=True),
        Column("speed", f"{BASELINE} = 1", "descending"),
        Column("MiB"),
        Column("params"),
    ]


def reading(ranking: Ranking, results: CompareResults) -> list[str]:
    """Return the sentences that say how to read the table."""
    notes = ["Methods with the same # cannot be told apart."]
    if ranking.waiting:
        notes.append(f"Without #: not yet learning, since the loss is not clearly lower than that of {BASELINE}.")
    if any(row.dropped for row in ranking.rows):
        notes.append("Methods with fewer seeds were left out after those, as clearly worse.")
    if results.task is not None:
        notes.append("\N{PLUS-MINUS SIGN}: standard error over the rows, with the range of seeds below.")
    else:
        notes.append("twice steps: expected change of the loss with as many steps again.")
    clock = "CPU time" if results.settings.device == "cpu" else "time"
    notes.append(
        f"speed: training speed relative to {BASELINE}, by {clock}, with the range of the rounds below if it is wide. "
        "MiB: peak memory of a training step. params: parameters of position."
    )
    return [" ".join(notes)]


def _cells(row: RankedMethod, seeds: int, task: CompareTask | None, look: figures.Series | None) -> list[Cell]:
    """Return a method's cells."""
    few = f"{row.seeds} of {seeds} seeds" if row.seeds != seeds else ""
    memory = row.peak_memory
    by_length = [of for _, of in sorted(row.loss.items())]
    # One note says it for all lengths.
    why_not = next((of.why_not for of in by_length if of.median is None), "")
    return [
        Cell(DASH, title="not yet learning") if row.rank is None else Cell(str(row.rank), order=row.rank),
        Cell(row.position, "not learning" if row.rank is None else few, order=row.position, swatch=look),
        *([] if task is None else [_score(row, task)]),
        *(Cell("cannot", note=why_not) if of.median is None else _number(of, ".3f") for of in by_length),
        _number(row.accuracy, ".1%", ranged=False),
        *([] if task else _heading(row)),
        Cell(f"{row.learning_rate:.2g}", order=row.learning_rate),
        _number(row.relative_speed, ".2f", ranged=_wide(row.relative_speed)),
        Cell(DASH) if memory is None else Cell(f"{memory / 2**20:,.0f}", order=memory),
        Cell(page.count(row.positional_parameters), order=row.positional_parameters),
    ]


def _number(of: Spread, form: str, *, ranged: bool = True) -> Cell:
    """Return the cell of a median, with its range below."""
    if of.median is None or of.low is None or of.high is None:
        return Cell(DASH, title=of.why_not)
    spread = f"{of.low:.2f}{DASH}{of.high:.2f}" if ranged and of.low != of.high else ""
    return Cell(f"{of.median:{form}}", spread, of.median)


def _wide(of: Spread) -> bool:
    return of.median is not None and of.low is not None and of.high is not None and of.high - of.low > WIDE * of.median


def _score(row: RankedMethod, task: CompareTask) -> Cell:
    """Return the cell of a labeled table's score with its standard error, and the range over seeds below."""
    of = row.score
    if of is None or of.median is None or of.low is None or of.high is None:
        return Cell(DASH)
    error = f"{100 * row.score_error:.1f}" if task.classes else f"{row.score_error:.3f}"
    spread = f"{task.shown(of.low)}{DASH}{task.shown(of.high)}" if of.low != of.high else ""
    return Cell(f"{task.shown(of.median)} \N{PLUS-MINUS SIGN}{error}", spread, of.median)


def _heading(row: RankedMethod) -> list[Cell]:
    """Return the cells that say where a method's loss at the training length is heading."""
    now = row.loss[min(row.loss)].median
    if row.outlook is None or now is None:
        why = "not yet learning" if row.rank is None else "too few steps"
        return [Cell(DASH, title=why)] * 2

    def cell(value: float, error: float, sign: str = "") -> Cell:
        return Cell(f"{value:{sign}.2f}", f"\N{PLUS-MINUS SIGN}{error:.2f}", value)

    double, ahead = row.outlook.double, row.outlook.ahead
    return [cell(-double.value, double.error, "+"), cell(now - ahead.value, ahead.error)]


def build_report(results: CompareResults) -> str:
    """Build the page. Equal results give identical pages."""
    ranking = rank(results)
    settings, text, rows = results.settings, results.text, ranking.rows
    runs = {row.position: results.runs[row.position] for row in rows}
    # Looks follow the order in which the methods were given, so a method looks the same whatever its rank.
    order = [name for name in results.runs if name in runs]
    all_looks = figures.series(len(order), order.index(BASELINE) if BASELINE in order else None)
    looks = {row.position: all_looks[order.index(row.position)] for row in rows}
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    first_run = next(iter(runs[rows[0].position].values()))
    sizes = sorted({run.parameters for by_seed in runs.values() for run in by_seed.values()})
    about = {name: value for name, value in asdict(settings).items() if value is not None}
    return page.render(
        TEMPLATE,
        title="Which position method suits this text?",
        sentences=results.sentences(),
        settings=asdict(settings),
        text=asdict(text),
        machine=results.machine,
        facts_of={"Settings": about, "Text": asdict(text), "Machine": results.machine},
        predicted_tokens=results.predicted_tokens,
        seeds=seeds,
        layers=len(first_run.attention),
        sizes=list(dict.fromkeys((sizes[0], sizes[-1]))),
        seed_noise=noise_of(results) / len(seeds) ** 0.5,
        task=results.task,
        guessing=None if results.task is None else results.task.shown(results.task.guessing),
        table=ranking_sheet(results, ranking, looks),
        waiting=ranking.waiting,
        dropped=any(row.dropped for row in rows),
        baseline=BASELINE,
        cannot=[row.position for row in rows if any(of.median is None for of in row.loss.values())],
        unsettled=[f"{better} before {worse}" for better, worse in ranking.unsettled],
        ahead=AHEAD,
        predicted=any(row.outlook for row in rows),
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
        command=command_line(options(order, results, seeds), "compare"),
    )


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
    name, first = row.position, run.attention[0]
    # A method that has not learned to add anything has a curve, but nothing to draw.
    curves = run.curves if any(value for layer in run.curves or () for head in layer for value in head) else None
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


def options(order: Sequence[str], results: CompareResults, seeds: Sequence[int]) -> Compare:
    """Return the options with which the command gives these results again."""
    about, task = asdict(results.settings), results.task
    del about["text"], about["task"]
    about["rate_factors"] = ",".join(f"{factor:g}" for factor in results.settings.rate_factors)
    about["lengths"] = ",".join(map(str, results.settings.lengths))
    if task is None:
        about |= {"data": tuple(results.text.data), "column": results.text.column}
    else:
        about |= {"train": Path(task.train), "validation": Path(task.validation)}
        about |= {"text": ",".join(task.text), "label": task.label, "regression": task.classes is None}
    return Compare(
        positions=",".join(order),
        quick=results.characters is not None,
        plugin=None if results.plugin is None else Path(results.plugin),
        seeds=len(seeds),
        seed=seeds[0],
        **about,
    )
