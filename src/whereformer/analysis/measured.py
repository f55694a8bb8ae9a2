"""Measures how a model attends over text: the mean weight at each offset, and what the offset alone explains.

The variance to explain is that of *log* weights. In them, content and position add up as they do in the scores, and a
key with almost no weight says as much about position as one with a large weight; in the weights themselves, only a few
large ones would count. A log weight is a score minus its row's normalizer, which depends on no single key. So the
least-squares model is ``log weight_ij = f(j - i) + r_i``, with a number for every offset and one for every row. What it
explains is relative to the rows' numbers alone: 1 for a head that sees only distance, whatever its curve.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .toeplitz import diagonal_sums, pairs

LEAST = 1e-30
"""Smaller weights count as this one, because their logarithms are only rounding error."""


class OffsetStatistics:
    """Sums over many rows of attention, by offset: O(n) numbers per head and layer, in one pass.

    Besides how often two offsets occur in the same row, the least-squares fit needs only the sums over rows of the
    centered log weights at each offset.

    Args:
        layers: the number of layers in the model.
        heads: the number of heads in a layer.
        n: the number of positions; weights are always given between all of them.
    """

    def __init__(self, layers: int, heads: int, n: int) -> None:
        self.n = n
        self.count = [0] * layers
        self.weights = torch.zeros(layers, heads, 2 * n - 1, dtype=torch.float64)
        self.logs = torch.zeros(layers, heads, 2 * n - 1, dtype=torch.float64)
        self.squares = torch.zeros(layers, heads, dtype=torch.float64)

    def add(self, layer: int, weights: Tensor) -> None:
        """Add weights (batch, heads, n, n) of a layer; rows need not sum to 1, because some keys may be left out."""
        self.count[layer] += len(weights)
        self.weights[layer] += diagonal_sums(weights).sum(0).cpu()
        logs = weights.clamp(min=LEAST).log()
        logs = logs - logs.mean(-1, keepdim=True)
        self.logs[layer] += diagonal_sums(logs).sum(0).cpu()
        self.squares[layer] += logs.square().sum((0, -2, -1)).cpu()

    def shares(self, reach: int) -> Tensor:
        """Return the mean weight at offsets -reach .. reach, (layers, heads, 2 reach + 1); NaN for layers without
        data."""
        counts = torch.tensor(self.count)[:, None, None] * pairs(self.n)
        return (self.weights / counts)[..., self.n - 1 - reach : self.n + reach]

    def explained(self) -> Tensor:
        """Return the share of log weights' variance that the offset alone explains, (layers, heads); NaN without data.

        It is 1 if the weights do not vary within their rows.
        """
        counts = torch.tensor(self.count)[:, None]
        found = (self.curves() * self.logs).sum(-1)
        still = self.squares <= 1e-9 * counts * self.n**2
        share = (found / torch.where(still, 1.0, self.squares)).clamp(0, 1)
        return torch.where(still & (counts > 0), 1.0, share)

    def curves(self) -> Tensor:
        """Return the fitted f: what the offset alone adds to log weights, (layers, heads, 2 n - 1).

        Its free constant is chosen so that its mean is 0. It is NaN for layers without data.
        """
        normal = _normal_matrix(self.n)
        # Constants are in its null space, and never part of the right-hand side.
        normal += 1 / len(normal)
        solved = torch.linalg.solve(normal, self.logs.flatten(0, 1).T).T.view_as(self.logs)
        return solved / torch.tensor(self.count)[:, None, None]


def _normal_matrix(n: int) -> Tensor:
    """Return the normal matrix of the offsets' numbers, with the rows' eliminated: ``sum over rows of diag(w) - w w^T /
    n``.

    w marks the offsets that a row has.
    """
    offset = torch.arange(1 - n, n)
    index = torch.arange(n).unsqueeze(-1)
    rows = ((offset >= -index) & (offset < n - index)).double()
    return torch.diag(rows.sum(0)) - rows.T @ rows / n
