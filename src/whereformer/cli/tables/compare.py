"""Print the ranking of ``whereformer compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ...lab.seeds import Spread
    from ...studies.compare.ranking import RankedMethod
    from ...studies.compare.results import CompareTask


WIDE = 0.2
"""The table shows the range of a speed if it is wider than this share of the median."""


MOST_PAIRS = 4
"""Pairs that are named on the terminal."""
DROPPED = "*: left out after the first seeds, as clearly worse. "


def print_task(console: Console, task: CompareTask, length: int) -> None:
    """Print what is known of a labeled table."""
    cut = f"; {task.cut_rows:,} are cut to {length} tokens (--length)" if task.cut_rows else ""
    guess = f"; guessing the most frequent class: accuracy {task.guessing:.1%}" if task.classes else ""
    console.print(
        f"{task.training_rows:,} training and {task.validation_rows:,} validation rows{cut}{guess}", highlight=False
    )


def print_ranking(
    console: Console, rows: Sequence[RankedMethod], length: int, clock: str, task: CompareTask | None = None
) -> None:
    """Print the ranking, at most 100 columns wide.

    Args:
        console: where to print.
        rows: the ranking.
        length: the training length.
        clock: the kind of time that speed is measured in.
        task: the labeled table that ranks the methods; None if held-out text does.
    """
    title = f"Held-out masked-LM loss, trained on {length} tokens at a time (lower is better)"
    if task is not None:
        kind = "Accuracy" if task.classes else "Spearman's correlation"
        title = f"{kind} on {task.validation_rows:,} rows (higher is better), and masked-LM loss"
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("position", no_wrap=True)
    if task is not None:
        table.add_column(f"{task.metric}\n\N{PLUS-MINUS SIGN} error", justify="right", no_wrap=True)
    lengths = sorted(rows[0].loss)
    for tried in lengths:
        table.add_column(f"loss\n@{tried}", justify="right", no_wrap=True)
    last = ("speed", "MiB", "params")
    for title in ("rate", *last) if task else ("accu-\nracy", "twice\nsteps", "rate", "speed", "MiB", "params"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.rank),
            f"{row.position}*" if row.dropped else row.position,
            *(_score(row, task) if task else ()),
            *(_loss(row.loss[tried]) for tried in lengths),
            *(() if task else _accuracy_and_outlook(row)),
            f"{row.learning_rate:.2g}",
            _speed(row.relative_speed),
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.0f}",
            f"{row.positional_parameters:,}",
        )
    console.print(table)
    dropped = DROPPED if any(row.dropped for row in rows) else ""
    twice = "" if task else "twice steps: expected change with as many steps again. "
    error = "error: standard error over the rows, with the range of seeds below. " if task else ""
    console.print(
        f"Methods with the same # can't be told apart. {dropped}{error}{twice}"
        "rate: the learning rate. speed: training speed relative to none, by "
        f"{clock}, with the range of the rounds below if it is wide. MiB: peak memory of a training step. params: "
        "parameters of position.",
        style="dim",
        highlight=False,
    )


def _score(row: RankedMethod, task: CompareTask) -> list[str]:
    """Format the score of a labeled table with its standard error, and the range over seeds below."""
    if row.score is None or row.score.median is None or row.score.low is None or row.score.high is None:
        return ["-"]
    if task.classes is None:
        return [
            f"{row.score.median:.3f} \N{PLUS-MINUS SIGN}{row.score_error:.3f}\n{row.score.low:.3f}-{row.score.high:.3f}"
        ]
    return [
        f"{row.score.median:.1%} \N{PLUS-MINUS SIGN}{100 * row.score_error:.1f}\n"
        f"{100 * row.score.low:.1f}-{100 * row.score.high:.1f}"
    ]


def _accuracy_and_outlook(row: RankedMethod) -> list[str]:
    twice = "-" if row.outlook is None else f"{-row.outlook.double.value:+.2f}"
    return [f"{row.accuracy.median:.1%}", twice]


def _speed(cell: Spread) -> str:
    """Format a relative speed, with the range of its rounds if that is wide."""
    if cell.median is None or cell.low is None or cell.high is None:
        return "-"
    wide = cell.high - cell.low > WIDE * cell.median
    return f"{cell.median:.2f}" + (f"\n{cell.low:.2f}-{cell.high:.2f}" if wide else "")


def _loss(cell: Spread) -> str:
    if cell.median is None or cell.low is None or cell.high is None:
        return "cannot"
    if cell.low == cell.high:
        return f"{cell.median:.3f}"
    return f"{cell.median:.3f}\n{cell.low:.2f}-{cell.high:.2f}"


def print_unsettled(console: Console, pairs: Sequence[tuple[str, str]], times: int) -> None:
    """Print which ranks may change with ``times`` as many steps; nothing if none may."""
    if not pairs:
        return
    shown = ", ".join(f"{better} before {worse}" for better, worse in pairs[:MOST_PAIRS])
    more = f" and {len(pairs) - MOST_PAIRS} more, which the report names" if len(pairs) > MOST_PAIRS else ""
    console.print(
        f"Not settled: by the curves of training, {times} times the steps may change this order: {shown}{more}.",
        highlight=False,
    )
