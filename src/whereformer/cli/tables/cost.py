"""Print the table of ``whereformer cost --paper``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ...analysis import PaperRow


def print_paper_flops(console: Console, rows: Sequence[PaperRow]) -> None:
    """Print the relative FLOPs of the Funnel-Transformer paper's models."""
    table = Table(title="FLOPs relative to BERT-base", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for column in rows[0].relative:
        length, _, form = column.rpartition(" ")
        table.add_column(f"n={length}\n{form}" if length else form, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.model, *(f"{value:.3f}" for value in row.relative.values()))
    console.print(table)
    console.print(
        "linear: the paper's own figure, layers by length and squared width. Other columns count every product in the "
        "layers at that length, with relative attention in the named form as in the authors' code, at batch 8. Ours "
        "costs the same as shifted and less than factorized. +D2: with two decoder layers.",
        style="dim",
        highlight=False,
    )
