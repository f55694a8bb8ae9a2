"""Toeplitzness: the share of a matrix over pairs of positions that depends only on their offset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Real


ROWS = 256
"""The number of rows whose diagonals are summed at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Diagonals:
    """The part of a matrix that depends only on the offset; each property is computed when it is first read.

    Args:
        matrix: (..., n, n) float64.
        largest: (...), the largest absolute value of the entries.
    """

    matrix: Tensor
    largest: Tensor

    @property
    def count(self) -> Tensor:
        """The number of entries of each diagonal, (2 n - 1,) float64."""
        return pairs(self.matrix.shape[-1], self.matrix.device).double()

    @cached_property
    def mean(self) -> Tensor:
        """The mean of each diagonal, for offsets -(n - 1) .. n - 1, (..., 2 n - 1)."""
        return diagonal_sums(self.matrix) / self.count

    @cached_property
    def spread(self) -> Tensor:
        """The standard deviation of each diagonal's entries, (..., 2 n - 1)."""
        # Squares of differences: differences of large squares would be lost in rounding.
        return (diagonal_sums((self.matrix - from_diagonals(self.mean)).square()) / self.count).sqrt()

    @cached_property
    def explained(self) -> Tensor:
        """The Toeplitzness, (...), as :func:`toeplitzness`."""
        count, entries = self.count, self.matrix.shape[-1] ** 2
        center = (self.mean @ count).unsqueeze(-1) / entries
        between = (self.mean - center).square() @ count
        total = entries * self.matrix.var((-1, -2), correction=0)
        rounding = (4 * torch.finfo(torch.float64).eps * self.matrix.shape[-1] * self.largest).square()
        equal = total <= rounding
        return torch.where(equal, 1.0, between / torch.where(equal, 1.0, total)).clamp(0, 1)


def toeplitzness(matrix: Real[Tensor, "*batch n n"] | Any) -> Float[Tensor, "*batch"]:
    """Return the share of the variance over a matrix's entries that its Toeplitz part holds, from 0 to 1.

    ``1 - sum (M - T)^2 / sum (M - mean(M))^2`` with :func:`toeplitz_part` T, where every entry counts once; up to
    rounding, a matrix of equal entries has 1. A matrix of independent entries has about 2 / (n + 1).

    Args:
        matrix: (..., n, n) real numbers; a tensor, or anything that :func:`torch.as_tensor` accepts.

    Returns:
        (...) float64. Differentiable.

    Raises:
        ValueError: for a matrix that is not square, is empty, or has an entry that is not real and finite.

    Source: our definition of the "degree of Toeplitzness" of Wennberg & Henter (2021), arXiv 2106.01950, Section 3.
    """
    return diagonals(matrix).explained


def toeplitz_part(matrix: Real[Tensor, "*batch n n"] | Any) -> Float[Tensor, "*batch n n"]:
    """Return the nearest Toeplitz matrix, by the sum of squared differences: every entry is the mean of its diagonal.

    Arguments and errors are as in :func:`toeplitzness`; the result, (..., n, n) float64, is differentiable.
    """
    return from_diagonals(diagonals(matrix).mean)


def diagonals(matrix: Any) -> Diagonals:
    """Return every diagonal's mean and spread, and the Toeplitzness.

    Arguments and errors are as in :func:`toeplitzness`.
    """
    values = torch.as_tensor(matrix)
    if values.dim() < 2 or values.shape[-1] != values.shape[-2] or values.shape[-1] == 0:
        raise InputError("matrix", f"expected shape (..., n, n), n at least 1, got {tuple(values.shape)}")
    if not values.is_complex():
        values = values.double()
        lowest, highest = torch.aminmax(values.detach().flatten(-2), dim=-1)  # NaN if an entry is
        largest = torch.maximum(highest, -lowest)
        if bool(largest.isfinite().all()):
            return Diagonals(values, largest)
    raise InputError("matrix", "expected finite real numbers, got NaN, infinity or complex ones")


def pairs(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return the number of pairs of n positions at each offset: ``n - |offset|``, (2 n - 1,) int64."""
    return n - torch.arange(1 - n, n, device=device).abs()


def from_diagonals(values: Float[Tensor, "*batch offsets"]) -> Float[Tensor, "*batch n n"]:
    """Return the Toeplitz matrix (..., n, n) with values (..., 2 n - 1) on its diagonals."""
    n = (values.shape[-1] + 1) // 2
    return values.unfold(-1, n, 1).flip(-2)


def diagonal_sums(values: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch offsets"]:
    """Sum every diagonal of a tensor (..., n, n): (..., 2 n - 1).

    If rows are read in reverse order, with a row pitch that is longer by one, diagonals become columns.
    """
    n = values.shape[-1]
    sums = values.new_zeros(*values.shape[:-2], 2 * n - 1)
    for start in range(0, n, ROWS):
        rows = values[..., start : start + ROWS, :].flip(-2)
        count = rows.shape[-2]
        padded = functional.pad(rows, (0, count)).flatten(-2)
        columns = padded[..., : count * (n + count - 1)].unflatten(-1, (count, n + count - 1))
        sums[..., n - start - count : 2 * n - 1 - start] += columns.sum(-2)
    return sums
