"""Time a window of 128 tokens on each side against full attention, both by this library, without and with positions.

Each number is how many times as fast the window is, without gradients and as a training step (forward and all
gradients), by the CPU time of one thread. Full attention, the window and a causal window (128 tokens before the query)
take turns, and each keeps its best time.

Run: python benchmarks/windows.py [--length 4096] [--heads 4] [--terms none,bias,t5,shaw] [--dtypes float32,bfloat16]
    [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whereformer import OffsetBias, OffsetKeys, OffsetValues, attention
from whereformer.kernels import Term
from whereformer.runs.provenance import write_results

WIDTH, WINDOW = 64, 128
WAYS: dict[str, dict[str, Any]] = {"full": {}, "window": {"window": WINDOW}, "causal": {"window": (WINDOW, 0)}}


def make_terms(name: str, heads: int, length: int) -> list[Term]:
    """Return fresh terms: a bias for every offset, T5's table, or Shaw's vectors, clipped at 16."""
    if name == "none":
        return []
    if name in ("bias", "t5"):
        reach = length - 1 if name == "bias" else 127
        return [OffsetBias(torch.randn(heads, 2 * reach + 1, requires_grad=True), first=-reach)]
    keys, values = (torch.randn(1, 33, WIDTH, requires_grad=True) for _ in range(2))
    return [OffsetKeys(keys, first=-16), OffsetValues(values, first=-16)]


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def measure(name: str, heads: int, length: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Return the least seconds of each way, forward and training."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
    terms = make_terms(name, heads, length)

    def forward(options: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            return attention(*inputs, terms, **options)

    def training(options: dict[str, Any]) -> None:
        attention(*inputs, terms, **options).sum().backward()

    seconds: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for _ in range(rounds + 1):  # the first is for warming up; being slower, it changes no minimum
        for way, options in WAYS.items():
            for step, run in (("forward", forward), ("training", training)):
                spent = cpu_seconds(lambda run=run, options=options: run(options))
                seconds[way][step] = min(spent, seconds[way].get(step, spent))
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
    print(f"window {WINDOW}, n = {asked.length}: times as fast as full attention, forward and training")
    print(f"{'':18}{'both sides':>16}{'causal':>16}")
    results = {}
    for dtype in asked.dtypes.split(","):
        for name in asked.terms.split(","):
            found = measure(name, asked.heads, asked.length, getattr(torch, dtype), asked.rounds)
            results[f"{dtype} {name}"] = found
            ratios = [found["full"][step] / found[way][step] for way in ("window", "causal") for step in found[way]]
            print(f"{dtype:10}{name:8}" + "".join(f"{ratio:8.1f}" for ratio in ratios), flush=True)
    if asked.out:
        settings = {"length": asked.length, "heads": asked.heads, "window": WINDOW, "rounds": asked.rounds}
        write_results(asked.out, {**settings, "seconds": results})


if __name__ == "__main__":
    main()
