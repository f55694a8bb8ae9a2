"""The findings of an analysis of a model's positions, as data that reports draw."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
        how: sentences on how scores were computed (parts of the embeddings, biases, scaling).
        score: a score from the user, for the scatter plot.
        step: the training step, for checkpoints of one run.
        table: the table of position embeddings; None if the model has none.
        no_table: why there is no table.
        heads: the heads of every layer where position acts by itself; empty if it does so nowhere.
        no_heads: why there are no heads.
        attention: the attention over text; None if no text was read.
    """

    name: str
    source: str
    kind: str
    position: str
    sizes: dict[str, int]
    length: int
    how: tuple[str, ...]
    score: float | None
    step: int | None
    table: TableFindings | None
    no_table: str
    heads: tuple[HeadFindings, ...]
    no_heads: str
    attention: AttentionFindings | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON: numbers with six digits, None for missing ones, and large matrices reduced."""
        table, attention = self.table, self.attention
        return {
            "name": self.name,
            "source": self.source,
            "kind": self.kind,
            "position": self.position,
            "sizes": self.sizes,
            "length": self.length,
            "how": list(self.how),
            "score": self.score,
            "step": self.step,
            "no_table": self.no_table,
            "table": table
            and {
                "toeplitzness": _numbers(table.toeplitzness),
                "width": table.width,
                "gram": _numbers(_smaller(table.gram)),
                "part": _numbers(_smaller(table.part)),
            },
            "no_heads": self.no_heads,
            "heads": [
                {
                    "layer": head.layer,
                    "head": head.head,
                    "name": head.name,
                    "reason": head.reason,
                    "toeplitzness": _numbers(head.toeplitzness),
                    "offsets": head.offsets.tolist(),
                    "curve": _numbers(head.curve),
                    "spread": _numbers(head.spread),
                    "scores": None if head.scores is None else _numbers(_smaller(head.scores)),
                    "fits": [
                        {name: _numbers(part) for name, part in vars(fit).items()} | {"num_kernels": fit.num_kernels}
                        for fit in head.fits
                    ],
                }
                for head in self.heads
            ],
            "attention": attention
            and {
                "source": attention.source,
                "tokens": attention.tokens,
                "offsets": attention.offsets.tolist(),
                "shares": _numbers(attention.shares),
                "explained": _numbers(attention.explained),
            },
        }


def _numbers(values: Any) -> Any:
    """Convert numbers for JSON, nested like a tensor's dimensions."""
    if isinstance(values, Tensor):
        return _numbers(values.tolist())
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return float(f"{values:.6g}") if math.isfinite(values) else None


def _smaller(matrix: Tensor) -> Tensor:
    """Reduce a matrix (n, n) to the means of at most ``LARGEST`` x ``LARGEST`` parts."""
    if len(matrix) <= LARGEST:
        return matrix
    return functional.adaptive_avg_pool2d(matrix[None].to(torch.float64), LARGEST)[0]
