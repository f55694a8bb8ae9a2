"""Toeplitzness: the share of a matrix over pairs of positions that depends on their offset alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Real

ROWS = 256
"""The number of rows whose diagonals are summed at a time; this takes temporary memory for twice as many rows."""


class Diagonals(NamedTuple):
    """What the offset alone tells about a matrix (..., n, n).

    Args:
        mean: (..., 2 n - 1), the mean of each diagonal, for offsets -(n - 1) .. n - 1.
        spread: (..., 2 n - 1), the standard deviation of a diagonal's entries.
        explained: (...), as :func:`toeplitzness`.
    """

    mean: Tensor
    spread: Tensor
    explained: Tensor


def toeplitzness(matrix: Real[Tensor, "*batch n n"] | Any) -> Float[Tensor, "*batch"]:
    """Return the share of the variance over a matrix's entries that its Toeplitz part holds, from 0 to 1.

    ``1 - sum (M - T)^2 / sum (M - mean(M))^2`` with :func:`toeplitz_part` T, where every entry counts once; up to
    rounding, a matrix of equal entries has 1. A matrix of independent entries has about 2 / (n + 1).

    Args:
        matrix: (..., n, n) real numbers; a tensor, or what :func:`torch.as_tensor` takes.

    Returns:
        (...) in the matrix's dtype, at least float32. Differentiable.

    Raises:
        TypeError: for complex numbers.
        ValueError: for a matrix that is not square, has no entries, or has some that are not finite.

    Source: our definition of the "degree of Toeplitzness" of Wennberg & Henter (2021), arXiv 2106.01950, Section 3.
    """
    values, dtype = _checked(matrix)
    return _explained(values, _means(values)).to(dtype)


def toeplitz_part(matrix: Real[Tensor, "*batch n n"] | Any) -> Float[Tensor, "*batch n n"]:
    """Return the nearest Toeplitz matrix: every entry is the mean of its diagonal.

    It is nearest by the sum of squared differences. Arguments and errors are those of :func:`toeplitzness`.

    Returns:
        (..., n, n) in the matrix's dtype, at least float32. Differentiable.
    """
    values, dtype = _checked(matrix)
    return from_diagonals(_means(values).to(dtype))


def diagonal_means(matrix: Real[Tensor, "*batch n n"] | Any) -> Float[Tensor, "*batch offsets"]:
    """Return the mean of every diagonal: entry ``offset + n - 1`` is that of the pairs (i, j) with ``j - i = offset``.

    Arguments and errors are those of :func:`toeplitzness`.

    Returns:
        (..., 2 n - 1) in the matrix's dtype, at least float32. Differentiable.
    """
    values, dtype = _checked(matrix)
    return _means(values).to(dtype)


def diagonals(matrix: Any) -> Diagonals:
    """Return every diagonal's mean and spread, and the Toeplitzness; takes and raises what :func:`toeplitzness`
    does."""
    values, dtype = _checked(matrix)
    means = _means(values)
    count = pairs(values.shape[-1], values.device).to(values.dtype)
    # Squares of differences: differences of large squares would be lost in rounding.
    spread = (diagonal_sums((values - from_diagonals(means)).square()) / count).sqrt()
    return Diagonals(means.to(dtype), spread.to(dtype), _explained(values, means).to(dtype))


def pairs(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return the number of pairs of n positions at each offset: ``n - |offset|``, (2 n - 1,) int64."""
    return n - torch.arange(1 - n, n, device=device).abs()


def from_diagonals(values: Float[Tensor, "*batch offsets"]) -> Float[Tensor, "*batch n n"]:
    """Return the Toeplitz matrix (..., n, n) with values (..., 2 n - 1) on its diagonals."""
    n = (values.shape[-1] + 1) // 2
    return values.unfold(-1, n, 1).flip(-2)


def diagonal_sums(values: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch offsets"]:
    """Sum every diagonal of a tensor (..., n, n): (..., 2 n - 1).

    Read with a row pitch that is longer by one, the diagonals of some rows in reverse order are columns.
    """
    n = values.shape[-1]
    sums = values.new_zeros(*values.shape[:-2], 2 * n - 1)
    for start in range(0, n, ROWS):
        rows = values[..., start : start + ROWS, :].flip(-2)
        count = rows.shape[-2]
        padded = functional.pad(rows, (0, count)).flatten(-2)
        skewed = padded[..., : count * (n + count - 1)].unflatten(-1, (count, n + count - 1))
        sums[..., n - start - count : 2 * n - 1 - start] += skewed.sum(-2)
    return sums


def fitted_curves(sums: Tensor, count: int) -> Tensor:
    """Return the f of the least-squares model ``matrix_ij = f(j - i) + r_i``, whose mean is 0, (..., 2 n - 1).

    Args:
        sums: (..., 2 n - 1), the sums over all matrices, by offset, of entries less their row's mean.
        count: the number of matrices.
    """
    n = (sums.shape[-1] + 1) // 2
    offset, index = torch.arange(1 - n, n), torch.arange(n).unsqueeze(-1)
    rows = ((offset >= -index) & (offset < n - index)).double()  # which offsets a row has
    normal = torch.diag(rows.sum(0)) - rows.T @ rows / n  # with the rows' numbers eliminated
    # Constants are in its null space, and never part of the right-hand side.
    normal += 1 / len(normal)
    return torch.linalg.solve(normal, sums.flatten(0, -2).T).T.view_as(sums) / count


def _means(values: Tensor) -> Tensor:
    return diagonal_sums(values) / pairs(values.shape[-1], values.device)


def _explained(values: Tensor, means: Tensor) -> Tensor:
    """Return the share of the entries' variance that lies between the means of the diagonals."""
    n = values.shape[-1]
    least, most = torch.aminmax(values.detach().flatten(-2), dim=-1)
    # Scale the differences so that no square overflows or vanishes.
    scale = most - least
    equal = scale <= 4 * torch.finfo(values.dtype).eps * torch.maximum(most.abs(), least.abs())
    scale = torch.where(equal, 1.0, scale)
    count = pairs(n, values.device)
    center = (means * count).sum(-1) / n**2
    between = ((means - center.unsqueeze(-1)) / scale.unsqueeze(-1)).square() @ count.to(values.dtype)
    # In place, since a large matrix takes longer to store than to compute.
    entries = (values - center[..., None, None]).div_(scale[..., None, None]).flatten(-2)
    return torch.where(equal, 1.0, between / torch.where(equal, 1.0, torch.linalg.vecdot(entries, entries))).clamp(0, 1)


def _checked(matrix: Any) -> tuple[Tensor, torch.dtype]:
    """Check the matrix and return it in float64, with the dtype of results."""
    values = torch.as_tensor(matrix)
    if values.is_complex():
        raise TypeError(f"matrix: expected real numbers, got {values.dtype}")
    if values.dim() < 2 or values.shape[-1] != values.shape[-2]:
        raise InputError("matrix", f"expected shape (..., n, n), got {tuple(values.shape)}")
    if values.shape[-1] == 0:
        raise InputError("matrix", f"expected at least one position, got shape {tuple(values.shape)}")
    dtype = torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else torch.float64
    # The sum shows faster than the entries whether all are finite; but a finite sum may overflow, so then look at all.
    if not bool(values.sum(dtype=torch.float64).isfinite()) and not bool(values.isfinite().all()):
        raise InputError("matrix", "expected finite numbers, got NaN or infinity")
    return values.to(torch.float64), dtype
