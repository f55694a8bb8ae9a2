"""Time the two-dimensional bias of images next to torch's attention with the bias gathered for every pair of patches.

Each case is a batch of windows or images of ``height x width`` patches. "listed" is ``attention`` with the positions
``y * (2 * width - 1) + x`` and Swin's table as an ``OffsetBias``; "dense" is torch's attention with the bias that Swin
gathers by its index; "none" is torch's attention without positions. Training has all gradients, the table's too. The
ways take turns; numbers are medians of the CPU time of one thread, and of its ratio to "dense" within a round.

Run: python benchmarks/images.py [--cases 64x4x7x7x32,...] [--rounds 15] [--out FILE], a case is
    batch x heads x height x width x head_dim
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark import Benchmark, main
from rich.console import Console
from side_by_side import time_by_turns
from torch.nn.functional import scaled_dot_product_attention

from whereformer import OffsetBias, attention
from whereformer.lab.recipe import Names

CASES = (
    *("64x4x7x7x32", "16x4x12x12x32", "4x12x14x14x64"),
    *("2x12x24x24x64", "1x4x32x32x64", "1x2x64x64x64"),
)
"""Windows of Swin, images of BEiT (224 and 384 pixels), and larger ones."""


class Case:
    """The tensors of a case, and the ways to compute it."""

    def __init__(self, sizes: str) -> None:
        batch, heads, height, width, head_dim = map(int, sizes.split("x"))
        row = 2 * width - 1
        self.positions = (torch.arange(height)[:, None] * row + torch.arange(width)).flatten()
        self.reach = (height - 1) * row + width - 1
        self.index = self.positions[:, None] - self.positions + self.reach
        shape = batch, heads, height * width, head_dim
        self.content = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        self.table = torch.randn(2 * self.reach + 1, heads, requires_grad=True)
        self.d_output = torch.randn(shape)

    def listed(self) -> torch.Tensor:
        bias = OffsetBias(self.table.T.flip(1), first=-self.reach)
        query, key, value = self.content
        return attention(query, key, value, [bias], query_positions=self.positions, key_positions=self.positions)

    def dense(self) -> torch.Tensor:
        bias = self.table[self.index.view(-1)].view(*self.index.shape, -1).permute(2, 0, 1).contiguous()
        query, key, value = self.content
        return scaled_dot_product_attention(query, key, value, attn_mask=bias.unsqueeze(0))

    def none(self) -> torch.Tensor:
        query, key, value = self.content
        return scaled_dot_product_attention(query, key, value)

    def step(self, way: str, training: bool) -> None:
        with torch.set_grad_enabled(training):
            output: torch.Tensor = getattr(self, way)()
        if training:
            output.backward(self.d_output)
            for tensor in (*self.content, self.table):
                tensor.grad = None


@dataclass(frozen=True, kw_only=True)
class Images(Benchmark):
    """Time the bias of images relative to torch's attention with a dense bias."""

    cases: Names = CASES
    """batch x heads x height x width x head_dim each."""
    rounds: int = 15
    """How many times each way is timed."""
    out: Path = Path("runs/images.json")

    def measure(self, console: Console) -> dict[str, Any]:
        torch.manual_seed(0)
        rows = []
        for sizes in self.cases:
            case = Case(sizes)
            torch.testing.assert_close(case.listed(), case.dense(), rtol=1e-4, atol=1e-4)
            for direction in ("forward", "training"):
                steps = {way: partial(case.step, way, direction == "training") for way in ("dense", "listed", "none")}
                times = time_by_turns(steps, self.rounds, "dense")
                seconds = {way: measured.seconds for way, measured in times.items()}
                ratios = {way: measured.ratio for way, measured in times.items()}
                rows.append({"case": sizes, "direction": direction, "seconds": seconds, "ratios": ratios})
                cells = " | ".join(f"{1e3 * seconds[way]:.1f} ms, {ratios[way]:.2f}" for way in steps)
                print(f"| {sizes} | {direction} | {cells} |", flush=True)
        return {"rounds": self.rounds, "rows": rows}


if __name__ == "__main__":
    main(Images)
