"""Time attention with positions on a grid: a ViT's image, SAM's image and Swin's windows.

Each is computed with ``OffsetBias2d``, with a dense bias gathered from the same table and given to torch's
``scaled_dot_product_attention``, with that bias gathered beforehand (which no training can do), and by torch without
positions. SAM's is also computed with its own decomposed positions: by ``decomposed_offset_keys``, and as a dense bias
for torch, as transformers does it. Numbers are milliseconds of one thread's CPU time in
float32, the median of all rounds, without gradients and as a training step (forward and all gradients). Ways with the
same parameters must give the same output and gradients.

Run: python benchmarks/grid.py [--cases vit,swin,sam] [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whereformer import GridPositions, OffsetBias2d, attention, decomposed_offset_keys
from whereformer.lab.provenance import write_results


@dataclass(frozen=True)
class Case:
    """The sizes of a batch of images or windows; ``side`` x ``side`` tokens after ``prefix`` others."""

    batch: int
    heads: int
    head_dim: int
    side: int
    prefix: int = 0
    decomposed: bool = False


CASES = {
    "tiny": Case(2, 2, 16, 3, 1, True),
    "vit": Case(8, 12, 64, 14, 1),
    "vit384": Case(2, 12, 64, 24, 1),
    "swin": Case(512, 3, 32, 7),
    "sam": Case(1, 12, 64, 64, 0, True),
}


class Problem:
    """A case with its tensors, and the ways to compute it."""

    def __init__(self, case: Case) -> None:
        self.case, self.grid = case, GridPositions(case.side, case.side, case.prefix)
        size = case.batch, case.heads, self.grid.length, case.head_dim
        self.query, self.key, self.value = (torch.randn(size, requires_grad=True) for _ in range(3))
        offsets = 2 * case.side - 1
        self.table = torch.randn(case.heads, offsets, offsets, requires_grad=True)
        self.vectors = [(torch.randn(1, offsets, case.head_dim) / 8).requires_grad_() for _ in range(2)]
        self.seed = torch.randn(size)
        cell = torch.arange(case.side**2)
        row, column = ((part[None] - part[:, None]) for part in (cell // case.side, cell % case.side))
        # A model could keep these.
        self.index = (row + case.side - 1) * offsets + column + case.side - 1

    def ours(self) -> Tensor:
        first = 1 - self.case.side
        term = OffsetBias2d(self.table, (first, first), self.grid, self.grid)
        return attention(self.query, self.key, self.value, [term])

    def dense_bias(self) -> Tensor:
        prefix = self.case.prefix
        return functional.pad(self.table.flatten(1)[:, self.index], (prefix, 0, prefix, 0)).unsqueeze(0)

    def gathered(self) -> Tensor:
        return functional.scaled_dot_product_attention(self.query, self.key, self.value, self.dense_bias())

    def decomposed(self) -> Tensor:
        first = 1 - self.case.side
        term = decomposed_offset_keys(self.query, *self.vectors, (first, first), self.grid, self.grid)
        return attention(self.query, self.key, self.value, [term])

    def decomposed_bias(self) -> Tensor:
        """As in ``SamVisionSdpaAttention``."""
        side = self.case.side
        lines = torch.arange(side)[None] - torch.arange(side)[:, None] + side - 1
        rows, columns = (vectors[0][lines] for vectors in self.vectors)
        cells = self.query[:, :, self.case.prefix :].unflatten(2, (side, side))
        by_row = torch.einsum("bhrcd,rkd->bhrck", cells, rows).unsqueeze(-1)
        bias = by_row + torch.einsum("bhrcd,ckd->bhrck", cells, columns).unsqueeze(-2)
        before = self.case.prefix
        bias = functional.pad(bias.flatten(4).flatten(2, 3), (before, 0, before, 0))
        return functional.scaled_dot_product_attention(self.query, self.key, self.value, bias)

    def ways(self) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
        """Return each way with the tensors that get a gradient."""
        content = [self.query, self.key, self.value]
        with torch.no_grad():
            bias = self.dense_bias()

        def given() -> Tensor:
            return functional.scaled_dot_product_attention(self.query, self.key, self.value, bias)

        def nothing() -> Tensor:
            return functional.scaled_dot_product_attention(self.query, self.key, self.value)

        ways = {
            "OffsetBias2d": (self.ours, [*content, self.table]),
            "torch, bias gathered": (self.gathered, [*content, self.table]),
            "torch, bias given": (given, content),
            "torch, no positions": (nothing, content),
        }
        if self.case.decomposed:
            ways["decomposed_offset_keys"] = (self.decomposed, [*content, *self.vectors])
            ways["torch, decomposed bias"] = (self.decomposed_bias, [*content, *self.vectors])
        return ways

    def check(self) -> None:
        """Raise unless ours give what torch's with the same parameters do."""
        ways = self.ways()
        for pair in (("OffsetBias2d", "torch, bias gathered"), ("decomposed_offset_keys", "torch, decomposed bias")):
            found = []
            for compute, inputs in (ways[name] for name in pair if name in ways):
                out = compute()
                found.append([out.detach(), *torch.autograd.grad(out, inputs, self.seed)])
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def milliseconds(step: Callable[[], Any]) -> float:
    started = time.process_time()
    step()
    return (time.process_time() - started) * 1e3


def times(problem: Problem, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median time of each way, forward and training."""
    ways = problem.ways()
    found: dict[str, dict[str, float]] = {name: {} for name in ways}
    for training in (False, True):
        steps: dict[str, Callable[[], Any]] = {}
        for name, (compute, inputs) in ways.items():
            if training:
                steps[name] = lambda compute=compute, inputs=inputs: torch.autograd.grad(
                    compute(), inputs, problem.seed
                )
            else:
                steps[name] = torch.no_grad()(compute)
        for step in steps.values():
            step()  # the first call fills caches
        taken = [{name: milliseconds(step) for name, step in steps.items()} for _ in range(rounds)]
        for name in steps:
            found[name]["training" if training else "forward"] = statistics.median(each[name] for each in taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", default="vit,vit384,swin,sam", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results = {}
    for name in given.cases.split(","):
        problem = Problem(CASES[name])
        problem.check()
        results[name] = times(problem, given.rounds)
        print(f"{name + ', ms':28} {'forward':>10} {'training':>10}")
        for way, found in results[name].items():
            print(f"{way:28} {found['forward']:10,.1f} {found['training']:10,.1f}", flush=True)
    if given.out is not None:
        write_results(given.out, {"rounds": given.rounds, "cases": results})


if __name__ == "__main__":
    main()
