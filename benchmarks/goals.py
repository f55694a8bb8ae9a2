"""The goals for attention's speed on a CPU, by its instructions, and a table of them beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attention_ways import Row

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

On processors without AVX-512 the goal is 1.15 in float32 training, and there is no other.
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

OTHERS = {
    "dense bias": ("sdpa+bias",),
    "in other libraries": ("t5:transformers", "shaw:tensor2tensor", "sdpa:causal"),
    "FlexAttention": ("flex",),
    "`blockwise`": ("blockwise",),
}
"""Columns of the table, and the ways of which each shows one."""


def goal(kind: str, dtype: str, direction: str) -> tuple[float, ...] | None:
    """Return this processor's goals at each of ``LENGTHS``; None if there are none."""
    found = GOALS.get(("bias" if kind == "t5" else kind, dtype, direction))
    if found is None:
        return None
    if level().startswith(("avx512", "amx")):
        return found[AMX if level() == "amx" else AVX512]
    return (1.15,) * 3 if (dtype, direction) == ("float32", "training") else None


def write_goals(rows: Sequence[Row], path: Path) -> str:
    """Write and return the table, as Markdown: the ratios of "auto" at each length, the goal, and the others."""
    ratios: dict[tuple[str, str, str], dict[str, dict[int, float | None]]] = {}
    for row in rows:
        ratios.setdefault((row.terms, row.dtype, row.direction), {}).setdefault(row.way, {})[row.n] = row.ratio
    head = [f"n = {_join(map(str, LENGTHS))}", "", "ours", "goal", *OTHERS]
    lines = [head, ["---"] * len(head)]
    for kind, label in ROWS.items():
        for dtype in ("float32", "bfloat16"):
            for direction in ("training", "forward"):
                found = ratios.get((kind, dtype, direction), {})
                if "auto" in found:
                    most = goal(kind, dtype, direction)
                    ours = [_cell(found["auto"], most), "" if most is None else _join(f"{x:.2f}" for x in most)]
                    lines.append(
                        [label, f"{dtype} {direction}", *ours, *(_other(found, ways) for ways in OTHERS.values())]
                    )
    # Pages are not to break a cell into lines.
    unbroken = [[cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in line] for line in lines]
    table = "\n".join(f"| {' | '.join(row)} |" for row in unbroken) + "\n"
    write_atomically(path, table)
    return table


def _cell(ratios: Mapping[int, float | None], most: Sequence[float] | None = None) -> str:
    """Format ratios at each length; those above the goal are bold."""
    cells = []
    for index, n in enumerate(LENGTHS):
        ratio = ratios.get(n)
        text = "-" if ratio is None else f"{ratio:.2f}"
        cells.append(f"**{text}**" if most and ratio is not None and round(ratio, 2) > most[index] else text)
    return _join(cells)


def _join(cells: Iterable[str]) -> str:
    """Join cells of all lengths; one is enough if they are the same."""
    cells = list(cells)
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def _other(found: Mapping[str, Mapping[int, float | None]], ways: Sequence[str]) -> str:
    """Format the ratios of another way; "cannot" if it was tried in vain."""
    for way in ways:
        if way in found:
            return _cell(found[way]) if any(found[way].values()) else "cannot"
    return ""
