"""Measure Table 1 of the TISA paper: which properties each position method of a comparison has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...analysis import properties as measure
from ...lab.encoders import BASELINE
from ...lab.folder import open_folder
from ...lab.progress import Progress
from ...lab.provenance import provenance
from ...lab.store import complete
from ...positions import build_position
from ..compare.models import untrained
from ..compare.run import CompareJob
from .comparison import Comparison, load_comparison
from .results import Measured, PropertiesResults
from .ticks import THRESHOLDS, judge

WINDOWS = 16
"""Windows of held-out text that measurements of a trained model use."""


@dataclass(frozen=True, kw_only=True)
class PropertiesJob:
    """Everything that measuring needs, already checked.

    Args:
        positions: the methods; None for all of a finished comparison.
        jobs: the number of methods at a time.
        comparison: a comparison to train, or the folder of a finished one.
    """

    positions: Sequence[str] | None
    jobs: int
    comparison: CompareJob | Path

    def run(self, folder: Path, progress: Progress) -> PropertiesResults:
        """Measure the methods, and judge them.

        Raises:
            InputError: if the folder holds something else, or measurements of another comparison, or the comparison or
                its text can't be read.
        """
        if isinstance(self.comparison, Path):
            progress.begin("reading the comparison and its text")
            comparison, names = load_comparison(self.comparison, self.positions)
        else:
            comparison = _train(self.comparison, folder / "comparison", progress)
            names = [name for name in self.comparison.positions if name != BASELINE]
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
        results = complete(results, folder, keys, partial(measure_method, comparison), progress, self.jobs)
        losses = {
            name: {seed: run.scores for seed, run in by_seed.items()}
            for name, by_seed in compared.runs.items()
            if name == BASELINE or name in names
        }
        results = replace(results, losses=losses)
        return replace(results, table=judge(results, names))


def _train(job: CompareJob, folder: Path, progress: Progress) -> Comparison:
    with open_folder(folder):
        progress.begin("reading the text and training a tokenizer")
        material = job.prepare(folder, progress)
        results = replace(job, speed=False).complete(material, folder, progress)
    return Comparison(folder, results, material.held_out)


def measure_method(comparison: Comparison, key: tuple[str], progress: Progress) -> Measured:
    """Take all measurements of the method ``key``."""
    (position,) = key
    progress.begin(f"measuring {position}")
    sizes, seed = comparison.results.settings, comparison.seed(position)
    trained = comparison.model(position)
    fresh = untrained(sizes, position, trained.config.vocab_size, seed).eval()
    inputs, labels, real = next(comparison.held_out.windows(sizes.length, WINDOWS * sizes.length))
    whole = real.all(-1)
    inputs, labels = inputs[whole], labels[whole]
    # Half the length, so that there is room to shift even if the method has a last position.
    short = inputs[:, : sizes.length // 2]
    build = partial(
        build_position,
        position,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_layers=trained.config.num_hidden_layers,
    )
    measured = Measured(
        seed=seed,
        reached=measure.reached_parameters(trained, inputs, labels),
        growth=measure.parameter_growth(position),
        shifted_fresh=measure.shift_change(fresh.encoder, short),
        shifted_trained=measure.shift_change(trained.encoder, short),
        curve=measure.curve_share(trained.encoder, inputs),
        steps=measure.sequential_steps(lambda length: build(max_length=length)),
    )
    progress.step()
    return measured
