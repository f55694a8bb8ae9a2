"""Measure the overhead of an attention call with almost nothing to compute: 1 sequence, 4 tokens, 12 heads of 64.

Torch's attention and ours are timed in turns, in float32, without gradients and as a training step (forward and all
gradients). Numbers are medians in microseconds of one thread's CPU time, with the ratio to torch's time in the same
round in brackets. The goal is that a forward call takes at most 25 microseconds more than torch's.

Run: python benchmarks/per_call.py [--rounds 200] [--tokens 4] [--out FILE]
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attention_kinds import Case, make_problem
from attention_ways import FLOOR, backend, make_step
from benchmark import Benchmark, main
from rich.console import Console
from side_by_side import by_turns, cpu_seconds, summarize

CALLS = 20
"""Calls in a row in each round."""
WAYS = {
    "torch": (FLOOR, "none"),
    "no terms": (backend("auto"), "none"),
    "a bias": (backend("auto"), "bias"),
    "Shaw, keys and values": (backend("auto"), "shaw"),
    "a bias, blockwise": (backend("blockwise"), "bias"),
}
"""The calls to time, with the kind of terms of each. Terms are made again in each call, as in a model."""


def microseconds(step: Callable[[], object]) -> float:
    def calls() -> None:
        for _ in range(CALLS):
            step()

    gc.disable()
    seconds = cpu_seconds(calls)
    gc.enable()
    return seconds / CALLS * 1e6


@dataclass(frozen=True, kw_only=True)
class PerCall(Benchmark):
    """Measure microseconds of short calls."""

    rounds: int = 200
    """How many times each way is timed."""
    tokens: int = 4
    """Tokens of the sequence."""
    out: Path = Path("runs/per_call.json")

    def measure(self, console: Console) -> dict[str, Any]:
        results: dict[str, dict[str, dict[str, float]]] = {}
        for direction in ("forward", "training"):
            calls = {}
            for name, (way, kind) in WAYS.items():
                problem = make_problem(Case(kind, self.tokens, 1, 12, 64, "float32", direction))
                calls[name] = partial(microseconds, make_step(way, problem))
            for name, times in summarize(by_turns(calls, self.rounds), "torch").items():
                results.setdefault(name, {})[direction] = {"us": times.seconds, "ratio": times.ratio}
        print(f"{'microseconds a call':24} {'forward':>15} {'training':>15}")
        for name, modes in results.items():
            cells = (f"{row['us']:,.0f} ({row['ratio']:.1f})" for row in modes.values())
            print(f"{name:24} " + " ".join(f"{cell:>15}" for cell in cells))
        print(f"{'goal':24} {results['torch']['forward']['us'] + 25:11,.0f}")
        return {**self.settings(), "calls": results}


if __name__ == "__main__":
    main(PerCall)
