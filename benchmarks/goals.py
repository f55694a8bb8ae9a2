"""The goals for attention's speed on a CPU, by its instructions, and a table of them next to the measured times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whereformer.files import write_atomically
from whereformer.kernels.native.library import level

LENGTHS = 128, 512, 2048
AVX512, AMX = "AMD with AVX-512", "Intel with AMX"
GOALS = {
    ("bias", "float32", "training"): {AVX512: (0.88, 0.85, 0.85), AMX: (0.95, 1.00, 1.05)},
    ("bias", "float32", "forward"): {AVX512: (0.85, 0.87, 0.88), AMX: (1.05, 1.05, 1.05)},
    ("bias", "bfloat16", "training"): {AVX512: (0.32, 0.52, 0.62), AMX: (0.40, 0.75, 0.80)},
    ("bias", "bfloat16", "forward"): {AVX512: (0.48, 0.50, 0.52), AMX: (1.30, 1.15, 1.15)},
    ("shaw", "float32", "training"): {AVX512: (1.25, 0.95, 0.90), AMX: (1.35, 1.15, 1.10)},
    ("shaw", "bfloat16", "training"): {AVX512: (0.50, 0.60, 0.65), AMX: (0.70, 0.90, 0.90)},
    ("causal", "float32", "training"): {AVX512: (0.85, 0.60, 0.50), AMX: (0.95, 0.75, 0.65)},
}
"""The highest ratios to torch's attention without positions, at each of ``LENGTHS``, by the family of processors.

On processors without AVX-512 the goal is 1.15 in float32 training, the only one.
"""

ROWS = {
    "none": "no terms",
    "bias": "`OffsetBias`, every offset free",
    "t5": "T5",
    "shaw": "Shaw, keys and values",
    "causal": "`OffsetBias`, causal",
    "funnel": "`OffsetBias`, every second query",
}
"""The kinds of terms in the table."""

PEERS = {
    "dense bias": ("sdpa+bias",),
    "in other libraries": ("t5:transformers", "shaw:tensor2tensor", "sdpa:causal"),
    "FlexAttention": ("flex",),
    "`blockwise`": ("blockwise",),
}
"""Columns of the table, and the ways; a column shows the first of them that was measured."""


def goal(kind: str, dtype: str, direction: str) -> tuple[float, ...] | None:
    """Return this processor's goals at each of ``LENGTHS``; None if there are none."""
    goals = GOALS.get(("bias" if kind == "t5" else kind, dtype, direction))
    if goals is None:
        return None
    if level().startswith(("avx512", "amx")):
        return goals[AMX if level() == "amx" else AVX512]
    return (1.15,) * 3 if (dtype, direction) == ("float32", "training") else None


def write_goals(rows: Iterable[Mapping[str, Any]], path: Path) -> str:
    """Write and return the table, as Markdown: the ratios of "auto" at each length, the goal, and the other ways."""
    ratios: dict[tuple[str, str, str], dict[str, dict[int, float | None]]] = {}
    for row in rows:
        ways = ratios.setdefault((row["terms"], row["dtype"], row["direction"]), {})
        ways.setdefault(row["way"], {})[row["n"]] = row["ratio"]
    head = [f"n = {_join(map(str, LENGTHS))}", "", "ours", "goal", *PEERS]
    lines = [head, ["---"] * len(head)]
    for kind, label in ROWS.items():
        for dtype in ("float32", "bfloat16"):
            for direction in ("training", "forward"):
                ways = ratios.get((kind, dtype, direction), {})
                if "auto" in ways:
                    limits = goal(kind, dtype, direction)
                    ours = [_cell(ways["auto"], limits), "" if limits is None else _join(f"{x:.2f}" for x in limits)]
                    theirs = (_peer_cell(ways, names) for names in PEERS.values())
                    lines.append([label, f"{dtype} {direction}", *ours, *theirs])
    # Non-breaking spaces keep a cell in one line.
    unbroken = [[cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in line] for line in lines]
    table = "\n".join(f"| {' | '.join(row)} |" for row in unbroken) + "\n"
    write_atomically(path, table)
    return table


def _cell(ratios: Mapping[int, float | None], limits: Sequence[float] | None = None) -> str:
    """Format ratios at each length; those above the goal are bold."""
    cells = []
    for index, n in enumerate(LENGTHS):
        ratio = ratios.get(n)
        text = "-" if ratio is None else f"{ratio:.2f}"
        cells.append(f"**{text}**" if limits and ratio is not None and round(ratio, 2) > limits[index] else text)
    return _join(cells)


def _join(cells: Iterable[str]) -> str:
    """Join cells of all lengths; one is enough if they are the same."""
    cells = list(cells)
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def _peer_cell(ways: Mapping[str, Mapping[int, float | None]], names: Sequence[str]) -> str:
    """Format the ratios of another way; "cannot" if it was tried and failed."""
    for name in names:
        if name in ways:
            return _cell(ways[name]) if any(ways[name].values()) else "cannot"
    return ""
