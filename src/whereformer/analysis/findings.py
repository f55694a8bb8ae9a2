"""The findings of an analysis of a model's positions, as data for reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from torch import Tensor

from .fit import TisaFit

BLIND = 0.25
"""Scores that differ by less than this change a weight by less than a third (e ** 0.25 = 1.28)."""
NEAR = 8
"""The largest distance that is near."""
POSITION_BLIND = "position-blind"


@dataclass(frozen=True)
class TableFindings:
    """The table of position embeddings E (n, width), through its Gram matrix P = E E^T."""

    gram: Tensor  # P, (n, n) float64
    part: Tensor  # the Toeplitz matrix nearest to P, (n, n)
    toeplitzness: float  # the share of P's variance that is in `part`
    width: int  # of an embedding


@dataclass(frozen=True)
class HeadFindings:
    """The effect of position on the scores of one head."""

    layer: int  # from 0
    head: int  # in the layer, from 0
    offsets: Tensor  # (2 n - 1), ascending, the offsets of `curve`
    curve: Tensor  # the mean score over all pairs of each offset
    toeplitzness: float  # the share of the variance over pairs that the curve explains
    scores: Tensor | None  # (n, n), row i the query; None for a method whose effect is a curve
    fits: tuple[TisaFit, ...]  # TISA kernels fitted to the curve, with a constant, for S = 1, 2, ...

    @property
    def range(self) -> float:
        """The largest difference that the offset makes to a score."""
        return float(self.curve.max() - self.curve.min())

    @property
    def name(self) -> str:
        """The head's kind, by the offset where its curve peaks."""
        if self.range < BLIND:
            return POSITION_BLIND
        peak = int(self.offsets[self.curve.argmax()])
        names = {-1: "previous token", 0: "around itself", 1: "next token"}
        return names.get(peak, "near" if abs(peak) <= NEAR else "far")


@dataclass(frozen=True)
class ModelFindings:
    """All findings about one model."""

    name: str  # unique among the models of a report
    position: str  # the position method
    length: int  # the number of positions that were analyzed
    num_layers: int  # the number of layers, as the model runs them
    table: TableFindings | None = None  # the table of position embeddings; None if the model has none
    heads: tuple[HeadFindings, ...] = ()  # the heads of every layer where position acts by itself, in order
    tokens: tuple[str, ...] = ()  # a sentence to look at, from the first position on
    score: float | None = None  # how good the model is, by a measure of the user's

    @property
    def by_layer(self) -> dict[int, list[HeadFindings]]:
        """The heads of each layer."""
        return {layer: list(heads) for layer, heads in groupby(self.heads, lambda head: head.layer)}

    @property
    def mean_of_heads(self) -> float | None:
        """The mean Toeplitzness of the heads; None if there are none."""
        return fmean(head.toeplitzness for head in self.heads) if self.heads else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything except matrices for JSON, in numbers with six digits."""
        content: dict[str, Any] = _for_json(asdict(self))
        return content


def _for_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _for_json(value.tolist())
    if isinstance(value, dict):
        return {name: _for_json(part) for name, part in value.items() if name not in ("gram", "part", "scores")}
    if isinstance(value, list | tuple):
        return [_for_json(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
