"""Time a window of 128 tokens on each side against full attention, without and with positions.

Each number is how many times as fast the window is as full attention with the same terms by this library, without
gradients and as a training step (forward and all gradients), by the CPU time of one thread. Full attention, the window
and a causal window (128 tokens before the query) take turns, and each keeps its best time. The goal is that a window is
10 times as fast. The last two columns are the time of full attention divided by the time of torch's, without positions.

Run: python benchmarks/windows.py [--length 4096] [--heads 4] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from attention_kinds import WINDOW, Case, make_problem
from attention_ways import FLOOR, Way, backend, make_step, mean_seconds
from benchmark import Benchmark, main
from rich.console import Console
from side_by_side import by_turns

TERMS, DTYPES = ("none", "bias", "t5", "shaw"), ("float32", "bfloat16")


def within(**options: Any) -> Way:
    """Return the way that computes a problem in a window."""
    return replace(backend("auto"), simplify=lambda problem: replace(problem, options=options))


WAYS = {"torch": FLOOR, "full": backend("auto"), "window": within(window=WINDOW), "causal": within(window=(WINDOW, 0))}


@dataclass(frozen=True, kw_only=True)
class Windows(Benchmark):
    """Measure how many times as fast a window is as full attention."""

    length: int = 4096
    """Number of tokens."""
    heads: int = 4
    """Attention heads."""
    rounds: int = 3
    """How many times each way is timed."""
    out: Path = Path("runs/windows.json")

    def measure(self, console: Console) -> dict[str, Any]:
        print(f"window {WINDOW}, n = {self.length}: times as fast as full attention, forward and training; goal 10")
        print(f"{'':18}{'both sides':>16}{'causal':>16}{'full / torch':>16}")
        results = {}
        for dtype in DTYPES:
            for name in TERMS:
                seconds = self._seconds(Case(name, self.length, 1, self.heads, 64, dtype, "forward"))
                results[f"{dtype} {name}"] = seconds
                pairs = (("full", "window"), ("full", "causal"), ("full", "torch"))
                ratios = [seconds[a][step] / seconds[b][step] for a, b in pairs for step in seconds[a]]
                print(f"{dtype:10}{name:8}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)
        return {**self.settings(), "window": WINDOW, "seconds": results}

    def _seconds(self, case: Case) -> dict[str, dict[str, float]]:
        """Return the lowest seconds of each way, forward and training."""
        seconds: dict[str, dict[str, float]] = {way: {} for way in WAYS}
        for direction in ("forward", "training"):
            problem = make_problem(replace(case, direction=direction))
            costs = {name: partial(mean_seconds, make_step(way, problem)) for name, way in WAYS.items()}
            for name, times in by_turns(costs, self.rounds).items():
                seconds[name][direction] = min(times)
        return seconds


if __name__ == "__main__":
    main(Windows)
