"""Measure the overhead of an attention call with almost nothing to compute: 1 sequence, 4 tokens, 12 heads of 64.

Torch's attention and ours are timed in turns, in float32 unless said otherwise, without gradients and as a training
step (forward and all gradients). Numbers are medians in microseconds of one thread's CPU time, with the ratio to
torch's time in the same round in brackets. The goal is that a forward call takes at most 25 microseconds more than
torch's; other calls have goals of their own, which count for a processor on which torch's takes 8.

Run: python benchmarks/per_call.py [--rounds 200] [--tokens 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whereformer import OffsetBias, OffsetKeys, OffsetValues, attention, attention_varlen
from whereformer.provenance import machine, write_results

HEADS, HEAD_DIM = 12, 64
CALLS = 20
"""Calls in a row in each round."""

GOALS = {
    "a bias in bfloat16": 30,
    "two biases": 60,
    "three sequences, varlen": 150,
    "one tensor as all three": 30,
    "one query, 100 keys": 20,
}
"""The most microseconds of a forward call."""

Step = Callable[[], object]


def steps(tokens: int, training: bool) -> dict[str, Step]:
    """Return the calls to time, torch's attention first. Terms are made anew in each call, as a model does."""
    query, key, value = content = [torch.randn(1, HEADS, tokens, HEAD_DIM, requires_grad=training) for _ in range(3)]
    table = torch.randn(HEADS, 2 * tokens - 1, requires_grad=training)
    keys, values = vectors = [torch.randn(1, 33, HEAD_DIM, requires_grad=training) for _ in range(2)]
    seed = torch.randn(1, HEADS, tokens, HEAD_DIM)

    def step(compute: Callable[[], Tensor], inputs: list[Tensor]) -> Step:
        if training:
            return lambda: torch.autograd.grad(compute(), inputs, seed)
        return torch.no_grad()(compute)

    def biased(backend: str) -> Step:
        return step(
            lambda: attention(query, key, value, [OffsetBias(table, 1 - tokens)], backend=backend), [*content, table]
        )

    def shaw() -> Tensor:
        return attention(query, key, value, [OffsetKeys(keys, -16), OffsetValues(values, -16)])

    second = torch.randn(HEADS, 3, requires_grad=training)
    halves = [tensor.detach().bfloat16().requires_grad_(training) for tensor in (*content, table)]
    packed = [torch.randn(3 * tokens, HEADS, HEAD_DIM, requires_grad=training) for _ in range(3)]
    ends = torch.arange(0, 3 * tokens + 1, tokens)
    one, many = (torch.randn(1, HEADS, n, HEAD_DIM, requires_grad=training) for n in (1, 100))

    def half() -> Tensor:
        rows, keys, values, numbers = halves
        return attention(rows, keys, values, [OffsetBias(numbers, 1 - tokens)]).float()

    def twice() -> Tensor:
        return attention(query, key, value, [OffsetBias(table, 1 - tokens), OffsetBias(second, -1)])

    def varlen() -> Tensor:
        rows, keys, values = packed
        output: Tensor = attention_varlen(rows, keys, values, cu_seqlens_q=ends)
        return output[:tokens].transpose(0, 1).unsqueeze(0)

    return {
        "torch": step(lambda: functional.scaled_dot_product_attention(query, key, value), content),
        "no terms": step(lambda: attention(query, key, value), content),
        "a bias": biased("auto"),
        "Shaw, keys and values": step(shaw, [*content, *vectors]),
        "a bias, blockwise": biased("blockwise"),
        "a bias in bfloat16": step(half, halves),
        "two biases": step(twice, [*content, table, second]),
        "three sequences, varlen": step(varlen, packed),
        "one tensor as all three": step(
            lambda: attention(query, query, query, [OffsetBias(table, 1 - tokens)]), [query, table]
        ),
        "one query, 100 keys": step(lambda: attention(one, many, many).expand(-1, -1, tokens, -1), [one, many]),
    }


def microseconds(step: Step) -> float:
    started = time.process_time()
    for _ in range(CALLS):
        step()
    return (time.process_time() - started) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(machine(torch.device("cpu"))["cpu"])
    print(f"{'microseconds / call':24} {'forward':>15} {'training':>15} {'goal, forward':>15}")
    cells: dict[str, list[str]] = {}
    results: dict[str, dict[str, Any]] = {}
    for training in (False, True):
        timed = steps(given.tokens, training)
        for step in timed.values():
            microseconds(step)  # the first calls compile and fill caches
        gc.disable()
        rounds = [{name: microseconds(step) for name, step in timed.items()} for _ in range(given.rounds)]
        gc.enable()
        for name in timed:
            ratio = statistics.median(times[name] / times["torch"] for times in rounds)
            median = statistics.median(times[name] for times in rounds)
            cells.setdefault(name, []).append(f"{median:,.0f} ({ratio:.1f})")
            results.setdefault(name, {})["training" if training else "forward"] = {"us": median, "ratio": ratio}
    torchs = results["torch"]["forward"]["us"]
    for name, found in cells.items():
        goal = GOALS[name] * torchs / 8 if name in GOALS else torchs + 25
        print(f"{name:24} " + " ".join(f"{cell:>15}" for cell in found) + f" {goal:15,.0f}")
    if given.out is not None:
        write_results(given.out, {"tokens": given.tokens, "rounds": given.rounds, "calls": results})


if __name__ == "__main__":
    main()
