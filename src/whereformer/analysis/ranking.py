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
STEP_FACTOR = 4
"""A verdict has to hold after this number times the steps."""
LASTING = {0: 0.07, 1800: 0.3}
"""The share of a clear gap that may be left then, by the smallest number of steps of the trainings. Methods that learn
order later catch up, and no curve of training shows when. In comparisons with four times the steps, after 400 and 600
steps 0.06 and 0.07 of a gap were left; after 1,800, 0.5. ``benchmarks/verdicts.py`` counts how often verdicts held."""
MAX_NAMES = 4
"""The largest number of methods, or of pairs of them, that a sentence names one by one."""
SEEDS = 3
"""The number of seeds to advise to those who had fewer."""


class TrainedModel(Protocol):
    """A trained model, with the mean held-out loss of each window of the same text."""

    @property
    def windows(self) -> Sequence[float]: ...
    @property
    def loss(self) -> float:
        """The held-out loss."""
        ...


Models = Mapping[int, TrainedModel]
"""The models of a method, by seed."""


@dataclass(frozen=True)
class RankedMethod:
    """A method's place in a ranking."""

    position: str
    # One more than the number of methods that are clearly better. It never falls as the loss rises, and it is None for
    # a method that is not learning yet.
    rank: int | None
    loss: float  # the held-out loss, the median over seeds


@dataclass(frozen=True)
class Ranking:
    """Methods, best first; methods that are not learning yet are last."""

    rows: list[RankedMethod]
    # The pairs of a clearly better and a worse method that more steps may make too close to rank, or reverse.
    unsettled: list[tuple[str, str]]

    @property
    def ranked(self) -> list[RankedMethod]:
        """The methods with a rank."""
        return [row for row in self.rows if row.rank is not None]

    @property
    def not_learning(self) -> list[str]:
        """The methods that are not learning yet."""
        return [row.position for row in self.rows if row.rank is None]

    @property
    def best(self) -> list[str]:
        """The methods of the first rank, which are too close to rank."""
        return [row.position for row in self.ranked if row.rank == self.ranked[0].rank]

    @property
    def rivals(self) -> list[str]:
        """The methods that may catch up with the best, which includes all that are not learning yet."""
        unsettled = {worse for better, worse in self.unsettled if better in self.best}
        return [row.position for row in self.ranked if row.position in unsettled] + self.not_learning


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
    """Return the methods that have not left the plateau where every training begins.

    On it, a model predicts from the words around a masked token, whatever their order, as it does without positions. So
    a method is on it if its held-out loss is not clearly lower than the loss of ``baseline``, which stays there.
    Without the baseline, the plateau is unknown, and no method is returned.
    """
    base = methods.get(baseline or "", {})
    return [
        name
        for name, models in methods.items()
        if name != baseline and base.keys() & models.keys() and not clearly_better(models, base)
    ]


def rank(methods: Mapping[str, Models], baseline: str | None, steps: int) -> Ranking:
    """Rank methods by their models, which were trained for ``steps`` steps.

    ``baseline`` is the method without positions; None for causal models, which learn word order without positions.
    """
    not_learning = not_yet_learning(methods, baseline)
    losses = {name: statistics.median(model.loss for model in models.values()) for name, models in methods.items()}
    by_name, last = {}, 0
    for name in sorted(methods, key=lambda name: losses[name]):
        last = max(last, 1 + sum(clearly_better(methods[rival], methods[name]) for rival in methods if rival != name))
        by_name[name] = RankedMethod(name, None if name in not_learning else last, losses[name])
    rows = sorted(by_name.values(), key=lambda row: row.rank is None)
    lasting = next(share for min_steps, share in reversed(LASTING.items()) if min_steps <= steps)
    unsettled = [
        (better, worse)
        for better, worse in combinations([row.position for row in rows if row.rank is not None], 2)
        if worse != baseline  # it stays on the plateau
        and clearly_better(methods[better], methods[worse])
        and not clearly_better(methods[better], methods[worse], lasting)
    ]
    return Ranking(rows, unsettled)


