"""Sentences that reports may conclude from results: each rule is one function, which sees numbers and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..errors import join_words

BASELINE = "none"
"""The method without positions."""
PROBE_STEPS = 500
"""With this number of steps, the default, methods learn the tasks that they can; failures after fewer show nothing."""
MIN_DOCUMENTS = 10
"""With fewer held-out documents, a random choice finds the right one in more than 10% of the cases."""


def find_counting_tasks(solved: Mapping[str, Mapping[str, bool]]) -> list[str]:
    """Return the tasks that need positions: a task that the method without positions solves counts for no method.

    ``solved`` says by method and task whether the method solves the task.
    """
    tasks = next(iter(solved.values()))
    return [task for task in tasks if not solved.get(BASELINE, {}).get(task)]


def compare_solved(solved: Mapping[str, Mapping[str, bool]], symbols: int, steps: int, *, trained: bool) -> str | None:
    """Return a sentence about the methods that solve the most tasks; None if nothing can be concluded.

    ``trained``: whether ``symbols`` is the training length. A method that failed a task there shows nothing at others.
    """
    tasks, methods = find_counting_tasks(solved), [name for name in solved if name != BASELINE]
    counts = {name: sum(solved[name][task] for task in tasks) for name in methods}
    if not tasks or not methods:
        return None
    best, of_tasks = max(counts.values()), f"of {len(tasks)} tasks that need positions"
    leaders = [name for name, count in counts.items() if count == best]
    which = f"the task {tasks[0]}" if len(tasks) == 1 else f"{best} {of_tasks}"
    solve = f"{join_words(leaders)} {'solves' if len(leaders) == 1 else 'solve'} {which} at {symbols} symbols"
    if steps < PROBE_STEPS and (not trained or min(counts.values()) < len(tasks)):
        so_far = f"; so far, {solve}" if best else ""
        too_few = f"{steps} steps are too few to compare methods{so_far}. Train for {PROBE_STEPS} steps or more."
        return too_few if trained else None
    if not best:
        return f"No method solves a task that needs positions at {symbols} symbols."
    return f"{solve}{', the most' if len(leaders) < len(methods) and best < len(tasks) else ''}."


def describe_layers(layers: Sequence[int], num_layers: int, *, embedded: bool) -> str:
    """Return a sentence about the layers that were read and the reason to leave out the others; "" if all were read.

    ``embedded``: whether positions are in the embeddings.
    """
    if not layers or len(layers) == num_layers:
        return ""
    reason = "in the others, position does not act by itself"
    if embedded and [*layers] == [0]:
        reason = "positions are in the embeddings, which deeper layers mix with everything else"
    return f"Only layer{'s' * (len(layers) > 1)} {join_words(layers)} of 0 to {num_layers - 1} can be read: {reason}."


def warn_of_few_documents(held_out: int, interval: int) -> str:
    """Return a sentence if documents are too few to conclude anything from retrieval, else "".

    ``held_out`` is the number of held-out documents, one in ``interval``.
    """
    if held_out >= MIN_DOCUMENTS:
        return ""
    chance = f"{held_out} documents are too few to conclude from: a random choice finds {1 / held_out:.0%} of passages"
    return f"{chance}. With {MIN_DOCUMENTS * interval} documents, {MIN_DOCUMENTS} are held out."


@dataclass(frozen=True)
class Gain:
    """The gain of the best of some models over a baseline, by one metric, as in Table 3 of the TISA paper."""

    baseline: Sequence[float]  # the baseline's scores in percent, one per seed
    models: Sequence[Sequence[float]]  # the scores of the other models, at least one

    @property
    def points(self) -> float:
        """The largest difference of medians, in points; negative if all models are worse than the baseline."""
        return max(map(median, self.models)) - median(self.baseline)

    @property
    def error_reduction(self) -> float | None:
        """The share of the baseline's errors that it removes, in percent; None if the baseline has no errors.

        From 57.2 to 58.5 is a gain of 1.3 points, 3.0% of the errors.
        """
        errors = 100 - median(self.baseline)
        return 100 * self.points / errors if errors else None

    @property
    def is_clear(self) -> bool:
        """Whether every seed of the best model is better than every seed of the baseline; never with one seed."""
        best = max(self.models, key=median)
        return len(self.baseline) > 1 and min(best) > max(self.baseline)


def choose_method(gains: Sequence[tuple[Gain, str, str, str]], seeds: int) -> str:
    """Return the position method that fine-tuning supports, or what to do to find one.

    Each gain has its position method, task and metric; there are none without a baseline.
    """
    if not gains:
        return "Fine-tuned; no method has a baseline. Name several methods, or add 0 to --kernels."
    better = [labeled for labeled in gains if labeled[0].points > 0]
    if not better:
        return "Keep the baseline: no position method gained over it."
    clear = [labeled for labeled in better if labeled[0].is_clear]
    best, position, task, metric = max(clear or better, key=lambda labeled: labeled[0].points)
    gain = f"{best.points:.1f} points on the task {task} ({metric})"
    if not clear and seeds == 1:
        return f"{position} gained {gain} with one seed, which may be chance. Use several seeds (--seeds 5)."
    if not clear:
        return f"Keep the baseline: {position} gained {gain}, but not with every seed."
    losses = [f"{row[2]} ({row[3]})" for row in gains if row[1] == position and row[0].points < 0]
    but = f"; it is worse on {join_words(losses)}" if losses else ""
    return f"Take {position}: with every seed, it is better than the baseline, by {gain}{but}."
