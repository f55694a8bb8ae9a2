"""How a model really attends over text: the mean weight at each offset, and what the offset alone explains.

What is explained are *log* weights. There content and position add up, as they do in the scores, and a key with next to
no weight tells as much about position as one with much; in the weights themselves, a few large ones would be all that
counts. A log weight is a score less its row's normaliser, which says nothing about any key. So the model that is fitted
by least squares is ``log weight_ij = f(j - i) + r_i`` with a number for every offset and one for every row, and what it
explains is compared with the rows' numbers alone: 1 for a head that sees distance only, whatever its curve.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .toeplitz import diagonal_sums, pairs

LEAST = 1e-30
"""Weights below count as this: their logarithms are those of rounding."""


class OffsetStatistics:
    """Sums over many rows of attention, kept by offset: O(n) numbers for each head of each layer, in one pass.

    The least-squares fit needs, besides how often two offsets meet in a row, only the sums over rows of the centered
    log weights at each offset.

    Args:
        layers: of the model.
        heads: of a layer.
        n: positions between which weights are given, always all of them.
    """

    def __init__(self, layers: int, heads: int, n: int) -> None:
        self.n = n
        self.count = [0] * layers
        self.weights = torch.zeros(layers, heads, 2 * n - 1, dtype=torch.float64)
        self.logs = torch.zeros(layers, heads, 2 * n - 1, dtype=torch.float64)
        self.squares = torch.zeros(layers, heads, dtype=torch.float64)

    def add(self, layer: int, weights: Tensor) -> None:
        """Weights (batch, heads, n, n) of a layer; rows need not sum to 1, as when some keys are left out."""
        self.count[layer] += len(weights)
        self.weights[layer] += diagonal_sums(weights).sum(0).cpu()
        logs = weights.clamp(min=LEAST).log()
        logs = logs - logs.mean(-1, keepdim=True)
        self.logs[layer] += diagonal_sums(logs).sum(0).cpu()
        self.squares[layer] += logs.square().sum((0, -2, -1)).cpu()

    def shares(self, reach: int) -> Tensor:
        """The mean weight at offsets -reach .. reach, (layers, heads, 2 reach + 1); NaN for a layer without any."""
        counts = torch.tensor(self.count)[:, None, None] * pairs(self.n)
        return (self.weights / counts)[..., self.n - 1 - reach : self.n + reach]

    def explained(self) -> Tensor:
        """The share of the variance of log weights that offset alone explains, (layers, heads); NaN without any.

        1 where weights do not differ within their rows.
        """
        counts = torch.tensor(self.count)[:, None]
        found = (self.curves() * self.logs).sum(-1)
        still = self.squares <= 1e-9 * counts * self.n**2
        share = (found / torch.where(still, 1.0, self.squares)).clamp(0, 1)
        return torch.where(still & (counts > 0), 1.0, share)

    def curves(self) -> Tensor:
        """f of the model that is fitted: what the offset alone adds to log weights, (layers, heads, 2 n - 1).

        Up to a constant, which is such that their mean is 0; NaN for a layer without any.
        """
        normal = _normal_matrix(self.n)
        # A constant is in its null space and in nothing that is asked of it.
        normal += 1 / len(normal)
        solved = torch.linalg.solve(normal, self.logs.flatten(0, 1).T).T.view_as(self.logs)
        return solved / torch.tensor(self.count)[:, None, None]


def _normal_matrix(n: int) -> Tensor:
    """Of the offsets' numbers, when every row's own is eliminated: ``sum over rows of diag(w) - w w^T / n``.

    w says which offsets a row has.
    """
    offset = torch.arange(1 - n, n)
    index = torch.arange(n).unsqueeze(-1)
    rows = ((offset >= -index) & (offset < n - index)).double()
    return torch.diag(rows.sum(0)) - rows.T @ rows / n
