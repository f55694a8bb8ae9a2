"""Rank trained models by held-out losses, and claim no difference that chance could explain."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from ..errors import join_words

SEED_NOISE = 0.07
"""How much another seed may change the gap between two methods, in nats: twice the standard deviation of a gap over
seeds at the default sizes of ``compare``, measured by ``benchmarks/seed_noise.py`` (0.064, with eight methods and three
seeds). With one seed, a smaller gap is not a result."""


AHEAD = 4
"""A verdict has to hold after this many times the steps."""
LASTING = {0: 0.07, 1800: 0.3}
"""The share of a clear gap that may be left then, by the fewest steps of the trainings. Methods that learn order later
catch up, and no curve of training shows when. Measured by ``benchmarks/compare_check.py``, which counts how often
verdicts held: after 400 and 600 steps, 0.06 and 0.07 of a gap were left; after 1,800, 0.5."""

MOST_PAIRS = 4
"""Pairs of methods that are named in a sentence."""


class Trained(Protocol):
    """A trained model, judged by the mean held-out loss of each window of the same text."""

    @property
    def windows(self) -> Sequence[float]: ...
    @property
    def loss(self) -> float:
        """The held-out loss."""
        ...


Models = Mapping[int, Trained]
"""The models of a method, by seed."""


@dataclass(frozen=True)
class Ranked:
    """A method's place in a ranking.

    Args:
        position: its name.
        rank: one more than the number of methods that are clearly better. It never falls as the loss rises, and it is
            None for a method that is not yet learning.
        loss: the held-out loss, the median over seeds.
    """

    position: str
    rank: int | None
    loss: float


@dataclass(frozen=True)
class Ranking:
    """Methods, best first; those that are not yet learning are last.

    Args:
        rows: the methods.
        unsettled: the pairs of a clearly better and a worse method that more steps may make too close to tell, or
            reverse.
    """

    rows: list[Ranked]
    unsettled: list[tuple[str, str]]

    @property
    def ranked(self) -> list[Ranked]:
        """The methods with a rank."""
        return [row for row in self.rows if row.rank is not None]

    @property
    def waiting(self) -> list[str]:
        """The methods that are not yet learning."""
        return [row.position for row in self.rows if row.rank is None]


def clearly_better(better: Models, worse: Models, share: float = 1.0) -> bool:
    """Return whether one method's models beat the other's by more than chance explains.

    The first method must be ahead with every common seed. The mean gap must exceed twice its standard error over the
    held-out text, and also :data:`SEED_NOISE` divided by the square root of the number of seeds. All gaps are
    multiplied by ``share`` first.
    """
    gaps = [
        [share * (loss - best) for best, loss in zip(better[seed].windows, worse[seed].windows, strict=True)]
        for seed in better
        if seed in worse
    ]
    means = [statistics.fmean(gap) for gap in gaps]
    if min(means, default=0.0) <= 0:
        return False
    over_text = [statistics.fmean(window) for window in zip(*gaps, strict=True)]
    error = statistics.stdev(over_text) / len(over_text) ** 0.5 if len(over_text) > 1 else 0.0
    return statistics.fmean(means) > max(2 * error, SEED_NOISE / len(means) ** 0.5)


def not_yet_learning(methods: Mapping[str, Models], baseline: str | None) -> list[str]:
    """Return the methods that have not left the plateau on which every training begins.

    On it, a model predicts from the words around a masked token, whatever their order, as it does without positions. So
    a method is on it if its held-out loss is not clearly lower than that of ``baseline``, which learns no more. Without
    the baseline nothing is known.
    """
    base = methods.get(baseline or "", {})
    return [
        name
        for name, models in methods.items()
        if name != baseline and base.keys() & models.keys() and not clearly_better(models, base)
    ]


def rank(methods: Mapping[str, Models], baseline: str | None, steps: int) -> Ranking:
    """Rank methods by their models.

    Args:
        methods: the models of each method.
        steps: those of each training.
        baseline: the method without positions; None for causal models, which learn the order of words without, too.
    """
    waiting = not_yet_learning(methods, baseline)
    losses = {name: statistics.median(model.loss for model in models.values()) for name, models in methods.items()}
    found, last = {}, 0
    for name in sorted(methods, key=lambda name: losses[name]):
        last = max(last, 1 + sum(clearly_better(methods[rival], methods[name]) for rival in methods if rival != name))
        found[name] = Ranked(name, None if name in waiting else last, losses[name])
    rows = sorted(found.values(), key=lambda row: row.rank is None)
    lasting = next(share for fewest, share in reversed(LASTING.items()) if fewest <= steps)
    unsettled = [
        (better, worse)
        for better, worse in combinations([row.position for row in rows if row.rank is not None], 2)
        if worse != baseline  # which learns no more
        and clearly_better(methods[better], methods[worse])
        and not clearly_better(methods[better], methods[worse], lasting)
    ]
    return Ranking(rows, unsettled)


def sentences(ranking: Ranking, baseline: str, guessing: float, steps: int) -> list[str]:
    """Return the result in a few sentences; the first says which method is best.

    Args:
        ranking: the ranking.
        baseline: the method without positions.
        guessing: the held-out loss of guessing by token frequency.
        steps: the steps of each training.
    """
    found, waiting = [_verdict(ranking, baseline, guessing, steps)], ranking.waiting
    if waiting:
        are = "is not learning yet: its loss is" if len(waiting) == 1 else "are not learning yet: their loss is"
        found.append(
            f"{join_words(waiting)} {are} not clearly lower than that of {baseline}. Train longer "
            f"(--steps {AHEAD * steps}); on this text, or in so few steps, word order has not helped yet."
        )
    if ranking.unsettled:
        pairs = ", ".join(f"{better} before {worse}" for better, worse in ranking.unsettled[:MOST_PAIRS])
        rest = len(ranking.unsettled) - MOST_PAIRS
        more = f" and {rest} more" if rest > 0 else ""
        found.append(f"Not settled, since {AHEAD} times the steps may close gaps of this size: {pairs}{more}.")
    return found


def _verdict(ranking: Ranking, baseline: str, guessing: float, steps: int) -> str:
    """Return the result in one sentence. It names no winner that more steps may put behind another method."""
    rows = ranking.ranked
    if rows[0].loss >= guessing:
        return "No method predicts better than guessing by frequency yet; train longer."
    if ranking.waiting and len(rows) == 1:
        return f"No method predicts clearly better than {baseline} yet; train longer."
    best = [row.position for row in rows if row.rank == rows[0].rank]
    if len(rows) == 1:
        return f"Only {best[0]} was tried."
    if len(best) == len(rows):
        return "The methods can't be told apart; train longer or with more seeds."
    rivals = [row.position for row in rows if any((name, row.position) in ranking.unsettled for name in best)]
    rivals += ranking.waiting  # their curves tell nothing yet
    if rivals:
        lead = f"{join_words(best)} {'leads' if len(best) == 1 else 'lead'} after {steps:,} steps"
        more = "" if ranking.waiting else f" Train longer: --steps {AHEAD * steps}."  # which is said of those
        return f"Too few steps to choose: {lead}, but {join_words(rivals)} may catch up.{more}"
    if len(best) == 1:
        return f"{best[0]} predicts this text best."
    return f"{join_words(best)} predict this text best; they can't be told apart."
