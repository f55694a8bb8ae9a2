"""Rank the methods of a comparison, and claim no difference that chance could explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations

from ...lab.encoders import BASELINE
from ...lab.report.page import listed
from ...lab.score import Cannot
from ...lab.seeds import Spread
from .outlook import AHEAD, Estimate, Outlook, outlook
from .results import CompareResults, Run, Score

SEED_NOISE = 0.07
"""How much another seed may change the gap between two methods, in nats: twice the standard deviation of a gap over
seeds at the default sizes, measured by ``benchmarks/seed_noise.py`` (0.064, with eight methods and three seeds). With
one seed, a smaller gap is not a result."""
MOST_PAIRS = 4
"""Pairs of methods that are named in a sentence."""


@dataclass(frozen=True)
class RankedMethod:
    """A method's row in the ranking, with its runs by seed, and its held-out loss at each length.

    ``rank`` is one more than the number of methods that are clearly better. It never falls as the loss rises, and it is
    None for a method that is not yet learning. ``outlook`` is None for such a method, and if there are too few steps.
    """

    rank: int | None
    position: str
    runs: Mapping[int, Run]
    loss: dict[int, Spread]
    outlook: Outlook | None


@dataclass(frozen=True)
class Ranking:
    """The table of a comparison, best method first, and its result in one sentence.

    ``unsettled`` holds the pairs of a better and a worse method whose order may not last, by the curves of training.
    ``uncertain`` holds the methods whose predicted loss says nothing about their rank: it is lower than that of a
    clearly better method, but by less than twice the standard error of the difference.
    ``waiting`` holds the methods that are not yet learning; they are the last rows.
    """

    rows: list[RankedMethod]
    verdict: str
    unsettled: list[tuple[str, str]]
    uncertain: list[str]
    waiting: list[str]


def clearly_better(better: Mapping[int, Run], worse: Mapping[int, Run]) -> bool:
    """Return whether one method's runs beat the other's by more than chance explains.

    The first method must be ahead with every common seed. The mean gap must exceed twice its standard error over the
    held-out text, and also :data:`SEED_NOISE` divided by the square root of the number of seeds.

    Args:
        better, worse: the runs of each method, by seed.
    """
    gaps = [
        [loss - best for best, loss in zip(better[seed].window_losses, worse[seed].window_losses, strict=True)]
        for seed in better
        if seed in worse
    ]
    means = [statistics.fmean(gap) for gap in gaps]
    if min(means, default=0.0) <= 0:
        return False
    error = _standard_error([statistics.fmean(window) for window in zip(*gaps, strict=True)])
    return statistics.fmean(means) > max(2 * error, SEED_NOISE / len(means) ** 0.5)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def not_yet_learning(results: CompareResults) -> list[str]:
    """Return the methods that have not left the plateau on which every training begins.

    On it, a model predicts from the words around a masked token, whatever their order, as it does without positions. So
    a method is on it if its held-out loss is not clearly lower than that of :data:`BASELINE`, which learns no more.
    Without the baseline nothing is known. Causal models learn the order of words without positions, too.
    """
    baseline = results.runs.get(BASELINE)
    if not baseline or results.settings.causal:
        return []
    return [
        name
        for name, runs in results.runs.items()
        if name != BASELINE and baseline.keys() & runs.keys() and not clearly_better(runs, baseline)
    ]


def rank(results: CompareResults) -> Ranking:
    """Rank the methods of a comparison."""
    length, waiting = results.settings.length, not_yet_learning(results)
    better = {
        name: sum(clearly_better(other, runs) for rival, other in results.runs.items() if rival != name)
        for name, runs in results.runs.items()
    }
    rows = [_row(name, runs) for name, runs in results.runs.items()]
    rows.sort(key=lambda row: row.loss[length].median or math.inf)
    ranks = accumulate((1 + better[row.position] for row in rows), max)
    ranked = [replace(row, rank=own) for row, own in zip(rows, ranks, strict=True)]
    last = [replace(row, rank=None, outlook=None) for row in ranked if row.position in waiting]
    rows = [row for row in ranked if row.position not in waiting]
    unsettled, uncertain = _outlooks(rows, length)
    return Ranking([*rows, *last], _verdict(rows, results, waiting), unsettled, uncertain, waiting)


def predicted(row: RankedMethod, length: int) -> Estimate | None:
    """Return the loss of a method at a length after AHEAD times the steps; None without an outlook."""
    now = row.loss[length].median
    if now is None or row.outlook is None:
        return None
    return Estimate(now - row.outlook.ahead.value, row.outlook.ahead.error)


def sentences(results: CompareResults) -> list[str]:
    """Return the result in a few sentences; the first says which method is best."""
    if not results.runs:
        return ["No method has a result."]
    ranking = rank(results)
    found = [ranking.verdict]
    if ranking.waiting:
        are = "is" if len(ranking.waiting) == 1 else "are"
        found.append(
            f"{listed(ranking.waiting)} {are} not yet learning: the loss is not clearly lower than that of {BASELINE}. "
            f"Train longer (--steps {AHEAD * results.settings.steps}); with this text, or so few steps, order has not "
            "helped yet."
        )
    if ranking.unsettled:
        pairs = ", ".join(f"{better} before {worse}" for better, worse in ranking.unsettled[:MOST_PAIRS])
        rest = len(ranking.unsettled) - MOST_PAIRS
        found.append(
            f"Not settled: by the curves of training, {AHEAD} times the steps may change this order: {pairs}"
            f"{f' and {rest} more' if rest > 0 else ''}."
        )
    if results.failed:
        found.append(f"No result, because the loss was not finite (NaN or inf): {listed(list(results.failed))}.")
    return found


def _outlooks(rows: Sequence[RankedMethod], length: int) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pairs of which the first is clearly better now, but whose predicted losses overlap or change order.

    Also return the methods whose prediction is lower than that of a clearly better one, but not by twice the error.
    """
    unsettled, uncertain = [], set()
    for better, worse in combinations(rows, 2):
        first, second = predicted(better, length), predicted(worse, length)
        if first is None or second is None or not clearly_better(better.runs, worse.runs):
            continue
        gap = second.value - first.value
        if gap <= first.error + second.error:
            unsettled.append((better.position, worse.position))
        if -2 * math.hypot(first.error, second.error) < gap < 0:
            uncertain.add(worse.position)
    return unsettled, [row.position for row in rows if row.position in uncertain]


