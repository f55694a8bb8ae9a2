"""Print the scores of ``whereformer translate score``."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...lab.terminal import say


def print_scores(console: Console, found: dict[str, Any]) -> None:
    """Print BLEU, chrF and BLEU by length."""
    table = Table("words of the source", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("lines", "BLEU"):
        table.add_column(title, justify="right")
    for part in found["bleu_by_words"]:
        words = f"{part['from']} and more" if part["to"] is None else f"{part['from'] or 'up'} to {part['to']}"
        table.add_row(words, f"{part['lines']:,}", f"{part['bleu']:.1f}")
    console.print(table)
    say(
        console,
        f"BLEU {found['bleu']:.2f} ({found['bleu_signature']}), lengths {found['length_ratio']:.3f} of the references'",
        f"chrF {found['chrf']:.2f} ({found['chrf_signature']})",
    )
