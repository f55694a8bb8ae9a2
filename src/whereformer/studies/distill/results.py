"""The contents of a distillation's ``results.json``."""

from __future__ import annotations

from dataclasses import dataclass

from ...lab.store import Results


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
