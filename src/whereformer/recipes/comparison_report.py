"""A comparison's result of each trained model, its table and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

from ..analysis.ranking import Ranking
from ..data.windows import IGNORED
from ..errors import join_words
from ..lab import examples
from ..lab.report import score_report
from ..lab.report.report import Figure
from ..lab.sheet import DASH, Cell, Column, Sheet

if TYPE_CHECKING:
    from ..analysis.held_out import HeldOut

WINDOW = 64
"""Labels in a mean held-out loss."""
MAX_ANSWERS = 2000
"""Labels whose answers are kept, for examples."""
APART, MAX_ALIKE = 6, 2
"""Labels between two examples, so that they are of different sentences; and the most examples of the same word."""


@dataclass(frozen=True)
class ComparisonResult:
    """A trained model."""

    rate: float  # the peak of the learning rate
    losses: list[float]  # the training loss of each step
    # At each length, the held-out loss and the accuracy of tokens, or the reason why they are missing.
    scores: Annotated[list[Any], list[tuple[float, float] | str]]
    windows: list[float]  # the mean held-out loss of every `WINDOW` labels, at the training length
    parameters: int  # the number of parameters of the position method
    # Operations of a training step with windows of the full length, without norms and the like; None if torch can't
    # count them.
    flops: int | None
    failed: str = ""  # why the training failed; "" if it did not
    # The ids that the model answers for the first labels, at the training length; earlier versions recorded none.
    answers: list[int] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The held-out loss at the training length."""
        return float(self.scores[0][0])


Results = Mapping[str, Mapping[int, ComparisonResult]]
"""Trained models, by method and seed."""


def build_table(ranking: Ranking, runs: Results, *, lengths: Sequence[int], causal: bool, guessing: float) -> Sheet:
    """Return the ranking as a table."""
    columns = [
        Column("#"),
        Column("position", left=True),
        *(Column("loss", f"@{length}") for length in lengths),
        Column("accuracy"),
        Column("rate", optional=True),
        Column("GFLOPs", "a step", optional=True),
        Column("params", optional=True),
    ]
    rows = []
    for row in ranking.rows:
        results = list(runs[row.position].values())
        first = results[0]
        name = Cell(row.position, "not learning" if row.rank is None else "", order=row.position)
        cells = [
            Cell(DASH, title="not learning yet") if row.rank is None else Cell(str(row.rank), order=row.rank),
            name,
            *(loss_cell([result.scores[index] for result in results]) for index in range(len(lengths))),
            Cell.of_seeds([result.scores[0][1] for result in results], "{:.1%}".format, None),
            Cell(f"{first.rate:.2g}", order=first.rate),
            Cell(DASH) if first.flops is None else Cell(f"{first.flops / 1e9:.2f}", order=first.flops / 1e9),
            Cell(f"{first.parameters:,}", order=first.parameters),
        ]
        rows.append(cells)
    notes = [
        "Methods with the same # are too close to rank: neither is better with every seed, by more than twice the "
        "standard error over the held-out text, and by more than another seed changes.",
        f"loss: mean cross-entropy in nats at {'all' if causal else 'the masked'} tokens of held-out text, "
        f"the median over seeds; guessing by token frequency gives {guessing:.3f}.",
        "GFLOPs: operations per training step. params: parameters of the position method.",
    ]
    if ranking.not_learning:
        notes.insert(1, "No #: not learning yet; the loss is not clearly lower than without positions.")
    goal = "causal" if causal else "masked"
    title = f"Held-out {goal}-LM loss, trained on {lengths[0]} tokens at a time (lower is better)"
    best = [number for number, row in enumerate(ranking.rows) if row.rank == 1]
    looks_of = dict.fromkeys(best, "best") if len(best) < len(ranking.ranked) else {}
    return Sheet.of(title, columns, rows, notes=(" ".join(notes),), name_column=1, looks=looks_of)


