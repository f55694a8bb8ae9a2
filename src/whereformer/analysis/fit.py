"""``fit_tisa``: fits TISA's kernels to curves over offsets.

The problem is not convex in sharpness and center; with these fixed, the amplitudes are a linear least-squares problem
(variable projection). Kernels are added one at a time. Each time, a grid of candidates is tried next to the existing
kernels. The best few of different widths become starts, and all kernels of every start are refined together by
Levenberg-Marquardt. All curves and starts take the same steps together, so nothing is random, and twelve heads are as
quick as a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .toeplitz import pairs

WIDTHS, STARTS = 20, 5
"""The number of widths in the grid, and of its kernels that are refined, each with another width."""
NEAR, FAR = 16, 32
"""The grid has a center at each offset up to the first number, and on each side about the second number of centers with
equal distances."""
MAX_STEPS, MAX_IDLE = 40, 6
"""The largest number of refinement steps, and the number of steps without gain for any curve that ends refinement."""
RIDGE = 1e-6
"""The cost of a kernel whose amplitude equals the curve's size, relative to the curve's variance. A pair of kernels
that nearly cancel, with amplitudes thirty times as large, therefore has to explain a share of 0.002 more."""
MAX_SHARPNESS = 12.0
"""The largest sharpness, per squared token: the kernel vanishes one token away."""
MIN_SHARPNESS = 0.1
"""The smallest sharpness, times the squared largest offset: such a kernel is nearly constant over all offsets."""
OUTSIDE = 1.5
"""Centers may be this many times as far out as the offsets, where a kernel still leaves a tail."""
EVEN = 1e-15
"""A curve that varies by no more than this, relative to its size, counts as constant: float64 rounds by as much."""


@dataclass(frozen=True)
class TisaFit:
    """Kernels ``sum_s amplitude_s * exp(-|sharpness_s| * (offset - center_s) ** 2)`` near a curve.

    Args:
        amplitude, sharpness, center: (..., num_kernels), as in :class:`whereformer.positions.tisa.Tisa`; the kernel
            that explains most comes first.
        constant: (...), added at all offsets; the softmax does not see it.
        explained: (...), the share of the curve's variance around its mean, with each offset counted as often as it
            occurs. It is negative if the mean itself is nearer, which can happen without a constant, and 1 for a curve
            without variance.
    """

    amplitude: Tensor
    sharpness: Tensor
    center: Tensor
    constant: Tensor
    explained: Tensor

    def curve(self, offsets: Tensor | Sequence[float]) -> Tensor:
        """Return the sum of the kernels and the constant at offsets (m,): (..., m)."""
        values = torch.as_tensor(offsets, device=self.amplitude.device).to(self.amplitude.dtype)
        shapes = kernels(values, self.sharpness.abs(), self.center)
        return (shapes * self.amplitude.unsqueeze(-2)).sum(-1) + self.constant.unsqueeze(-1)

    def __getitem__(self, index: Any) -> TisaFit:
        """Return the fit of some of the curves."""
        return TisaFit(*(tensor[index] for tensor in vars(self).values()))


def fit_tisa(curve: Any, num_kernels: int, *, constant: bool = False) -> TisaFit:
    """Fit TISA's kernels to curves over offsets, each with its own, by weighted least squares.

    Each offset weighs as much as it occurs among n positions, ``n - |offset|``, so the nearest curve gives the nearest
    matrix. The search goes downhill from a few starts, so the best kernels are likely but not certain to be found. With
    one kernel more than a random curve was made of, the fit explained all of the variance except a share of 0.005, for
    all except a few curves in a thousand.

    Sharpnesses are positive; amplitudes of kernels that nearly cancel are kept from growing without bounds by a slight
    penalty (:data:`RIDGE`).

    Args:
        curve: (..., 2 n - 1) real numbers, at offsets -(n - 1) .. n - 1; a tensor, or anything that
            :func:`torch.as_tensor` accepts.
        num_kernels: the number of kernels, S.
        constant: whether to fit a constant too, which a softmax over all keys does not see.

    Returns:
        The fit, in float64.

    Raises:
        ValueError: for sizes that do not fit, numbers that are not real and finite, or a negative number of kernels.
    """
    return fit_tisa_up_to(curve, num_kernels, constant=constant)[num_kernels]


@torch.no_grad()
def fit_tisa_up_to(curve: Any, num_kernels: int, *, constant: bool = False) -> tuple[TisaFit, ...]:
    """Return the fits of :func:`fit_tisa` with 0, 1, ... ``num_kernels`` kernels, in about the time of the last one."""
    values = torch.as_tensor(curve)
    if values.dim() < 1 or values.shape[-1] % 2 == 0:
        raise InputError("curve", f"expected shape (..., 2 n - 1), an odd number of offsets, got {tuple(values.shape)}")
    if values.is_complex() or not bool(values.isfinite().all()):
        raise InputError("curve", "expected finite real numbers, got NaN, infinity or complex ones")
    if num_kernels < 0:
        raise InputError("num_kernels", f"expected at least 0, got {num_kernels}")
    values = values.double()
    problem = _Problem.of(values.reshape(-1, values.shape[-1]), constant)
    params = values.new_zeros(len(problem.target), 2, 0)
    fits = [problem.fit(params)]
    for _ in range(num_kernels):
        params = _add_kernel(problem, params)
        fits.append(problem.fit(params))
    batch = values.shape[:-1]
    return tuple(TisaFit(*(part.view(batch + part.shape[1:]) for part in vars(fit).values())) for fit in fits)


def kernels(offsets: Tensor, sharpness: Tensor, center: Tensor) -> Tensor:
    """Return ``exp(-sharpness (offset - center) ** 2)``, (..., offsets, num_kernels)."""
    return torch.exp(-sharpness.unsqueeze(-2) * (offsets.unsqueeze(-1) - center.unsqueeze(-2)) ** 2)


@dataclass(frozen=True)
class _Problem:
    """Curves scaled to at most 1, and weights that sum to 1.

    The search varies the kernels' ``params``, (items, 2, num_kernels): log sharpness and center.
    """

    target: Tensor  # (items, m)
    offsets: Tensor  # (m,)
    weights: Tensor  # (m,)
    constant: bool  # whether a constant is fitted
    middle: Tensor  # (items,), subtracted from each curve: its mean if there is a constant, else 0
    scale: Tensor  # (items,), the unit of each curve
    ridge: Tensor  # (items,), the cost of a squared amplitude

    @classmethod
    def of(cls, curve: Tensor, constant: bool) -> _Problem:
        n = (curve.shape[-1] + 1) // 2
        offsets, weights = torch.arange(1 - n, n).to(curve), pairs(n).to(curve) / n**2
        middle = curve @ weights * float(constant)
        target = curve - middle.unsqueeze(-1)
        size = target.abs().amax(-1)
        even = size <= EVEN * curve.abs().amax(-1)  # without its mean, a large curve is only as exact as its rounding
        scale = torch.where(even, 1.0, size)
        target = torch.where(even, 0.0, target.T / scale).T
        variance = (target - (target @ weights).unsqueeze(-1)).square() @ weights
        return cls(target, offsets, weights, constant, middle, scale, RIDGE * variance.clamp(min=1e-6))

    @property
    def limits(self) -> tuple[float, float, float]:
        """The smallest and the largest log sharpness, and the largest center."""
        furthest = self.offsets[-1].clamp(min=1.0)
        low, high = (MIN_SHARPNESS / furthest**2).log(), furthest.new_tensor(MAX_SHARPNESS).log()
        return float(low), float(high), OUTSIDE * float(furthest)

    def __getitem__(self, index: Any) -> _Problem:
        per_item = (part[index] for part in (self.middle, self.scale, self.ridge))
        return _Problem(self.target[index], self.offsets, self.weights, self.constant, *per_item)

    def basis(self, params: Tensor) -> Tensor:
        """Return the kernels' values, (items, m, num_kernels + 1), the constant last."""
        values = kernels(self.offsets, params[:, 0].exp(), params[:, 1])
        last = torch.full_like(self.target, float(self.constant)).unsqueeze(-1)
        return torch.cat((values, last), -1)

    def gram(self, basis: Tensor) -> Tensor:
        """Return the weighted products of the basis, with penalties, (items, num_kernels + 1, num_kernels + 1)."""
        return basis.mT @ (basis * self.weights.unsqueeze(-1)) + torch.diag_embed(self.penalty(basis))

    def penalty(self, basis: Tensor) -> Tensor:
        """Return the cost of a squared amplitude, (items, num_kernels + 1); a constant costs what rounding needs."""
        penalty = self.ridge.unsqueeze(-1).repeat(1, basis.shape[-1])
        penalty[:, -1] = 1e-14 if self.constant else 1.0
        return penalty

    def solve(self, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best amplitudes (items, num_kernels + 1), the residual (items, m), and the loss, (items,)."""
        amplitude = torch.linalg.solve(self.gram(basis), torch.einsum("imk,im->ik", basis, self.target * self.weights))
        rest = self.target - torch.einsum("imk,ik->im", basis, amplitude)
        return amplitude, rest, rest.square() @ self.weights + (self.penalty(basis) * amplitude.square()).sum(-1)

    def fit(self, params: Tensor) -> TisaFit:
        """Return the kernels with their best amplitudes, in the curves' units, and the share that they explain."""
        basis = self.basis(params)
        amplitude, rest, _ = self.solve(basis)
        variance = (self.target - (self.target @ self.weights).unsqueeze(-1)).square() @ self.weights
        tiny = variance <= EVEN**2
        explained = torch.where(tiny, 1.0, 1 - rest.square() @ self.weights / torch.where(tiny, 1.0, variance))
        unscaled = amplitude * self.scale.unsqueeze(-1)
        moved = unscaled.abs() * torch.einsum("imk,m->ik", basis, self.weights)
        order = moved[:, :-1].argsort(-1, descending=True)
        three = unscaled[:, :-1], params[:, 0].exp(), params[:, 1]
        amplitude, sharpness, center = (part.gather(-1, order) for part in three)
        return TisaFit(amplitude, sharpness, center, self.middle + unscaled[:, -1], explained)


def _add_kernel(problem: _Problem, params: Tensor) -> Tensor:
    """Return the best kernels, with one more than ``params``."""
    starts = _find_starts(problem, params)
    items = torch.arange(len(starts)).repeat_interleave(STARTS)
    refined, loss = _refine(problem[items], starts.flatten(0, 1))
    best = loss.view(-1, STARTS).argmin(-1)
    return refined.view_as(starts)[torch.arange(len(starts)), best]


def _find_starts(problem: _Problem, params: Tensor) -> Tensor:
    """Extend ``params`` by each of the most promising kernels of a grid, (items, STARTS, 2, num_kernels + 1).

    A kernel's promise is the decrease of the loss if it is added and all amplitudes are optimal again.
    """
    low, high, _ = problem.limits
    offsets, n = problem.offsets, len(problem.offsets) // 2 + 1
    center = offsets[(offsets.abs() <= NEAR) | (offsets % max(1, n // FAR) == 0)]
    log_sharpness = torch.linspace(low, high, WIDTHS).to(center)
    grid = torch.stack([part.flatten() for part in torch.broadcast_tensors(log_sharpness[:, None], center)])
    shapes = kernels(offsets, grid[0].exp(), grid[1])  # (m, grid)
    weighted = shapes * problem.weights.unsqueeze(-1)
    basis = problem.basis(params)
    shared = weighted.T @ basis  # (items, grid, num_kernels + 1)
    alone = (weighted * shapes).sum(0) + problem.ridge.unsqueeze(-1)
    alone = alone - ((shared @ torch.linalg.inv(problem.gram(basis))) * shared).sum(-1)
    promise = (problem.solve(basis)[1] @ weighted).square() / alone.clamp(min=problem.ridge.unsqueeze(-1))
    value, index = promise.unflatten(-1, (WIDTHS, -1)).max(-1)  # the best center of every width
    best = value.topk(STARTS, -1).indices
    new = grid[:, best * len(center) + index.gather(-1, best)].movedim(0, -1).unsqueeze(-1)
    return torch.cat((params.unsqueeze(1).expand(-1, STARTS, -1, -1), new), -1)


def _refine(problem: _Problem, params: Tensor) -> tuple[Tensor, Tensor]:
    """Refine sharpness and center by Levenberg-Marquardt, with optimal amplitudes; also return the loss, (items,)."""
    low, high, reach = problem.limits
    basis = problem.basis(params)
    current: tuple[Tensor, ...] = (params, basis, *problem.solve(basis))
    damping, idle = torch.full_like(problem.ridge, 1e-2), 0
    for _ in range(MAX_STEPS):
        params, basis, amplitude, rest, _ = current
        moved = params + _step(problem, params, basis, amplitude, rest, damping)
        moved = torch.stack((moved[:, 0].clamp(low, high), moved[:, 1].clamp(-reach, reach)), 1)
        basis = problem.basis(moved)
        candidate = (moved, basis, *problem.solve(basis))
        gain = current[-1] - candidate[-1]
        better = [(gain > 0).view(-1, *[1] * (old.dim() - 1)) for old in current]
        current = tuple(map(torch.where, better, candidate, current))
        damping = (damping * torch.where(gain > 0, 0.2, 4.0)).clamp(1e-9, 1e6)
        idle = 0 if bool((gain > 1e-6 * candidate[-1]).any()) else idle + 1
        if idle == MAX_IDLE:
            break
    return current[0], current[-1]


def _step(problem: _Problem, params: Tensor, basis: Tensor, amplitude: Tensor, rest: Tensor, damping: Tensor) -> Tensor:
    """Return a damped Gauss-Newton step of the kernels; amplitudes move along (Kaufman's projection)."""
    distance = problem.offsets[:, None] - params[:, 1].unsqueeze(1)
    slope = basis[..., :-1] * (amplitude[:, :-1] * params[:, 0].exp()).unsqueeze(1) * distance
    jacobian = torch.cat((basis, -slope * distance, 2 * slope), -1)
    weighted = jacobian * problem.weights.unsqueeze(-1)
    linear = basis.shape[-1]
    normal = weighted.mT @ jacobian
    normal[:, :linear, :linear] += torch.diag_embed(problem.penalty(basis))
    gradient = torch.einsum("imk,im->ik", weighted, rest)
    gradient[:, :linear] -= problem.penalty(basis) * amplitude
    # Damp relative to the curvature of each parameter, and slightly if a parameter has none.
    diagonal = normal.diagonal(0, -2, -1)[:, linear:]
    floor = 1e-6 * diagonal.amax(-1, keepdim=True) + 1e-14
    normal[:, linear:, linear:] += torch.diag_embed(damping.unsqueeze(-1) * (diagonal + floor))
    normal.diagonal(0, -2, -1).add_(1e-15)
    return torch.linalg.solve(normal, gradient)[:, linear:].clamp(-100, 100).view_as(params)
