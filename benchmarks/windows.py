"""Time a window of 128 tokens on each side against full attention, without and with positions.

Each number is how many times as fast the window is as full attention with the same terms by this library, without
gradients and as a training step (forward and all gradients), by the CPU time of one thread. Full attention, the window
and a causal window (128 tokens before the query) take turns, and each keeps its best time. The goal is that a window
is 10 times as fast. The last two columns are the time of full attention divided by that of torch's, without positions.

Run: python benchmarks/windows.py [--length 4096] [--heads 4] [--terms none,bias,t5,shaw] [--dtypes float32,bfloat16]
    [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_kinds import WINDOW, BenchProblem, Case, make_problem
from attention_ways import FLOOR, Clock, Way, backend, make_step
from side_by_side import by_turns

from whereformer.kernels import attention
from whereformer.provenance import write_results

CPU = torch.device("cpu")


def within(**options: Any) -> Way:
    """Return the way that computes a problem in a window."""

    def prepare(problem: BenchProblem) -> Callable[[], torch.Tensor]:
        return lambda: attention(problem.query, problem.key, problem.value, problem.terms, **options)

    return Way("window", prepare)


WAYS = {"torch": FLOOR, "full": backend("auto"), "window": within(window=WINDOW), "causal": within(window=(WINDOW, 0))}


def measure(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Return the least seconds of each way, forward and training."""
    clock = Clock(CPU, 1)
    seconds: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for direction in ("forward", "training"):
        problem = make_problem(replace(case, direction=direction), CPU)
        costs = {name: partial(clock.seconds, make_step(way, problem)) for name, way in WAYS.items()}
        for name, times in by_turns(costs, rounds).items():
            seconds[name][direction] = min(times)
    return seconds


def main() -> None:
    """Measure every dtype with every kind of terms, and print how many times as fast windows are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--terms", default="none,bias,t5,shaw")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the seconds there, as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"window {WINDOW}, n = {asked.length}: times as fast as full attention, forward and training; goal 10")
    print(f"{'':18}{'both sides':>16}{'causal':>16}{'full / torch':>16}")
    results = {}
    for dtype in asked.dtypes.split(","):
        for name in asked.terms.split(","):
            found = measure(Case(name, asked.length, 1, asked.heads, 64, dtype, "forward"), asked.rounds)
            results[f"{dtype} {name}"] = found
            pairs = (("full", "window"), ("full", "causal"), ("full", "torch"))
            ratios = [found[one][step] / found[other][step] for one, other in pairs for step in found[one]]
            print(f"{dtype:10}{name:8}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)
    if asked.out:
        settings = {"length": asked.length, "heads": asked.heads, "window": WINDOW, "rounds": asked.rounds}
        write_results(asked.out, {**settings, "seconds": results})


if __name__ == "__main__":
    main()