def sentences(ranking: Ranking, baseline: str, guessing: float, steps: int) -> list[str]:
    """Return the result in a few sentences; the first says which method to take.

    ``baseline`` is the method without positions, ``guessing`` the held-out loss of guessing by token frequency, and
    ``steps`` the number of steps of each training.
    """
    result, not_learning = [headline(ranking, baseline, guessing, steps)], ranking.not_learning
    if not_learning:
        are = "is not learning yet: its loss is" if len(not_learning) == 1 else "are not learning yet: their loss is"
        late = "" if len(ranking.ranked) > 1 else "; on this text, or in so few steps, word order has not helped yet"
        result.append(
            f"{join_words(not_learning)} {are} not clearly lower than that of {baseline}. Train longer "
            f"(--steps {STEP_FACTOR * steps}){late}."
        )
    if ranking.unsettled:
        pairs = join_words(_shorten([f"{better} ahead of {worse}" for better, worse in ranking.unsettled]))
        result.append(f"Not settled, because {STEP_FACTOR} times the steps may close these gaps: {pairs}.")
    return result


def headline(ranking: Ranking, baseline: str, guessing: float, steps: int) -> str:
    """Return the advice that the ranking supports. It names methods that more steps may put ahead of the best ones.

    The arguments are as in :func:`sentences`.
    """
    names, best, rivals = [row.position for row in ranking.rows], ranking.best, ranking.rivals
    if ranking.ranked[0].loss >= guessing:
        return "No method predicts better than guessing by frequency yet; train longer."
    if len(names) == 1:
        return f"Only {names[0]} was tried; one method is no comparison."
    if best == [baseline] and names == [baseline, *ranking.not_learning]:
        return f"No method predicts clearly better than {baseline} yet; train longer."
    if _has_one_method(ranking, baseline):
        return f"{best[0]} beats no positions; one method is no comparison."
    if len(best) == len(names):
        return "The methods are too close to rank; train longer or use more seeds."
    if len(best) > 1:
        choice = f"Take {join_words(best, 'or')}: this run cannot tell them apart."
    elif rivals:
        choice = f"Take {best[0]} for now: it leads after {steps:,} steps."
    else:
        choice = f"Take {best[0]}: it predicts this text best."
    return f"{choice} {_format_rivals(ranking)}".rstrip()


def _has_one_method(ranking: Ranking, baseline: str) -> bool:
    """Return whether a ranking has one method, which is clearly better than ``baseline``, and no other."""
    return [row.position for row in ranking.rows] == [*ranking.best[:1], baseline] and not ranking.rivals


def _format_rivals(ranking: Ranking) -> str:
    """Return a sentence about the methods that may catch up; "" if there are none."""
    rivals, losses = ranking.rivals, {row.position: row.loss for row in ranking.rows}
    if not rivals:
        return ""
    gaps = [f"{losses[name] - ranking.rows[0].loss:.2f}" for name in sorted(rivals, key=lambda name: losses[name])]
    gap = gaps[0] if gaps[0] == gaps[-1] else f"{gaps[0]} to {gaps[-1]}"
    return f"{join_words(_shorten(rivals))} {'is' if len(rivals) == 1 else 'are'} {gap} nats behind and may catch up."


def _shorten(phrases: Sequence[str]) -> list[str]:
    """Return the first phrases of a sentence, and the number of the others."""
    rest = len(phrases) - MAX_NAMES
    return [*phrases[:MAX_NAMES], f"{rest} more"] if rest > 0 else [*phrases]


@dataclass(frozen=True)
class NextComparison:
    """A comparison that may answer an open question of a ranking; ``purpose`` is the beginning of a sentence."""

    purpose: str
    positions: list[str]
    steps: int
    seeds: int


def advise(ranking: Ranking, baseline: str, guessing: float, steps: int, seeds: int) -> NextComparison | None:
    """Return the next comparison: more steps while methods may catch up, else more seeds for methods that are level.

    None if the ranking leaves nothing open, or has no two methods with positions. The arguments are as in
    :func:`sentences`, with the number of seeds.
    """
    names, best, rivals = [row.position for row in ranking.rows], ranking.best, ranking.rivals
    if len(names) == 1 or _has_one_method(ranking, baseline):
        return None
    if ranking.ranked[0].loss >= guessing or best == [baseline]:
        return NextComparison("To let the methods learn", names, STEP_FACTOR * steps, seeds)
    if rivals:
        contenders = [name for name in names if name in {*best, *rivals, baseline}]
        return NextComparison("To see who stays ahead", contenders, STEP_FACTOR * steps, seeds)
    if len(best) > 1:
        return NextComparison("To tell them apart", best, steps, max(SEEDS, 2 * seeds))
    return None
