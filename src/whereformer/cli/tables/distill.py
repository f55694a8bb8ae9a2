"""Print the scores of ``whereformer distill-positions``."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ...studies.distill.results import DistillResults


def print_distilling(console: Console, results: DistillResults) -> None:
    """Print how a model scores after kernels have replaced its position embeddings."""
    names = {
        "similarity": ("similarity\n(cosine)", "{:.3f}"),
        "masked_lm_loss": ("masked-LM\nloss", "{:.3f}"),
        "masked_lm_accuracy": ("masked-LM\naccuracy", "{:.1%}"),
        "spearman": ("pairs\n(Spearman)", "{:.3f}"),
    }
    table = Table(title="Before any training", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("positions", no_wrap=True)
    shown = [name for name in names if name in next(iter(results.scores.values()))]
    for title in (*(names[name][0] for name in shown), "curves\nexplained"):
        table.add_column(title, justify="right", no_wrap=True)
    for model, scores in results.scores.items():
        explained = [value for layer in results.explained.get(model, ()) for value in layer]
        table.add_row(
            model,
            *(names[name][1].format(scores[name]) for name in shown),
            f"{statistics.mean(explained):.0%}" if explained else "-",
        )
    console.print(table)
