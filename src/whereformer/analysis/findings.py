"""The findings of an analysis of a model's positions, as data that reports draw."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .fit import TisaFit

LARGEST = 32
"""The most rows of a matrix in :meth:`ModelFindings.to_dict`; larger ones are reduced to means over squares."""


@dataclass(frozen=True)
class TableFindings:
    """The table of position embeddings E (n, width), through its Gram matrix P = E E^T.

    Args:
        gram: P, (n, n) float64.
        part: the Toeplitz matrix nearest to P, (n, n).
        toeplitzness: the share of P's variance that is in ``part``.
        width: the width of an embedding.
    """

    gram: Tensor
    part: Tensor
    toeplitzness: float
    width: int


@dataclass(frozen=True)
class HeadFindings:
    """What position alone adds to the scores of one head.

    Args:
        layer, head: the head's place; both count from 0.
        offsets: (2 n - 1), ascending, the offsets of ``curve``.
        curve: the mean score over all pairs of each offset.
        spread: the standard deviation over those pairs; zeros for a method whose effect is a curve.
        toeplitzness: the share of the variance over pairs that the curve explains.
        scores: (n, n), row i the query; None for a method whose effect is a curve.
        fits: TISA kernels fitted to the curve, with a constant, for S = 1, 2, ...
        name: "previous token", "next token", "local window", "global", "position-blind"..., by the rules of
            :mod:`whereformer.analysis.naming`.
        reason: the numbers that decided the name, as a person reads them.
    """

    layer: int
    head: int
    offsets: Tensor
    curve: Tensor
    spread: Tensor
    toeplitzness: float
    scores: Tensor | None
    fits: tuple[TisaFit, ...]
    name: str
    reason: str


@dataclass(frozen=True)
class AttentionFindings:
    """Attention measured over text.

    Args:
        source: where the text came from.
        tokens: the number of tokens that were read.
        offsets: (m,), ascending.
        shares: (layers, heads, m), the mean weight that a head gives to a key at each offset; NaN in layers between
            pooled sequences, whose offsets are not those of tokens.
        explained: (layers, heads), the share of the variance of log weights that the offset alone explains, as
            :mod:`whereformer.analysis.measured` says; NaN in the same layers.
    """

    source: str
    tokens: int
    offsets: Tensor
    shares: Tensor
    explained: Tensor


@dataclass(frozen=True)
class ModelFindings:
    """All findings about one model, or one checkpoint of a run.

    Args:
        name: a short name, unique among the models of a report.
        source: where the model was loaded from.
        kind: transformers' model_type.
        position: the name of the position method.
        sizes: "layers", "heads", "head_dim", "hidden_size", "positions" and so on.
        length: the number of positions that were analyzed.
        score: a score from the user.
        step: the training step, for checkpoints of one run.
        table: the table of position embeddings; None if the model has none.
        heads: the heads of every layer where position acts by itself, in order; empty if it does so nowhere.
        attention: the attention over text; None if no text was read.
    """

    name: str
    source: str
    kind: str
    position: str
    sizes: dict[str, int]
    length: int
    score: float | None = None
    step: int | None = None
    table: TableFindings | None = None
    heads: tuple[HeadFindings, ...] = ()
    attention: AttentionFindings | None = None

    @property
    def by_layer(self) -> dict[int, list[HeadFindings]]:
        """The heads of each layer."""
        return {layer: list(heads) for layer, heads in groupby(self.heads, lambda head: head.layer)}

    @property
    def mean_of_heads(self) -> float | None:
        """The mean Toeplitzness of the heads; None if there are none."""
        return fmean(head.toeplitzness for head in self.heads) if self.heads else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON: numbers with six digits, None for missing ones, and large matrices reduced."""
        return {**_for_json(self), "score": self.score}


def _for_json(value: Any, name: str = "") -> Any:
    if isinstance(value, Tensor):
        return _for_json((_smaller(value) if name in ("gram", "part", "scores") else value).tolist())
    if isinstance(value, ModelFindings | TableFindings | HeadFindings | AttentionFindings):
        return _for_json(vars(value))
    if isinstance(value, TisaFit):
        return _for_json({**vars(value), "num_kernels": value.num_kernels})
    if isinstance(value, dict):
        return {name: _for_json(part, name) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _smaller(matrix: Tensor) -> Tensor:
    """Reduce a matrix (n, n) to the means of at most ``LARGEST`` x ``LARGEST`` parts."""
    if len(matrix) <= LARGEST:
        return matrix
    return functional.adaptive_avg_pool2d(matrix[None].to(torch.float64), LARGEST)[0]
