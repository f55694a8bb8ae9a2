"""Measure how much another seed changes the gap between two methods. The ranking's ``SEED_NOISE`` comes from this.

Run ``whereformer compare --seeds 2`` (or more) first, then: python benchmarks/seed_noise.py runs/compare

For every pair of methods it takes the difference of their held-out losses with each seed. It prints the standard
deviation of these differences over seeds, pooled over all pairs, and twice that, which a gap with one seed must exceed.
"""

import statistics
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import ClassVar

from benchmark import main
from rich.console import Console

from whereformer.errors import InputError
from whereformer.lab.recipe import WithPlugin
from whereformer.recipes.compare import load


@dataclass(frozen=True, kw_only=True)
class SeedNoise(WithPlugin):
    """Print the gaps between methods with each seed, and their standard deviation over seeds."""

    FLAGS: ClassVar = {"folder": "FOLDER"}

    folder: Path
    """Folder of `whereformer compare`."""

    def run(self, console: Console) -> None:
        _, methods = load(self.folder)
        losses = {name: {seed: run.loss for seed, run in runs.items()} for name, runs in methods.items()}
        variances = []
        for first, second in combinations(losses, 2):
            gaps = [losses[first][seed] - losses[second][seed] for seed in losses[first] if seed in losses[second]]
            if len(gaps) > 1:
                variances.append(statistics.variance(gaps))
                print(f"{first:>14} - {second:<14} " + "  ".join(f"{gap:+.3f}" for gap in gaps))
        if not variances:
            raise InputError("folder", "expected results of at least two methods with two seeds")
        noise = statistics.fmean(variances) ** 0.5
        print(f"standard deviation of a gap over seeds: {noise:.3f} nats; twice that: {2 * noise:.3f}")


if __name__ == "__main__":
    main(SeedNoise)