def describe_longer(ranking: Ranking, runs: Results, lengths: Sequence[int]) -> list[str]:
    """Return a sentence that helps to choose among several best methods: their losses on the longest text."""
    cells = {name: loss_cell([result.scores[-1] for result in runs[name].values()]) for name in ranking.best}
    losses = [f"{name} {cell.text}" for name, cell in cells.items()]
    where = f"With {lengths[-1]} tokens at a time, {lengths[-1] / lengths[0]:g} times as many as in training"
    return [f"{where}, their losses are: {join_words(losses)}."] if len(losses) > 1 < len(lengths) else []


def build_figures(ranking: Ranking, runs: Results, *, lengths: Sequence[int], guessing: float) -> Iterator[Figure]:
    """Yield the figures of losses over training and over length."""
    training, ranges = {}, {}
    for row in ranking.rows:
        results = list(runs[row.position].values())
        means = [fmean(step) for step in zip(*(result.losses for result in results), strict=True)]
        training[row.position] = score_report.smooth(means)
        by_length = {
            length: [result.scores[index][0] for result in results]
            for index, length in enumerate(lengths)
            if not any(isinstance(result.scores[index], str) for result in results)
        }
        ranges[row.position] = {length: (min(seeds), median(seeds), max(seeds)) for length, seeds in by_length.items()}
    several = any(len(models) > 1 for models in runs.values())
    caption = f"Moving averages{', and means over seeds' * several}. Losses may jump where windows become longer."
    yield Figure("Training loss over steps", score_report.paint_over_steps(training, guessing), caption)
    bars = " Bars: the range over seeds." if several else ""
    caption = f"Trained on {lengths[0]} tokens at a time, then tested on more.{bars}"
    yield Figure("Held-out loss over length", score_report.paint_over_length(ranges), caption)


def build_examples(runs: Results, best: list[str], held_out: HeldOut, tokenizer: Any, *, causal: bool) -> list[Sheet]:
    """Return a table of words of held-out text that methods fill in, by the models of the first seed.

    First come words that most of the best methods know and most others do not, because they explain the ranking.
    """
    answers_of = {name: models[min(models)].answers for name, models in runs.items()}
    if not (limit := min(map(len, answers_of.values()))):
        return []
    targets = held_out.labels[held_out.labels != IGNORED].tolist()
    words = examples.find_words(tokenizer, held_out.inputs, held_out.labels, limit)
    right = {word: [name for name in runs if answers_of[name][word] == targets[word]] for word in words}
    differing = [word for word in words if 0 < len(right[word]) < len(runs)]
    behind = [name for name in runs if name not in best] or best
    shares = {word: [fmean(name in right[word] for name in part) for part in (best, behind)] for word in differing}
    chosen, rows = list[int](), list[list[str]]()
    for word in sorted(differing, key=lambda word: shares[word][1] - shares[word][0]):
        is_new = [targets[earlier] for earlier in chosen].count(targets[word]) < MAX_ALIKE
        if len(rows) < examples.MAX_ROWS and is_new and all(abs(word - earlier) > APART for earlier in chosen):
            chosen.append(word)
            answers = [ids[word] for ids in answers_of.values()]
            text, (answer, *by_name) = examples.fill_blank(
                *(tokenizer, held_out.inputs, held_out.labels, word, answers), causal=causal
            )
            rows.append(examples.compare_answers(text, answer, dict(zip(runs, by_name, strict=True))))
    note = (
        f"The first seed's models fill in held-out text ({examples.BLANK}). First come words that only the best know."
    )
    return examples.build_sheet("Which words does a method get right?", rows, note)


def loss_cell(scores: Sequence[Any]) -> Cell:
    """Return the cell with the losses of all seeds at a length, or with the reason why they are missing."""
    for score in scores:
        if isinstance(score, str):
            return Cell("n/a", title=score)
    return Cell.of_seeds([loss for loss, _ in scores], "{:.3f}".format, "{:.2f}".format)
