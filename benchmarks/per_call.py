"""Measure the overhead of an attention call with almost nothing to compute: 1 sequence, 4 tokens, 12 heads of 64.

Torch's attention and ours are timed in turns, in float32 unless said otherwise, without gradients and as a training
step (forward and all gradients). Numbers are medians in microseconds of one thread's CPU time, with the ratio to
torch's time in the same round in brackets. The goal is that a forward call takes at most 25 microseconds more than
torch's; other calls have goals of their own, which count for a processor on which torch's takes 8.

With more keys than tokens the calls are those of generation: the queries are the last tokens, and there is no training.

Run: python benchmarks/per_call.py [--rounds 200] [--tokens 4] [--keys 4] [--dtype float32] [--out FILE]
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

from whereformer import OffsetBias, OffsetKeys, OffsetValues, Positions, attention, attention_varlen
from whereformer.provenance import provenance, write_results

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


def steps(tokens: int, keys: int, dtype: torch.dtype, training: bool) -> dict[str, Step]:
    """Return the calls to time, torch's attention first. Terms are made anew in each call, as a model does."""
    query, key, value = content = [
        torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype, requires_grad=training) for length in (tokens, keys, keys)
    ]
    positions: dict[str, Any] = {
        "query_positions": Positions(keys - tokens, 1, tokens),
        "key_positions": Positions(0, 1, keys),
    }
    table = torch.randn(HEADS, 2 * keys - 1, requires_grad=training)
    key_table, value_table = vectors = [torch.randn(1, 33, HEAD_DIM, requires_grad=training) for _ in range(2)]
    seed = torch.randn(1, HEADS, tokens, HEAD_DIM, dtype=dtype)

    def step(compute: Callable[[], Tensor], inputs: list[Tensor]) -> Step:
        if training:
            return lambda: torch.autograd.grad(compute(), inputs, seed)
        return torch.no_grad()(compute)

    def biased(backend: str) -> Step:
        def compute() -> Tensor:
            return attention(query, key, value, [OffsetBias(table, 1 - keys)], backend=backend, **positions)

        return step(compute, [*content, table])

    def shaw() -> Tensor:
        return attention(query, key, value, [OffsetKeys(key_table, -16), OffsetValues(value_table, -16)], **positions)

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
    parser.add_argument("--keys", type=int, help="at least as many as tokens; default: as many")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keys = given.tokens if given.keys is None else given.keys
    if keys < given.tokens:
        parser.error(f"--keys: expected at least --tokens {given.tokens}, got {keys}")
    modes = {"forward": False} if keys > given.tokens else {"forward": False, "training": True}
    origin = provenance()
    print(f"{origin['machine']['cpu']}, {origin['machine']['instructions']}, commit {origin['commit']}, {given.dtype}")
    header = " ".join(f"{mode:>15}" for mode in modes)
    print(f"{'microseconds / call':24} {header}" + (f" {'goal, forward':>15}" if keys == given.tokens else ""))
    cells: dict[str, list[str]] = {}
    results: dict[str, dict[str, Any]] = {}
    for mode, training in modes.items():
        timed = steps(given.tokens, keys, getattr(torch, given.dtype), training)
        for step in timed.values():
            microseconds(step)  # the first calls compile and fill caches
        gc.disable()
        rounds = [{name: microseconds(step) for name, step in timed.items()} for _ in range(given.rounds)]
        gc.enable()
        for name in timed:
            ratio = statistics.median(times[name] / times["torch"] for times in rounds)
            median = statistics.median(times[name] for times in rounds)
            cells.setdefault(name, []).append(f"{median:,.0f} ({ratio:.1f})")
            results.setdefault(name, {})[mode] = {"us": median, "ratio": ratio}
    torchs = results["torch"]["forward"]["us"]
    for name, found in cells.items():
        goal = GOALS[name] * torchs / 8 if name in GOALS else torchs + 25
        row = f"{name:24} " + " ".join(f"{cell:>15}" for cell in found)
        print(row + (f" {goal:15,.0f}" if keys == given.tokens else ""))
    if given.out is not None:
        sizes = {"tokens": given.tokens, "keys": keys, "dtype": given.dtype}
        write_results(given.out, {**sizes, "rounds": given.rounds, "calls": results})


if __name__ == "__main__":
    main()
