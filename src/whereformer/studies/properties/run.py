"""Measure Table 1 of the TISA paper: what each position method of a comparison can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ...analysis import properties as measure
from ...data.masks import HeldOut
from ...lab.encoders import BASELINE
from ...lab.jobs import spread
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...positions import Position, build_position
from ..compare.models import untrained
from .comparison import Comparison
from .results import Measured, PropertiesResults, Shift
from .ticks import THRESHOLDS, MethodTicks, judge

DEFAULT_STEPS = 800
QUICK_STEPS = 200
WINDOWS = 16
"""Windows of held-out text that measurements of a trained model use."""


def measure_properties(
    comparison: Comparison, positions: Sequence[str], out: Path, progress: Progress, jobs: int = 1
) -> tuple[PropertiesResults, list[MethodTicks]]:
    """Measure methods, ``jobs`` at a time, and judge them.

    ``out/results.json`` is written after every method. Measurements of the same models that it holds are not repeated.

    Returns:
        The results, and the table's rows.

    Raises:
        InputError: if ``out`` holds something else, or measurements of another comparison.
    """
    path = out / "results.json"
    compared = comparison.results
    earlier = PropertiesResults.earlier(out, settings=compared.settings)
    results = PropertiesResults(
        settings=compared.settings,
        runs={} if earlier is None else earlier.runs,
        text={name: value for name, value in vars(compared.text).items() if name != "data"},
        thresholds=THRESHOLDS,
        **provenance(),
    )
    missing = [
        name for name in positions if name not in results.runs or results.runs[name].seed != comparison.seed(name)
    ]
    progress.start(len(missing))
    for name, measured in spread(partial(_measure, comparison), missing, jobs, progress):
        results = results.with_run(name, measured)
        results.write(path)
        progress.step()
    losses = {
        name: {seed: run.scores for seed, run in by_seed.items()}
        for name, by_seed in compared.runs.items()
        if name == BASELINE or name in positions
    }
    results = replace(results, losses=losses)
    rows = judge(results, positions)
    results = replace(results, table={row.position: row.ticks for row in rows})
    results.write(path)
    return results, rows


def _measure(comparison: Comparison, position: str, progress: Progress) -> Measured:
    progress.begin(f"measuring {position}")
    return measure_method(comparison, position)


def measure_method(comparison: Comparison, position: str) -> Measured:
    """Take all measurements of one method."""
    sizes, seed = comparison.results.settings, comparison.seed(position)
    trained = comparison.model(position)
    fresh = untrained(sizes, position, trained.config.vocab_size, seed).eval()
    inputs, labels = _windows(comparison.held_out, sizes.length)

    def build(length: int) -> Position:
        return build_position(
            position,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_layers=trained.config.num_hidden_layers,
            max_length=length,
        )

    # Half the length, so that there is room to shift even if the method has a last position.
    short = inputs[:, : sizes.length // 2]
    return Measured(
        seed=seed,
        reached=measure.reached_parameters(trained, inputs, labels),
        growth=measure.parameter_growth(position),
        shifted_fresh=_finite(measure.shift_change(fresh.encoder, short)),
        shifted_trained=_finite(measure.shift_change(trained.encoder, short)),
        curve=measure.curve_share(trained.encoder, inputs),
        steps=measure.sequential_steps(build),
    )


def _windows(held_out: HeldOut, length: int) -> tuple[Tensor, Tensor]:
    """Return some full windows of held-out text: input ids and labels, (batch, length) each."""
    inputs, labels, real = next(held_out.windows(length, WINDOWS * length))
    whole = real.all(-1)
    return inputs[whole], labels[whole]


def _finite(found: measure.Shifted) -> Shift:
    scores, output = (value if math.isfinite(value) else None for value in (found.scores, found.output))
    return Shift(scores, output, list(found.shifts))
