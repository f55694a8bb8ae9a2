"""A recipe that tests run in processes of their own: it draws a number for each seed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch

from whereformer.lab.recipe import ManyRuns, MayChange, Names, Numbers, Range
from whereformer.lab.report.report import Figure, Report
from whereformer.lab.run import Run
from whereformer.lab.sheet import Sheet


@dataclass(frozen=True)
class Drawn:
    number: float
    threads: int
    process: int


@dataclass(frozen=True, kw_only=True)
class Toy(ManyRuns):
    """How large is noise?"""

    NAME = "toy"
    has_small_models = True
    QUICK: ClassVar = {"seeds": 1, "out": Path("runs/quick")}
    seeds: Annotated[int, Range(1, 100), MayChange] = 3
    """How many numbers."""
    quick: Annotated[bool, MayChange] = False
    """Fewer."""
    size: Annotated[int, Range(1, 2**20)] = 3
    """Numbers in a mean."""
    words: Names = ("a", "b")
    """Words."""
    rates: Annotated[Numbers, Range(0, 1)] = (0.5,)
    """Rates."""
    path: str | Path | None = None
    """A path."""
    shuffle: Annotated[bool, MayChange] = True
    """Do not shuffle."""
    files: tuple[Path, ...] = ()
    """Files."""
    fails: Annotated[str, MayChange] = ""
    """What happens at seed 1."""

    def run(self, run: Run) -> Report:
        draws = run.map([(seed,) for seed in range(self.seeds)], self.draw, task="draw", kind=Drawn)
        rows = [(str(seed), f"{draw.number:.3f}") for (seed,), draw in draws.items()]
        return Report("How large?", ["Noise <is> noise."], [Sheet.of("Noise", ["seed", "value"], rows), FIGURE], draws)

    def draw(self, run: Run, seed: int) -> Drawn:
        if seed == 1 and self.fails == "kill":
            os._exit(1)
        while seed and self.fails == "wait for go" and not (run.folder / "go").exists():
            time.sleep(0.05)
        if seed == 1 and self.fails == "wait":
            time.sleep(600)
        if seed == 1 and self.fails == "interrupt":
            raise KeyboardInterrupt
        run.advance(1, 0.5)
        torch.manual_seed(seed)
        return Drawn(float(torch.randn(self.size).mean()), torch.get_num_threads(), os.getpid())


def paint(canvas):
    canvas.add_subplot().plot([1, 2], [3, 4])


FIGURE = Figure("A line", paint, "It rises.")
