"""Turn measurements of position methods into the ticks of the TISA paper's Table 1, and compare with the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...analysis.properties import LENGTHS, CurveShare, Growth, Reached, Steps
from ...lab.encoders import BASELINE
from ...lab.score import Cannot
from ..compare.results import Score
from .results import PropertiesResults, Shift, Tick

INDUCTIVE_RISE = 0.11
"""Inductive: at 4 times the training length, the loss is at most this number of nats above that at the training length.
Longer text says more about a masked token, so the loss has no reason to rise; the threshold is above what another seed
may change. If a method beats having no positions by less than that, it has nothing to lose on longer text. Not getting
worse then proves nothing, and the tick stays open."""

REACHED_SHARE = 0.1
"""Data-driven: there are positional parameters, and the gradient of one batch reaches at least this share of them. It
need not reach all, because a text may lack some offsets and some hidden units may be off."""

ATTENTION_SHARE = 0.01
"""Parameter efficient: at BERT-base's sizes, there are fewer positional parameters than this share of the parameters of
its attention layers (28 million) ..."""

LENGTH_POWER = 0.1
"""... and their number grows with the length by at most this power."""

INVARIANT_CHANGE = 1e-6
"""Translation invariant: in float64, no shift changes a score or an output by more than this multiple of their root
mean square, untrained or trained. Rounding changes them by 1e-13, absolute positions by several percent."""

CHAIN_GROWTH = 0.1
"""Parallelizable: the longest chain of operations that wait for one another grows with the length by at most this
power."""

CURVE_SHARE = 0.9
"""Interpretable: a curve over offsets, one for each layer and head, explains at least this share of the method's effect
on the scores of real text."""

THRESHOLDS = {
    "inductive": INDUCTIVE_RISE,
    "data_driven": REACHED_SHARE,
    "parameter_efficient": [ATTENTION_SHARE, LENGTH_POWER],
    "translation_invariant": INVARIANT_CHANGE,
    "parallelizable": CHAIN_GROWTH,
    "interpretable": CURVE_SHARE,
}

MEANINGS = {
    "inductive": f"loss at 4 times the training length minus loss at the training length, in nats; yes up to "
    f"{INDUCTIVE_RISE}, open if the method gains less than that over no positions",
    "data_driven": f"positional parameters that the gradient of one batch reaches; yes from {REACHED_SHARE:.0%}",
    "parameter_efficient": f"positional parameters at BERT-base's sizes, and the power of the length n with which they "
    f"grow; yes below {ATTENTION_SHARE:.0%} of the attention layers' own and without growth",
    "translation_invariant": f"largest change of a score or output when all positions shift, relative to their "
    f"root mean square; yes up to {INVARIANT_CHANGE:.0e}",
    "parallelizable": f"longest chain of operations that wait for one another, at {LENGTHS[0]} and at {LENGTHS[1]} "
    "tokens; yes if it does not grow",
    "interpretable": f"share of the method's effect on scores that a curve over offsets explains; yes from "
    f"{CURVE_SHARE:.0%}",
}
"""The meaning of each column's number."""

PAPER = {
    "sinusoidal": "ynynyn",
    "learned": "nynnyn",
    "shaw": "nyyynn",
    "t5": "nyyyyy",
    "floater": "yyynnn",
    "synthesizer": "nyynyn",
    "tupe": "nynnyn",
    "rope": "ynyyyn",
    "tisa": "yyyyyy",
}
"""Table 1 of Wennberg & Henter (2021), in the order of :data:`MEANINGS`."""

REASONS = {
    ("sinusoidal", "inductive"): "it has a vector for any position, but the layers above have not learned to read "
    "those beyond the training length",
    ("learned", "interpretable"): "text is cut anywhere, so training makes the products of its vectors a curve, as "
    "Section 3 of the paper found in pretrained models; the method does not guarantee it, so it has to be measured",
    ("rope", "inductive"): "any angle can be computed, but beyond the training length layers meet angles that they "
    "were not trained on",
    ("floater", "inductive"): "the equation can be integrated further, but the layers have not learned to read the "
    "vectors that it reaches",
    ("shaw", "inductive"): "every distance beyond the clip shares one vector, which was trained on all of them",
    ("t5", "inductive"): "buckets saturate, so longer text uses no bucket that was not trained",
    ("tisa", "inductive"): "kernels were trained only on offsets within the training length; a wide kernel still acts "
    "beyond them",
    ("floater", "parameter_efficient"): "its network maps the whole width to itself; it grows with neither length nor "
    "depth",
    ("synthesizer", "parameter_efficient"): 'the default variant "random" has a number for every pair of positions, '
    'layer and head; "factorized_random" has fewer, which grow with the length too',
    (
        "floater",
        "interpretable",
    ): "its vectors move along a smooth path, and training on text that is cut anywhere makes "
    "their products a curve; the method does not guarantee it, so it has to be measured",
    ("shaw", "parallelizable"): "as a table over offsets it is one product per layer; gathering vectors for every pair "
    "is slow, but that is cost, not a chain",
}
"""Why a measured tick differs from the paper's, if that is known."""


@dataclass(frozen=True)
class MethodTicks:
    """A row of the table: a method and its ticks by property."""

    position: str
    ticks: dict[str, Tick]

    @property
    def count(self) -> int:
        """Number of properties that the method has."""
        return sum(tick.holds is True for tick in self.ticks.values())


