"""The contents of a distillation's ``results.json``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...lab.sheet import Column, Sheet
from ...lab.store import Results

TRAINED, DROPPED = "as trained", "without positions"
SCORES = {
    "similarity": (Column("similarity", "cosine"), "{:.3f}"),
    "masked_lm_loss": (Column("masked-LM", "loss"), "{:.3f}"),
    "masked_lm_accuracy": (Column("masked-LM", "accuracy"), "{:.1%}"),
    "spearman": (Column("pairs", "Spearman"), "{:.3f}"),
}
"""How scores are shown, by name."""


@dataclass(frozen=True)
class DistillText:
    """The text that was read: windows of ``length`` tokens, ``held_out`` of which judge the models."""

    source: str
    windows: int
    length: int
    held_out: int


@dataclass(frozen=True)
class PairsFacts:
    """Where the pairs of texts come from, and how many there are."""

    source: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class DistillResults(Results):
    """How a model scores when kernels replace its positions.

    Args:
        model: a folder or an id on the Hub.
        kind: transformers' name for this kind of model.
        position: the model's own position method.
        text: facts about the text that kernels were fitted to.
        scores: the scores by model ("as trained", "S=3"...) and name.
        explained: for each model, the share of each curve that its kernels explain, [layer][head].
        pairs: facts about the pairs that also judged the models, if there were any.
    """

    FORMAT = "distill-positions 1"
    INDENT = 1

    model: str
    kind: str
    position: str
    text: DistillText
    scores: dict[str, dict[str, float]]
    explained: dict[str, list[list[float]]]
    pairs: PairsFacts | None = None

    def sheets(self) -> Sequence[Sheet]:
        shown = [name for name in SCORES if name in self.scores[TRAINED]]
        rows = []
        for model, scores in self.scores.items():
            explained = [value for layer in self.explained.get(model, ()) for value in layer]
            mean = f"{statistics.mean(explained):.0%}" if explained else "-"
            rows.append([model, *(SCORES[name][1].format(scores[name]) for name in shown), mean])
        columns = [Column("positions"), *(SCORES[name][0] for name in shown), Column("curves", "explained")]
        return [Sheet.of("Before any training", columns, rows)]

    def sentences(self) -> Sequence[str]:
        *_, best = self.scores
        kept, dropped = (f"{self.scores[name]['similarity']:.3f}" for name in (best, DROPPED))
        return [
            f"With {best.removeprefix('S=')} kernels per head, the model's states have a similarity of {kept} to those "
            f"before; without positions, {dropped}."
        ]
