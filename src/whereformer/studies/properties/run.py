"""Measure Table 1 of the TISA paper: which properties each position method of a comparison has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ...analysis import properties as measure
from ...data.masks import HeldOut
from ...lab.encoders import BASELINE
from ...lab.folder import open_folder
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import complete
from ...positions import Position, build_position
from ..compare.models import untrained
from ..compare.run import CompareJob
from .comparison import Comparison, load_comparison
from .results import Measured, PropertiesResults, Shift
from .ticks import THRESHOLDS, judge

WINDOWS = 16
"""Windows of held-out text that measurements of a trained model use."""


@dataclass(frozen=True, kw_only=True)
class PropertiesJob:
    """Everything that measuring needs, already checked.

    Args:
        positions: the methods; None for all of a finished comparison.
        jobs: the number of methods at a time.
        finished: the folder of a finished comparison; None to train one.
        training: the comparison to train; None with a finished one.
    """

    positions: Sequence[str] | None
    jobs: int
    finished: Path | None
    training: CompareJob | None

    def run(self, folder: Path, progress: Progress) -> PropertiesResults:
        """Measure the methods, and judge them.

        Raises:
            InputError: if the folder holds something else, or measurements of another comparison, or the comparison or
                its text can't be read.
        """
        if self.training is not None:
            comparison = _train(self.training, folder / "comparison", progress)
            names = [name for name in self.training.positions if name != BASELINE]
        else:
            assert self.finished is not None
            progress.begin("reading the comparison and its text")
            comparison, names = load_comparison(self.finished, self.positions)
        compared = comparison.results
        earlier = PropertiesResults.earlier(folder, settings=compared.settings)
        results = PropertiesResults(
            settings=compared.settings,
            runs={} if earlier is None else earlier.runs,
            text={name: value for name, value in vars(compared.text).items() if name != "data"},
            thresholds=THRESHOLDS,
            **provenance(),
        )
        keys = [
            (name,) for name in names if name not in results.runs or results.runs[name].seed != comparison.seed(name)
        ]
        progress.start(len(keys))
        results = complete(results, folder, keys, partial(_measure, comparison), progress, self.jobs)
        losses = {
            name: {seed: run.scores for seed, run in by_seed.items()}
            for name, by_seed in compared.runs.items()
            if name == BASELINE or name in names
        }
        results = replace(results, losses=losses)
        return replace(results, table={row.position: row.ticks for row in judge(results, names)})


def _train(job: CompareJob, folder: Path, progress: Progress) -> Comparison:
    """Train a comparison in a folder."""
    with open_folder(folder):
        progress.begin("reading the text and training a tokenizer")
        material = job.prepare(folder, progress)
        results = replace(job, speed=False).complete(material, folder, progress)
    return Comparison(folder, results, material.held_out)


def _measure(comparison: Comparison, key: tuple[str], progress: Progress) -> Measured:
    (position,) = key
    progress.begin(f"measuring {position}")
    measured = measure_method(comparison, position)
    progress.step()
    return measured


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
