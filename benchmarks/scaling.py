"""Measure how training scales from one process to two.

Run: .venv/bin/python benchmarks/scaling.py [--rounds 9]

Two processes use one thread and the same number of rows each, and gloo as commands do on the CPU. In every round, the
first process trains alone, then both train without exchanging anything, then both train one model with DDP, and then
they only add up tensors of the size of the gradients. Writes a JSON file.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from whereformer import EncoderConfig, EncoderForMaskedLM, ranks
from whereformer.analysis import count_parameters
from whereformer.cli.main import execute
from whereformer.lab.optimizer import build_optimizer
from whereformer.provenance import write_results

PROCESSES = 2


@dataclass(frozen=True)
class Scaling:
    """Measure tokens per second of one process and of two."""

    blocks: str = "4"
    """Layers."""
    hidden_size: int = 256
    """Width of the encoder."""
    position: str = "tisa"
    """Position method."""
    length: int = 128
    """Tokens in a row."""
    batch_size: int = 8
    """Rows of each process in a step."""
    steps: int = 4
    """Steps in each part of a round."""
    rounds: int = 9
    """Number of rounds. The first one does not count."""
    out: Path = Path("runs/scaling.json")
    """File for the results."""

    @property
    def config(self) -> EncoderConfig:
        return EncoderConfig(
            vocab_size=4096,
            hidden_size=self.hidden_size,
            num_attention_heads=4,
            blocks=self.blocks,
            position=self.position,
            max_position_embeddings=self.length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            type_vocab_size=0,
        )

    def run(self, console: Console) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as chosen:
            chosen.bind(("localhost", 0))
            port = chosen.getsockname()[1]
            chosen.close()
            multiprocessing.spawn(_measure, (self, port, Path(folder)), nprocs=PROCESSES)
            seconds = json.loads((Path(folder) / "seconds.json").read_text())
        middle = {name: statistics.median(found[1:]) for name, found in seconds.items()}
        tokens = self.batch_size * self.length
        speedups = [2 * alone / two for alone, two in zip(seconds["alone"], seconds["together"], strict=True)][1:]
        parameters = count_parameters(self.config).total
        results = {
            "settings": {name: value for name, value in vars(self).items() if name != "out"},
            "parameters": parameters,
            "seconds": seconds,
            "tokens_per_second": {"one": tokens / middle["alone"], "two": 2 * tokens / middle["together"]},
            "speedup": {"median": statistics.median(speedups), "low": min(speedups), "high": max(speedups)},
            # A ring of two sends as many bytes as there are.
            "bandwidth": 4 * parameters / middle["adding up"],
        }
        write_results(self.out, results)
        speed = results["tokens_per_second"]
        console.print(
            f"one process: {speed['one']:,.0f} tokens/s; two: {speed['two']:,.0f}, "
            f"{results['speedup']['median']:.2f} times ({min(speedups):.2f}-{max(speedups):.2f} over rounds)\n"
            f"a step of two: {1e3 * middle['together']:.0f} ms, {1e3 * middle['side by side']:.0f} ms without DDP; "
            f"gloo {results['bandwidth'] / 1e9:.2f} GB/s\nwrote {self.out}",
            highlight=False,
        )


def _measure(rank: int, settings: Scaling, port: int, folder: Path) -> None:
    """Measure all rounds in one of the processes; the first one saves the seconds of a step in each part."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    ranks.join(torch.device("cpu"))
    seconds = _seconds(settings)
    if ranks.is_main():
        (folder / "seconds.json").write_text(json.dumps(seconds))
    ranks.wait()
    ranks.leave()


def _seconds(settings: Scaling) -> dict[str, list[float]]:
    """Return the seconds of a step in each part, one number per round."""
    rank = ranks.rank()
    alone, shared = (_step(settings, rank, ddp=ddp) for ddp in (False, True))
    gradients = torch.zeros(count_parameters(settings.config).total)
    parts: dict[str, Callable[[], Any]] = {
        "alone": alone if rank == 0 else lambda: None,
        "side by side": alone,
        "together": shared,
        "adding up": lambda: distributed.all_reduce(gradients),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(settings.rounds):
        for name, part in parts.items():
            distributed.barrier()
            started = time.perf_counter()
            for _ in range(settings.steps):
                part()
            if name != "alone":
                # A step is done when both processes have done it.
                distributed.barrier()
            seconds[name].append((time.perf_counter() - started) / settings.steps)
    return seconds


def _step(settings: Scaling, rank: int, *, ddp: bool) -> Callable[[], Tensor]:
    """Return a training step on fixed rows."""
    torch.manual_seed(0)
    model = EncoderForMaskedLM(settings.config)
    trained: nn.Module = DistributedDataParallel(model) if ddp else model
    optimizer = build_optimizer(model, 1e-4)
    generator = torch.Generator().manual_seed(rank)
    words = torch.randint(0, 4096, (settings.batch_size, settings.length), generator=generator)

    def step() -> Tensor:
        loss: Tensor = trained(words, labels=words).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    execute(tyro.cli(Scaling))
