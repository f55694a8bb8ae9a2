"""Print the plan and the gains of ``whereformer finetune``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ...lab.terminal import say

if TYPE_CHECKING:
    from ...lab.seeds import Spread
    from ...studies.finetune.gains import GainsTable
    from ...studies.finetune.prepare import Checked, FinetuneJob


def print_finetuning(console: Console, job: FinetuneJob, checked: Checked) -> None:
    """Print the tasks and models of a fine-tuning before it starts."""
    for encoded in checked.tasks:
        found = encoded.facts()
        rows = ", ".join(f"{split} {count:,}" for split, count in found.rows.items())
        tokens = found.tokens_of_a_row
        lines = [
            f"{encoded.data.task.name}: {rows} rows from {found.source}; median {tokens['median']} tokens, "
            f"longest {tokens['most']}; {job.steps(encoded):,} steps per run"
        ]
        if found.subsets:
            lines.append(f"  only part of {', '.join(found.subsets)}: do not compare with published scores")
        if found.cut_rows:
            lines.append(f"  {found.cut_rows:,} rows truncated to {job.tuning.max_length} tokens")
        say(console, *lines)
    models = []
    for name, count in checked.parameters.items():
        # Say so if another method replaces trained positions.
        fresh = f", {count.fresh:,} of them new" if count.fresh else ""
        models.append(f"{name} ({count.all:,} parameters, {count.position:,} of position{fresh})")
    total = len(checked.tasks) * len(models) * len(job.seeds)
    say(
        console,
        f"models: {'; '.join(models)}",
        f"{total} runs: {len(checked.tasks)} tasks, {len(models)} models, {len(job.seeds)} seeds",
    )


def print_gains(console: Console, tables: Sequence[GainsTable]) -> None:
    """Print the tables of a fine-tuning, laid out as in the TISA paper."""
    for each in tables:
        table = Table(title=f"{each.position}: scores in percent", box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("task", "metric"):
            table.add_column(title, no_wrap=True)
        for title in (*each.columns, "gain", "error\nreduction"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in each.rows:
            gain = "-" if row.gain is None else f"{row.gain:+z.1f}{'*' if row.clear else ''}"
            reduction = "-" if row.error_reduction is None else f"{row.error_reduction:+z.1f}%"
            table.add_row(row.task, row.metric, *map(_score, row.cells), gain, reduction)
        console.print(table)
    console.print(
        "Medians over seeds, with their range below. gain: the largest gain over the baseline. error reduction: that "
        "gain divided by the baseline's distance from 100. *: every seed is better than every seed of the baseline.",
        style="dim",
        highlight=False,
    )


def _score(cell: Spread | None) -> str:
    if cell is None or cell.median is None or cell.low is None or cell.high is None:
        return "-"
    return f"{cell.median:.1f}" + (f"\n{cell.low:.1f} to {cell.high:.1f}" if cell.low != cell.high else "")
