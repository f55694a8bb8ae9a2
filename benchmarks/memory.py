"""Measure how much memory attention takes, by the size of the process, and whether it grows with varying lengths.

First, the memory that a training step at 8192 tokens adds to the process at its peak, in a process for each way: 1
sequence, 12 heads of 64. The goal is at most 10% more than torch's attention without positions. Then 1,000 training
steps of different lengths, up to 1,000 tokens: how much the process has grown since the first 100, which have the
longest sequences. Attention is measured by itself, and in an encoder of two layers of width 64, next to the same BERT
of transformers. The C library keeps freed memory in between, so held memory is measured too: the growth after it has
returned (malloc_trim) all unused memory.

Run: python benchmarks/memory.py [--length 8192] [--steps 1000] [--out FILE]
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention_kinds import Case, make_problem
from attention_ways import FLOOR, backend, make_step
from benchmark import Benchmark, main
from parts import in_a_process
from peak import added_memory, mebibytes
from rich.console import Console
from transformers import BertConfig, BertForMaskedLM

from whereformer import EncoderConfig, EncoderForMaskedLM

DTYPES = "float32", "bfloat16"
WAYS = {"torch": (FLOOR, "none")} | {kind: (backend("auto"), kind) for kind in ("none", "bias", "t5", "shaw")}
"""The ways, with the kind of terms that each computes."""
GROWING = {"torch": "torch", "bias": "bias", "encoder": "encoder, shaw", "bert": "transformers' BERT"}
"""The subjects that are measured over many lengths, and their labels."""
WARM = 100
"""Steps before growth is measured."""


def training_step(way: str, dtype: str, length: int, heads: int) -> Callable[[], object]:
    """Return a training step of attention."""
    case = Case(WAYS[way][1], length, 1, heads, 64, dtype, "training")
    return make_step(WAYS[way][0], make_problem(case))


def peak(way: str, dtype: str, length: int) -> float:
    """Return the memory that a training step adds to the process at its peak, in MiB, its gradients included."""
    training_step(way, dtype, 64, 12)()  # loads everything that is loaded once
    return added_memory(training_step(way, dtype, length, 12))


def growth(subject: str, dtype: str, steps: int, held: bool) -> float:
    """Return how much the process grows in steps of different lengths, in MiB: all, or only held memory."""
    trim = ctypes.CDLL("libc.so.6").malloc_trim if held else (lambda _: None)
    model = _model(subject) if subject in ("encoder", "bert") else None
    lengths = torch.randperm(steps).add(1).tolist()
    lengths.sort(key=lambda n: n <= steps - WARM // 2)  # the longest first
    for index, n in enumerate(lengths):
        if model is None:
            training_step(subject, dtype, n, 2)()
        else:
            ids = torch.randint(100, (1, n))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = model(ids, labels=ids).loss
            loss.backward()
            model.zero_grad()
        if index + 1 == min(WARM, steps):
            trim(0)
            before = mebibytes("VmRSS")
    trim(0)
    return mebibytes("VmRSS") - before


def _model(subject: str) -> Any:
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    if subject == "bert":
        return BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=1000))
    return EncoderForMaskedLM(EncoderConfig(**sizes, blocks="2", position="shaw"))


@dataclass(frozen=True, kw_only=True)
class Memory(Benchmark):
    """Measure the memory of training steps, and its growth over many lengths."""

    length: int = 8192
    """Tokens of the step whose peak is measured."""
    steps: int = 1000
    """Steps of different lengths."""
    out: Path = Path("runs/memory.json")

    def measure(self, console: Console) -> dict[str, Any]:
        print(f"{f'MiB of training at {self.length}':28} {'float32':>10} {'bfloat16':>10}")
        peaks = {way: {dtype: in_a_process(peak, way, dtype, self.length) for dtype in DTYPES} for way in WAYS}
        for name, sizes in peaks.items():
            print(f"{name:28} " + " ".join(f"{size:10.0f}" for size in sizes.values()))
        print(f"{'goal':28} " + " ".join(f"{1.1 * size:10.0f}" for size in peaks["torch"].values()))
        print(f"MiB of growth over {self.steps} lengths")
        columns = {f"{dtype}{', held' * held}": (dtype, held) for dtype in DTYPES for held in (False, True)}
        print(f"{'':28} " + " ".join(f"{column:>15}" for column in columns), flush=True)
        grown = {}
        for name, label in GROWING.items():
            grown[name] = {
                column: in_a_process(growth, name, dtype, self.steps, held) for column, (dtype, held) in columns.items()
            }
            print(f"{label:28} " + " ".join(f"{size:15.1f}" for size in grown[name].values()), flush=True)
        return {**self.settings(), "peak_mib": peaks, "growth_mib": grown}


if __name__ == "__main__":
    main(Memory)
