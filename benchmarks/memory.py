"""Measure how much memory attention takes, by the size of the process, and whether it grows with varying lengths.

First, what a training step at 8192 tokens adds to the process at its peak, in a process of its own each: 1 sequence, 12
heads of 64. The goal is at most 10% more than torch's attention without positions. Then 1,000 training steps of
different lengths, up to 1,000 tokens: how much the process has grown since the first 100, which have the longest
sequences. Attention is measured by itself, and in an encoder of two layers of width 64, beside the same BERT of
transformers. The C library keeps what was freed in between, so what is held is measured too: the growth after it has
returned (malloc_trim) what nobody uses.

Run: python benchmarks/memory.py [--length 8192] [--steps 1000] [--out FILE]
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from attention_kinds import Case, make_problem
from attention_ways import FLOOR, backend, make_step
from peak import added_memory, answer, in_a_process, mebibytes
from transformers import BertConfig, BertForMaskedLM

from whereformer import EncoderConfig, EncoderForMaskedLM
from whereformer.provenance import write_results

DTYPES = "float32", "bfloat16"
WAYS = {"torch": (FLOOR, "none")} | {kind: (backend("auto"), kind) for kind in ("none", "bias", "t5", "shaw")}
"""The ways, with the kind of terms that each computes."""

GROWING = {"torch": "torch", "bias": "bias", "encoder": "encoder, shaw", "bert": "transformers' BERT"}
"""What is measured over many lengths, and its label."""

WARM = 100
"""Steps before growth is measured."""


def peak(way: str, dtype: str, length: int) -> float:
    """Return what a training step adds to the process at its peak, in MiB, its gradients included."""
    kind = WAYS[way][1]

    def step(n: int) -> Callable[[], object]:
        return make_step(WAYS[way][0], make_problem(Case(kind, n, 1, 12, 64, dtype, "training"), torch.device("cpu")))

    step(64)()  # loads what is loaded once
    return added_memory(step(length))


def growth(what: str, dtype: str, steps: int, held: bool) -> float:
    """Return how much the process grows in steps of different lengths, in MiB: all, or what is held."""
    trim = ctypes.CDLL("libc.so.6").malloc_trim if held else (lambda _: None)
    train = _model(what, dtype) if what in ("encoder", "bert") else _attention(what, dtype)
    lengths = torch.randperm(steps).add(1).tolist()
    lengths.sort(key=lambda n: n <= steps - WARM // 2)  # the longest first
    for index, n in enumerate(lengths):
        train(n)
        if index + 1 == min(WARM, steps):
            trim(0)
            before = mebibytes("VmRSS")
    trim(0)
    return mebibytes("VmRSS") - before


def _attention(way: str, dtype: str) -> Callable[[int], object]:
    def train(n: int) -> object:
        return make_step(
            WAYS[way][0], make_problem(Case(WAYS[way][1], n, 1, 2, 64, dtype, "training"), torch.device("cpu"))
        )()

    return train


def _model(what: str, dtype: str) -> Callable[[int], object]:
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    if what == "bert":
        model = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=1000))
    else:
        model = EncoderForMaskedLM(EncoderConfig(**sizes, blocks="2", position="shaw"))

    def train(n: int) -> None:
        ids = torch.randint(100, (1, n))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    given = parser.parse_args()
    print(f"{f'MiB of training at {given.length}':28} {'float32':>10} {'bfloat16':>10}")
    peaks = {way: {dtype: in_a_process(peak, way, dtype, given.length) for dtype in DTYPES} for way in WAYS}
    for name, found in peaks.items():
        print(f"{name:28} " + " ".join(f"{size:10.0f}" for size in found.values()))
    print(f"{'goal':28} " + " ".join(f"{1.1 * size:10.0f}" for size in peaks["torch"].values()))
    print(f"MiB of growth over {given.steps} lengths")
    grown = {
        what: {
            f"{dtype}{', held' * held}": in_a_process(growth, what, dtype, given.steps, held)
            for dtype in DTYPES
            for held in (False, True)
        }
        for what in GROWING
    }
    print(f"{'':28} " + " ".join(f"{column:>15}" for column in grown["torch"]))
    for name, found in grown.items():
        print(f"{GROWING[name]:28} " + " ".join(f"{size:15.1f}" for size in found.values()))
    if given.out is not None:
        write_results(given.out, {"length": given.length, "steps": given.steps, "peak_mib": peaks, "growth_mib": grown})


if __name__ == "__main__":
    answer(peak, growth)
    main()
