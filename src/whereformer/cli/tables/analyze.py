"""Print the tables of ``whereformer analyze``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ...analysis.findings import HeadFindings, ModelFindings


MOST_HEADS = 24
"""Up to this number of heads, each has its own line; beyond it, each layer has one."""


def print_analysis(console: Console, models: Sequence[ModelFindings]) -> None:
    """Print a line for each model, and for a single model also a line for each head or layer."""
    table = Table(title="Position", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("model", "method"):
        table.add_column(title, overflow="fold")
    for title in ("step", "score", "length", "Toeplitz-\nness of P"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("heads", overflow="fold")
    for model in models:
        table.add_row(
            model.name,
            model.position,
            "-" if model.step is None else f"{model.step:,}",
            "-" if model.score is None else f"{model.score:g}",
            str(model.length),
            "-" if model.table is None else f"{model.table.toeplitzness:.3f}",
            _names(model.heads) or "-",
        )
    console.print(table)
    for model in models:
        for missing in (model.no_table, model.no_heads):
            if missing:
                console.print(f"{model.name}: {missing}", style="dim", highlight=False)
    if len(models) == 1 and models[0].heads:
        (_print_heads if len(models[0].heads) <= MOST_HEADS else _print_layers)(console, models[0])
        console.print(
            "Toeplitzness: the share of a head's scores by position that a curve over offsets explains; fit: the share "
            "of the curve that S TISA kernels explain"
            + (
                "; text: the share of its log weights over text that the offset explains."
                if _measured(models[0])
                else "."
            ),
            style="dim",
            highlight=False,
        )


def _measured(model: ModelFindings) -> bool:
    return model.attention is not None


def _names(heads: Sequence[HeadFindings]) -> str:
    """Count the heads by name, most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in Counter(head.name for head in heads).most_common())


def _print_heads(console: Console, model: ModelFindings) -> None:
    shown = [fit.num_kernels for fit in model.heads[0].fits if fit.num_kernels in (1, 3, len(model.heads[0].fits))]
    table = _head_table("layer", "head", "name", shown, model)
    for head in model.heads:
        table.add_row(
            str(head.layer),
            str(head.head),
            head.name,
            f"{head.toeplitzness:.2f}",
            *(f"{float(head.fits[count - 1].explained):.3f}" for count in shown),
            *_explained(model, [head]),
        )
    console.print(table)


def _print_layers(console: Console, model: ModelFindings) -> None:
    most = len(model.heads[0].fits)
    table = _head_table("layer", "heads", "names", [most], model)
    for layer in dict.fromkeys(head.layer for head in model.heads):
        heads = [head for head in model.heads if head.layer == layer]
        table.add_row(
            str(layer),
            str(len(heads)),
            _names(heads),
            f"{_mean([head.toeplitzness for head in heads]):.2f}",
            f"{_mean([float(head.fits[-1].explained) for head in heads]):.3f}",
            *_explained(model, heads),
        )
    console.print(table)


def _head_table(first: str, second: str, names: str, fits: Sequence[int], model: ModelFindings) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (first, second):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(names, overflow="fold")
    titles = ["Toeplitz-\nness", *(f"fit\nS={count}" for count in fits), *(["text"] if _measured(model) else [])]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _explained(model: ModelFindings, heads: Sequence[HeadFindings]) -> list[str]:
    """Return the mean share of these heads' attention that the offset explains, if it was measured."""
    if model.attention is None:
        return []
    shares = [float(model.attention.explained[head.layer, head.head]) for head in heads]
    return [f"{_mean(shares):.2f}" if math.isfinite(sum(shares)) else "-"]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
