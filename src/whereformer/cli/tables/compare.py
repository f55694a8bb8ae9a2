"""Print the ranking of ``whereformer compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ...experiments.compare.ranking import RankedMethod
    from ...experiments.seeds import Spread


WIDE = 0.2
"""The table shows the range of a speed if it is wider than this share of the median."""


MOST_PAIRS = 4
"""Pairs that are named on the terminal."""
DROPPED = "*: left out after the first seeds, as clearly worse. "


def print_ranking(console: Console, rows: Sequence[RankedMethod], length: int, clock: str) -> None:
    """Print the ranking, at most 100 columns wide. ``clock`` is the kind of time that speed is measured in."""
    table = Table(
        title=f"Held-out masked-LM loss, trained on {length} tokens at a time (lower is better)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("position", no_wrap=True)
    lengths = sorted(rows[0].loss)
    for tried in lengths:
        table.add_column(f"loss\n@{tried}", justify="right", no_wrap=True)
    for title in ("accu-\nracy", "twice\nsteps", "rate", "speed", "MiB", "params"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.rank),
            f"{row.position}*" if row.dropped else row.position,
            *(_loss(row.loss[tried]) for tried in lengths),
            f"{row.accuracy.median:.1%}",
            "-" if row.outlook is None else f"{-row.outlook.double.value:+.2f}",
            f"{row.learning_rate:.2g}",
            _speed(row.relative_speed),
            "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:.0f}",
            f"{row.positional_parameters:,}",
        )
    console.print(table)
    dropped = DROPPED if any(row.dropped for row in rows) else ""
    console.print(
        f"Methods with the same # can't be told apart. {dropped}twice steps: expected change with as many steps again. "
        "rate: the best of the learning rates that were tried. speed: training speed relative to none, by "
        f"{clock}, with the range of the rounds below if it is wide. MiB: peak memory of a training step. params: "
        "parameters of position.",
        style="dim",
        highlight=False,
    )


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
