"""Measure the overhead of an attention call with almost nothing to compute: 1 sequence, 4 tokens, 12 heads of 64.

Torch's attention and ours are timed in turns, in float32, without gradients and as a training step (forward and all
gradients). Numbers are medians in microseconds of one thread's CPU time, with the ratio to torch's time in the same
round in brackets. The goal is that a forward call takes at most 25 microseconds more than torch's.

Run: python benchmarks/per_call.py [--rounds 200] [--tokens 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from side_by_side import by_turns, ratios_by_round
from torch import Tensor
from torch.nn import functional

from whereformer import OffsetBias, OffsetKeys, OffsetValues, attention
from whereformer.provenance import write_results

HEADS, HEAD_DIM = 12, 64
CALLS = 20
"""Calls in a row in each round."""

Step = Callable[[], object]


def steps(tokens: int, training: bool) -> dict[str, Step]:
    """Return the calls to time, torch's attention first. Terms are made anew in each call, as a model does."""
    shape = 1, HEADS, tokens, HEAD_DIM
    query, key, value = content = [torch.randn(shape, requires_grad=training) for _ in range(3)]
    table = torch.randn(HEADS, 2 * tokens - 1, requires_grad=training)
    key_table, value_table = vectors = [torch.randn(1, 33, HEAD_DIM, requires_grad=training) for _ in range(2)]
    seed = torch.randn(shape)

    def step(compute: Callable[[], Tensor], inputs: list[Tensor]) -> Step:
        if training:
            return lambda: torch.autograd.grad(compute(), inputs, seed)
        return torch.no_grad()(compute)

    def biased(backend: str) -> Step:
        def compute() -> Tensor:
            return attention(query, key, value, [OffsetBias(table, 1 - tokens)], backend=backend)

        return step(compute, [*content, table])

    def shaw() -> Tensor:
        return attention(query, key, value, [OffsetKeys(key_table, -16), OffsetValues(value_table, -16)])

    return {
        "torch": step(lambda: functional.scaled_dot_product_attention(query, key, value), content),
        "no terms": step(lambda: attention(query, key, value), content),
        "a bias": biased("auto"),
        "Shaw, keys and values": step(shaw, [*content, *vectors]),
        "a bias, blockwise": biased("blockwise"),
    }


def microseconds(step: Step) -> float:
    gc.disable()
    started = time.process_time()
    for _ in range(CALLS):
        step()
    seconds = time.process_time() - started
    gc.enable()
    return seconds / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for mode in ("forward", "training"):
        calls = {name: partial(microseconds, step) for name, step in steps(options.tokens, mode == "training").items()}
        costs = by_turns(calls, options.rounds)
        for name, ratios in ratios_by_round(costs, "torch").items():
            row = {"us": statistics.median(costs[name]), "ratio": statistics.median(ratios)}
            results.setdefault(name, {})[mode] = row
    print(f"{'microseconds a call':24} {'forward':>15} {'training':>15}")
    for name, modes in results.items():
        cells = (f"{row['us']:,.0f} ({row['ratio']:.1f})" for row in modes.values())
        print(f"{name:24} " + " ".join(f"{cell:>15}" for cell in cells))
    print(f"{'goal':24} {results['torch']['forward']['us'] + 25:11,.0f}")
    if options.out is not None:
        write_results(options.out, {"tokens": options.tokens, "rounds": options.rounds, "calls": results})


if __name__ == "__main__":
    main()
