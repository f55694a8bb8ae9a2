"""What an analysis finds about a model's positions: filled by :mod:`whereformer.tasks.analyze`, drawn by its report."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .fit import TisaFit


@dataclass(frozen=True)
class TableFindings:
    """The table of position embeddings E (n, width), through its Gram matrix P = E E^T.

    Args:
        gram: P, (n, n) float64.
        part: the nearest Toeplitz matrix, (n, n).
        toeplitzness: the share of P's variance that is in it.
        width: of an embedding.
    """

    gram: Tensor
    part: Tensor
    toeplitzness: float
    width: int


@dataclass(frozen=True)
class HeadFindings:
    """What position alone adds to the scores of one head.

    Args:
        layer, head: which; both count from 0.
        offsets: (2 n - 1), ascending, those of ``curve``.
        curve: the mean over all pairs of that offset, in units of scores.
        spread: the standard deviation over them; zeros for a method whose effect is a curve.
        toeplitzness: the share of the variance over pairs that the curve explains.
        scores: (n, n), row i the query; None for a method whose effect is a curve.
        fits: TISA kernels fitted to the curve, for S = 1, 2, ...
        name: "previous token", "next token", "local window", "global", "position-blind"..., by stated rules.
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
        source: of the text.
        tokens: that were read.
        offsets: (m,), ascending.
        shares: (layers, heads, m), the mean weight that a head gives to a key at each offset.
        explained: (layers, heads), the share of the variance of log weights that the offset alone explains.
    """

    source: str
    tokens: int
    offsets: Tensor
    shares: Tensor
    explained: Tensor


@dataclass(frozen=True)
class ModelFindings:
    """All about one model, or one checkpoint of a run.

    Args:
        name: short, unique among the models of a report.
        source: where it was loaded from.
        kind: transformers' model_type.
        position: the method's name.
        sizes: "layers", "heads", "head_dim", "hidden_size", "positions"...
        length: positions that were looked at.
        how: sentences on how scores were taken (which parts of the embeddings, biases, scaling).
        score: that the user gave, for the scatter.
        step: of training, for checkpoints of one run.
        table: None if the model has no position embeddings; then ``no_table`` says why.
        no_table: why not.
        heads: of every layer where position acts by itself; empty if nowhere, then ``no_heads`` says why.
        no_heads: why not.
        attention: None if no text was read.
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
