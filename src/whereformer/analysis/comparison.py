"""What a comparison keeps of a trained model, and its table and figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from ..lab.report import losses
from ..lab.report.report import Figure
from ..lab.sheet import DASH, Cell, Column, Sheet
from .ranking import Ranking

WINDOW = 64
"""Labels in a mean held-out loss."""


@dataclass(frozen=True)
class Outcome:
    """A trained model.

    Args:
        rate: the peak of the learning rate.
        losses: the training loss of each step.
        scores: at each length, the held-out loss and the accuracy of tokens, or the reason why there is none.
        windows: the mean held-out loss of every :data:`WINDOW` labels, at the training length.
        parameters: the number of parameters of position.
        flops: operations of a training step with windows of the full length, without norms and the like; None if torch
            can't count them.
        failed: why there is no model.
    """

    rate: float
    losses: list[float]
    scores: Annotated[list[Any], list[tuple[float, float] | str]]
    windows: list[float]
    parameters: int
    flops: int | None
    failed: str = ""

    @property
    def loss(self) -> float:
        """The held-out loss at the training length."""
        return float(self.scores[0][0])


def table(
    ranking: Ranking,
    runs: Mapping[str, Mapping[int, Outcome]],
    *,
    lengths: Sequence[int],
    causal: bool,
    guessing: float,
) -> Sheet:
    """Return the ranking as a table."""
    columns = [
        Column("#"),
        Column("position", left=True),
        *(Column("loss", f"@{length}") for length in lengths),
        Column("accuracy"),
        Column("rate"),
        Column("GFLOPs", "a step"),
        Column("params"),
    ]
    rows = []
    for row in ranking.rows:
        every = list(runs[row.position].values())
        name = Cell(row.position, "not learning" if row.rank is None else "", order=row.position)
        cells = [
            Cell(DASH, title="not yet learning") if row.rank is None else Cell(str(row.rank), order=row.rank),
            name,
            *(scored([run.scores[index] for run in every]) for index in range(len(lengths))),
            Cell.of_seeds([run.scores[0][1] for run in every], "{:.1%}".format, None),
            Cell(f"{every[0].rate:.2g}", order=every[0].rate),
            Cell(DASH) if every[0].flops is None else Cell(f"{every[0].flops / 1e9:.2f}", order=every[0].flops),
            Cell(f"{every[0].parameters:,}", order=every[0].parameters),
        ]
        rows.append(cells)
    notes = [
        "Methods with the same # cannot be told apart: neither is better with every seed, by more than twice the "
        "standard error over the held-out text, and by more than another seed changes.",
        f"loss: mean cross-entropy in nats at {'all' if causal else 'the masked'} tokens of held-out text, "
        f"the median over seeds; guessing by token frequency gives {guessing:.3f}.",
        "GFLOPs: operations of a training step. params: parameters of position.",
    ]
    if ranking.waiting:
        notes.insert(1, "Without #: not yet learning, since the loss is not clearly lower than without positions.")
    goal = "causal" if causal else "masked"
    title = f"Held-out {goal}-LM loss, trained on {lengths[0]} tokens at a time (lower is better)"
    best = [number for number, row in enumerate(ranking.rows) if row.rank == 1]
    looks_of = dict.fromkeys(best, "best") if len(best) < len(ranking.ranked) else {}
    return Sheet.of(title, columns, rows, notes=(" ".join(notes),), name_column=1, sortable=True, looks=looks_of)


def curves(
    ranking: Ranking,
    runs: Mapping[str, Mapping[int, Outcome]],
    *,
    lengths: Sequence[int],
    guessing: float,
) -> Iterator[Figure]:
    """Yield the figures of losses over training and over length."""
    training, ranges = {}, {}
    for row in ranking.rows:
        every = list(runs[row.position].values())
        means = [statistics.fmean(step) for step in zip(*(run.losses for run in every), strict=True)]
        training[row.position] = losses.smoothed(means)
        found = {
            length: [run.scores[index][0] for run in every]
            for index, length in enumerate(lengths)
            if not any(isinstance(run.scores[index], str) for run in every)
        }
        ranges[row.position] = {n: (min(each), statistics.median(each), max(each)) for n, each in found.items()}
    yield Figure(
        "Training loss over steps",
        losses.over_steps(training, guessing),
        "Moving averages, and means over seeds.",
    )
    yield Figure(
        "Held-out loss over length",
        losses.over_length(ranges),
        f"Trained on {lengths[0]} tokens at a time, then tested on more. Bars: the range over seeds.",
    )


def scored(scores: Sequence[Any]) -> Cell:
    """Return the cell of the losses of all seeds at a length, or of the reason why there are none."""
    for score in scores:
        if isinstance(score, str):
            return Cell("cannot", title=score)
    return Cell.of_seeds([loss for loss, _ in scores], "{:.3f}".format, "{:.2f}".format)
