"""The goals for attention's speed on a CPU, by its instructions, and a table of them beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from whereformer.experiments.bench.results import BenchRow
from whereformer.files import write_atomically
from whereformer.kernels.native.library import level

LENGTHS = 128, 512, 2048
AVX512, AMX, AVX2 = "AMD with AVX-512", "Intel with AMX", "AVX2"
CASES = {
    ("bias", "float32", "training"): {AVX512: (0.88, 0.85, 0.85), AMX: (0.95, 1.00, 1.05)},
    ("bias", "float32", "forward"): {AVX512: (0.85, 0.87, 0.88), AMX: (1.05, 1.05, 1.05)},
    ("bias", "bfloat16", "training"): {AVX512: (0.32, 0.52, 0.62), AMX: (0.40, 0.75, 0.80)},
    ("bias", "bfloat16", "forward"): {AVX512: (0.48, 0.50, 0.52), AMX: (1.30, 1.15, 1.15)},
    ("shaw", "float32", "training"): {AVX512: (1.25, 0.95, 0.90), AMX: (1.35, 1.15, 1.10)},
    ("shaw", "bfloat16", "training"): {AVX512: (0.50, 0.60, 0.65), AMX: (0.70, 0.90, 0.90)},
    ("causal", "float32", "training"): {AVX512: (0.85, 0.60, 0.50), AMX: (0.95, 0.75, 0.65)},
}
"""The highest ratios to torch's attention without positions, at each of ``LENGTHS``, by the family of processors."""

ROWS = {"bias": ("none", "bias", "t5"), "shaw": ("shaw",), "causal": ("causal",)}
"""The kinds of terms with one goal."""

OTHERS = {
    "dense bias": ("sdpa+bias",),
    "as others have it": ("t5:transformers", "shaw:tensor2tensor", "sdpa:causal"),
    "FlexAttention": ("flex",),
    "blockwise": ("blockwise",),
}
"""Columns of the table, and the ways of which each shows one."""


def family() -> str:
    """Return the family of this machine's processor."""
    return {"amx": AMX, "avx512": AVX512, "avx512bf16": AVX512}.get(level(), AVX2)


def goal(kind: str, dtype: str, direction: str) -> tuple[float, ...] | None:
    """Return this processor's goals at each of ``LENGTHS``; None if there are none."""
    if family() == AVX2:
        return (1.15,) * 3 if (dtype, direction) == ("float32", "training") else None
    found = CASES.get((kind, dtype, direction))
    return None if found is None else found[family()]


def write_goals(rows: Sequence[BenchRow], path: Path) -> str:
    """Write and return the table, as Markdown: the ratios of "auto" at each length, the goal, and the others."""
    ratios: dict[tuple[str, str, str], dict[str, dict[int, float | None]]] = {}
    for row in rows:
        ratios.setdefault((row.terms, row.dtype, row.direction), {}).setdefault(row.way, {})[row.n] = row.ratio
    head = ["", "", "this library", "goal", *OTHERS]
    lines = [head, ["---"] * len(head)]
    for group, kinds in ROWS.items():
        for kind in kinds:
            for dtype, direction in ((d, way) for d in ("float32", "bfloat16") for way in ("training", "forward")):
                found = ratios.get((kind, dtype, direction), {})
                if "auto" in found:
                    most = goal(group, dtype, direction)
                    cells = [_cell(found["auto"], most), "" if most is None else _join(f"{x:.2f}" for x in most)]
                    lines.append(
                        [kind, f"{dtype} {direction}", *cells, *(_other(found, ways) for ways in OTHERS.values())]
                    )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
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


def _join(cells) -> str:
    return " / ".join(cells)


def _other(found: Mapping[str, Mapping[int, float | None]], ways: Sequence[str]) -> str:
    """Format the ratios of another way; "cannot" if it was tried in vain."""
    for way in ways:
        if way in found:
            return _cell(found[way]) if any(found[way].values()) else "cannot"
    return ""
