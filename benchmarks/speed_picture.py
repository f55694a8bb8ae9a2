"""Draw README's picture of speed, docs/images/speed.svg, from a benchmark of attention.

Run: .venv/bin/python benchmarks/speed_picture.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmark import main
from pictures import box, save, text
from rich.console import Console

from whereformer.lab.recipe import WithPlugin

LENGTHS = 128, 512, 2048
UNIT, LEFT, BAR = 64, 92, 15
"""Pixels of the time without positions, left of the bars, and of a bar's height."""
MIN_INSIDE = 32
"""The pixels of a bar into which its number fits."""


@dataclass(frozen=True, kw_only=True)
class SpeedPicture(WithPlugin):
    """Draw the time of training attention with a trained bias for each offset, next to the time of a dense bias."""

    results: Path = Path("benchmarks/results/amd-epyc-2-cores-avx512/results.json")
    """The results of benchmarks/attention.py."""
    out: Path = Path("docs/images/speed.svg")
    """The picture."""

    def run(self, console: Console) -> None:
        """Write the picture."""
        rows = json.loads(self.results.read_text())["rows"]
        ratios = {
            (row["dtype"], row["n"], row["way"]): row["ratio"]
            for row in rows
            if row["terms"] == "bias" and row["direction"] == "training"
        }
        parts, y = [], 14
        for dtype in ("float32", "bfloat16"):
            parts.append(text(0, y, f"training, {dtype}"))
            top, y = y + 6, y + 12
            for n in LENGTHS:
                parts.append(text(LEFT - 8, y + BAR + 4, f"{n:,} tokens", "muted end"))
                for way, kind in (("auto", "good"), ("sdpa+bias", "other")):
                    ratio = ratios[dtype, n, way]
                    parts.append(box(LEFT, y, ratio * UNIT, BAR - 2, kind))
                    inside = kind == "good" and ratio * UNIT > MIN_INSIDE  # or it would be on the line
                    x, looks = LEFT + ratio * UNIT + (-4 if inside else 4), "end on-good" if inside else "muted"
                    parts.append(text(x, y + 11, f"{ratio:.2f}", looks))
                    y += BAR
                y += 6
            parts.append(f'<line x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="{top}" y2="{y}"/>')
            y += 18
        parts += [box(0, y - 10, 12, 12, "good"), text(16, y, "whereformer"), box(100, y - 10, 12, 12, "other")]
        parts += [text(116, y, "dense bias"), text(188, y, "- - torch without positions = 1", "muted")]
        label = "Times of training attention with a trained bias, relative to torch's attention without positions"
        save(self.out, 410, y + 8, label, parts)
        console.print(f"wrote {self.out}")


if __name__ == "__main__":
    main(SpeedPicture)