def judge(results: PropertiesResults, positions: Sequence[str]) -> list[MethodTicks]:
    """Return the rows of the table, from the losses and measurements of these methods."""
    return [MethodTicks(name, _ticks(name, results)) for name in positions]


def _ticks(position: str, results: PropertiesResults) -> dict[str, Tick]:
    run = results.runs[position]
    measured = {
        "inductive": inductive(position, results),
        "data_driven": _data_driven(run.reached),
        "parameter_efficient": _parameter_efficient(run.growth),
        "translation_invariant": _translation_invariant(run.shifted_fresh, run.shifted_trained),
        "parallelizable": _parallelizable(run.steps),
        "interpretable": _interpretable(run.curve),
    }
    return {
        name: _beside_paper(position, name, tick, letter)
        for (name, tick), letter in zip(measured.items(), PAPER.get(position, "------"), strict=True)
    }


def inductive(position: str, results: PropertiesResults) -> Tick:
    """Judge whether a method reads text beyond the training length equally well, by medians over seeds."""
    by_seed, baseline = results.losses[position], results.losses.get(BASELINE, {})
    length = results.settings.length
    rises, gains = [], []
    for seed, scores in by_seed.items():
        trained, longest = scores[length], scores[4 * length]
        if isinstance(longest, Cannot):
            return Tick(False, "cannot", longest.cannot)
        assert isinstance(trained, Score)
        rises.append(longest.loss - trained.loss)
        if seed in baseline:
            without = baseline[seed][length]
            assert isinstance(without, Score)
            gains.append(without.loss - trained.loss)
    rise = statistics.median(rises)
    number = f"{rise:+z.2f}"
    if rise <= INDUCTIVE_RISE and gains and statistics.median(gains) < INDUCTIVE_RISE:
        gain = statistics.median(gains)
        beside = f"{abs(gain):.2f} nats {'better' if gain >= 0 else 'worse'} than no positions"
        return Tick(None, number, f"after this training it is {beside}, so it has little to lose")
    return Tick(rise <= INDUCTIVE_RISE, number)


def _data_driven(reached: Reached) -> Tick:
    if not reached.total:
        return Tick(False, "0", "it has no parameters")
    number = f"{short_count(reached.nonzero)}/{short_count(reached.total)}"
    return Tick(reached.nonzero >= REACHED_SHARE * reached.total, number)


def _parameter_efficient(growth: Growth) -> Tick:
    grows = growth.length > LENGTH_POWER
    number = short_count(growth.count) + (f" n^{growth.length:.1f}" if grows else "")
    return Tick(growth.count < ATTENTION_SHARE * growth.attention and not grows, number)


def _translation_invariant(*shifts: Shift) -> Tick:
    changes = [change for shift in shifts for change in (shift.scores, shift.output)]
    finite = [change for change in changes if change is not None]
    if len(finite) < len(changes):
        return Tick(False, "not finite")
    return Tick(max(finite) <= INVARIANT_CHANGE, short_number(max(finite)))


def _parallelizable(steps: Steps) -> Tick:
    short, long = steps.chain
    longer = steps.lengths[1] / steps.lengths[0]
    return Tick(long <= short * longer**CHAIN_GROWTH, f"{short:,}, {long:,}")


def _interpretable(curve: CurveShare) -> Tick:
    if curve.share is None:
        return Tick(None, "no effect", "it does nothing to scores")
    return Tick(curve.share >= CURVE_SHARE, f"{curve.share:.0%}")


def _beside_paper(position: str, name: str, tick: Tick, letter: str) -> Tick:
    """Return the tick with the paper's tick, and the reason if they differ."""
    paper = {"y": True, "n": False}.get(letter)
    beside = Tick(tick.holds, tick.number, tick.note, paper)
    if not beside.differs:
        return beside
    reason = REASONS.get((position, name)) or f"measured: {tick.number} ({MEANINGS[name]})"
    return Tick(tick.holds, tick.number, tick.note, paper, reason)


def short_number(number: float) -> str:
    """Format a number of any size: 0, 1e-13, 0.052, 6.3."""
    return f"{number:.2g}" if number == 0 or number >= 1e-3 else f"{number:.0e}"


def short_count(number: int) -> str:
    """Format a count in about four characters: 512, 5.5k, 394k, 37.7M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if number >= size:
            digits = 1 if number < 100 * size else 0
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def disagreements(found: Sequence[MethodTicks]) -> list[str]:
    """Return a sentence for every tick that differs from the paper's."""
    return [
        f"{row.position}, {title(name)}: {tick.word} ({tick.number}), but the paper says "
        f"{'yes' if tick.paper else 'no'}; {tick.reason}"
        for row in found
        for name, tick in row.ticks.items()
        if tick.differs
    ]


def open_ticks(found: Sequence[MethodTicks]) -> list[str]:
    """Return a sentence for every tick that is undecided or that the method can't be measured for."""
    return [
        f"{row.position}, {title(name)}: {tick.note}"
        for row in found
        for name, tick in row.ticks.items()
        if tick.note and (tick.holds is None or tick.number == "cannot")
    ]


def title(name: str) -> str:
    """Return a property's name as people write it."""
    return {"data_driven": "data-driven"}.get(name, name.replace("_", " "))