def _row(position: str, runs: Mapping[int, Run]) -> RankedMethod:
    every = list(runs.values())
    return RankedMethod(
        rank=1,
        position=position,
        runs=runs,
        loss={length: _loss([run.scores[length] for run in every]) for length in every[0].scores},
        outlook=outlook([run.train_loss for run in every]),
    )


def _loss(scores: Sequence[Score | Cannot]) -> Spread:
    """Return the spread of the losses of all seeds at one length."""
    for score in scores:
        if isinstance(score, Cannot):
            return Spread(None, why_not=score.cannot)
    return Spread.of([score.loss for score in scores if isinstance(score, Score)])


def _verdict(rows: Sequence[RankedMethod], results: CompareResults, waiting: Sequence[str]) -> str:
    """Return the result in one sentence, given the methods that have a rank and those that are not yet learning."""
    first = rows[0]
    loss = first.loss[results.settings.length].median
    if loss is None or loss >= results.text.unigram_entropy:
        return "No method predicts better than guessing by frequency yet; train longer."
    if waiting and len(rows) == 1:
        return f"No method predicts clearly better than {BASELINE} yet; train longer."
    best = [row.position for row in rows if row.rank == first.rank]
    if len(rows) == 1:
        return f"Only {best[0]} was tried."
    if len(best) == len(rows):
        return "The methods can't be told apart; train longer or with more seeds."
    if len(best) == 1:
        return f"{best[0]} predicts this text best."
    return f"{listed(best)} predict this text best; they can't be told apart."
