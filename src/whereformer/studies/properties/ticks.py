"""Turn measurements of position methods into the ticks of the TISA paper's Table 1, and compare with the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...analysis.properties import LENGTHS
from ...lab.encoders import BASELINE
from ...lab.score import Cannot
from ..compare.results import Score

if TYPE_CHECKING:
    from .results import PropertiesResults

INDUCTIVE_RISE = 0.11
"""In nats. Longer text says more about a masked token, so the loss has no reason to rise; the threshold is above what
another seed may change. A method that beats having no positions by less than that has nothing to lose on longer text.
Not getting worse then proves nothing, and the tick stays open."""
REACHED_SHARE = 0.1
"""The gradient of one batch need not reach all, because a text may lack some offsets and some hidden units may be
off."""
ATTENTION_SHARE, LENGTH_POWER = 0.01, 0.1
"""The share of the parameters of BERT-base's attention layers (28 million), and the power of the length."""
INVARIANT_CHANGE = 1e-6
"""Rounding changes float64 by 1e-13, absolute positions change it by several percent."""
CHAIN_GROWTH = 0.1
"""A power of the length."""
CURVE_SHARE = 0.9

THRESHOLDS = {
    "inductive": INDUCTIVE_RISE,
    "data_driven": REACHED_SHARE,
    "parameter_efficient": [ATTENTION_SHARE, LENGTH_POWER],
    "translation_invariant": INVARIANT_CHANGE,
    "parallelizable": CHAIN_GROWTH,
    "interpretable": CURVE_SHARE,
}
"""What decides the ticks, as it is stored with the results."""

TITLES = {name: name.replace("_", "-" if name == "data_driven" else " ") for name in THRESHOLDS}
"""The properties as people write them."""

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
class Tick:
    """One property of one method.

    Args:
        holds: whether the method has the property; None if the measurement could not tell.
        number: the measured number, as shown below the tick.
        note: why it could not be measured, or what the number does not show.
        paper: the paper's tick; None for a method that is not in the paper.
        reason: why the two differ; empty if they don't.
    """

    holds: bool | None
    number: str
    note: str = ""
    paper: bool | None = None
    reason: str = ""

    @property
    def word(self) -> str:
        """The tick in a word: yes, no or open."""
        return "open" if self.holds is None else "yes" if self.holds else "no"

    @property
    def differs(self) -> bool:
        """Whether the paper says otherwise."""
        return None not in (self.holds, self.paper) and self.holds != self.paper


Table = dict[str, dict[str, Tick]]
"""The ticks of each method, by property."""


def judge(results: PropertiesResults, positions: Sequence[str]) -> Table:
    """Return the ticks of these methods, beside the paper's, from the losses and measurements."""
    table: Table = {}
    for position in positions:
        table[position] = {}
        for (name, tick), letter in zip(_ticks(position, results), PAPER.get(position, "------"), strict=True):
            beside = replace(tick, paper={"y": True, "n": False}.get(letter))
            if beside.differs:
                reason = REASONS.get((position, name)) or f"measured: {tick.number} ({MEANINGS[name]})"
                beside = replace(beside, reason=reason)
            table[position][name] = beside
    return table


def _ticks(position: str, results: PropertiesResults) -> list[tuple[str, Tick]]:
    run = results.runs[position]
    reached, growth, curve = run.reached, run.growth, run.curve
    if reached.total:
        number = f"{short_count(reached.nonzero)}/{short_count(reached.total)}"
        data_driven = Tick(reached.nonzero >= REACHED_SHARE * reached.total, number)
    else:
        data_driven = Tick(False, "0", "it has no parameters")
    grows = growth.length > LENGTH_POWER
    few = growth.count < ATTENTION_SHARE * growth.attention
    number = short_count(growth.count) + (f" n^{growth.length:.1f}" if grows else "")
    changes = [change for shift in (run.shifted_fresh, run.shifted_trained) for change in (shift.scores, shift.output)]
    finite = [change for change in changes if change is not None]
    largest = max(finite, default=0.0)
    exact = len(finite) == len(changes)
    change = f"{largest:.2g}" if largest == 0 or largest >= 1e-3 else f"{largest:.0e}"
    short, long = run.steps.chain
    longer = run.steps.lengths[1] / run.steps.lengths[0]
    if curve.share is None:
        interpretable = Tick(None, "no effect", "it does nothing to scores")
    else:
        interpretable = Tick(curve.share >= CURVE_SHARE, f"{curve.share:.0%}")
    return [
        ("inductive", _inductive(position, results)),
        ("data_driven", data_driven),
        ("parameter_efficient", Tick(few and not grows, number)),
        ("translation_invariant", Tick(exact and largest <= INVARIANT_CHANGE, change if exact else "not finite")),
        ("parallelizable", Tick(long <= short * longer**CHAIN_GROWTH, f"{short:,}, {long:,}")),
        ("interpretable", interpretable),
    ]


def _inductive(position: str, results: PropertiesResults) -> Tick:
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


def short_count(number: int) -> str:
    """Format a count in about four characters: 512, 5.5k, 394k, 37.7M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if number >= size:
            digits = 1 if number < 100 * size else 0
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def notes(table: Table) -> dict[str, list[str]]:
    """Return a sentence for every tick that differs from the paper's, is undecided or cannot be; under headings."""
    differing, undecided = [], []
    for position, ticks in table.items():
        for name, tick in ticks.items():
            place = f"{position}, {TITLES[name]}"
            if tick.differs:
                paper = "yes" if tick.paper else "no"
                differing.append(f"{place}: {tick.word} ({tick.number}), but the paper says {paper}; {tick.reason}")
            if tick.note and (tick.holds is None or tick.number == "cannot"):
                undecided.append(f"{place}: {tick.note}")
    found = {"Where Table 1 of the TISA paper says otherwise": differing, "Undecided or impossible": undecided}
    return {heading: sentences for heading, sentences in found.items() if sentences}
