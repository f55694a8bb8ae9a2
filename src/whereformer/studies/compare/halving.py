"""Successive halving: which methods go on to the next seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from .ranking import clearly_better
from .results import Run


def survivors(runs: Mapping[str, Mapping[int, Run]]) -> list[str]:
    """Return the methods to go on with: the better half, and every method that can't be told apart from one of them.

    Every method that goes on is clearly better than every method that is dropped.

    Args:
        runs: the runs of each method so far, by seed.
    """
    losses = {
        name: statistics.fmean(statistics.fmean(run.window_losses) for run in by_seed.values())
        for name, by_seed in runs.items()
    }
    order = sorted(runs, key=losses.__getitem__)
    kept = order[: (len(order) + 1) // 2]
    # A method that is kept may in turn be like another one.
    for name in kept:
        kept += [rival for rival in order if rival not in kept and not clearly_better(runs[name], runs[rival])]
    return [name for name in runs if name in kept]
