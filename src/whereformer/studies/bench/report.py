"""The table of a benchmark: times relative to attention without positions."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.choose import BACKENDS
from ...lab.sheet import Column, Sheet
from .results import BenchRow
from .ways import DENSE, FLOOR


def sheet(rows: Sequence[BenchRow]) -> Sheet:
    """Return a table with a line for each case and way, and the reasons for missing numbers below."""
    several = len({row.dtype for row in rows}) > 1
    found: dict[tuple[str, str, int, str], dict[str, BenchRow]] = {}
    for row in rows:
        found.setdefault((row.dtype, row.terms, row.n, row.way), {})[row.direction] = row
    reasons: dict[str, int] = {}
    lines = []
    for (dtype, kind, n, way), both in found.items():
        times = [_time(both.get(direction), reasons) for direction in ("forward", "training")]
        memory = both["training"].memory if "training" in both else None
        size = "-" if memory is None else f"{memory / 2**20:,.{1 if memory < 10 * 2**20 else 0}f}"
        lines.append([kind, *([dtype] if several else []), str(n), way, *times, size])
    words = [Column("terms", left=True), *([Column("dtype", left=True)] if several else [])]
    return Sheet.of(
        "Time relative to torch's attention without positions",
        [*words, "n", Column("way", left=True), "forward", "training", Column("training", "MiB")],
        lines,
        notes=(
            *(f"[{number}] {reason}" for reason, number in reasons.items()),
            "Medians of the rounds' ratios (lowest-highest). sdpa is torch's attention without positions. MiB is what "
            "a call needs beyond its inputs.",
        ),
    )


def _time(row: BenchRow | None, reasons: dict[str, int]) -> str:
    """Format a cell: the time of plain attention, the ratio of another way, or the number of a reason."""
    if row is None:
        return "-"
    if row.milliseconds is None:
        return f"cannot [{reasons.setdefault(row.note, len(reasons) + 1)}]"
    if row.way == FLOOR.name:
        return f"{row.milliseconds:.3g} ms" if row.milliseconds < 1000 else f"{row.milliseconds:.0f} ms"
    return f"{row.ratio:.2f} ({row.lowest:.2f}-{row.highest:.2f})"


def headline(rows: Sequence[BenchRow]) -> str:
    """Return what positions cost in training, and what they cost as a dense bias, in a sentence."""
    parts = []
    for way in (shown_backend(rows), DENSE.name):
        ratios = [row.ratio for row in rows if row.direction == "training" and row.ratio and row.way == way]
        if ratios:
            ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
            parts.append(f"{way} {' to '.join(ends)}")
    if not parts:
        return "No training with positions could be timed."
    return f"Training takes this multiple of the time of attention without positions: {', '.join(parts)}."


def shown_backend(rows: Sequence[BenchRow]) -> str:
    """Return the backend to show: "auto" if it was measured."""
    measured = {row.way for row in rows}
    return next((name for name in BACKENDS if name in measured), "auto")
