"""``fit_tisa``: fits TISA's kernels to curves over offsets.

The problem is not convex in sharpness and center; for given ones the amplitudes are a linear least-squares problem
(variable projection). Kernels are added one at a time. Each time, a grid of candidates is tried beside the existing
kernels. The best few of different widths become starts, and all kernels of every start are refined together by
Levenberg-Marquardt. All curves and starts take the same steps together, so nothing is random, and 144 heads are as
quick as a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from .toeplitz import pairs

STARTS = 5
"""The number of the grid's kernels that are refined, each with another width."""
SCREENING_STEPS = 15
"""The number of refinement steps after which only the best start of a curve continues."""
STEPS = 100
"""The most refinement steps."""
RIDGE = 1e-6
"""The cost of a kernel whose amplitude equals the curve's range, relative to the curve's variance. A pair of kernels
that nearly cancel, with amplitudes thirty times as large, therefore has to explain a share of 0.002 more."""
SHARPEST = 12.0
"""The largest sharpness, per squared unit (the smallest distance of offsets): the kernel vanishes one unit away."""
FLATTEST = 0.1
"""The smallest sharpness, times the squared largest offset: such a kernel is nearly constant over all offsets."""
OUTSIDE = 1.5
"""Centers may be this many times as far out as the offsets, where a kernel still leaves a tail."""
EVEN = 1e-15
"""A curve that varies by no more than this, relative to its size, counts as constant: float64 rounds by as much."""
ITEMS = 48
"""The number of curves and starts that are refined at a time, so that their data stay in the cache."""


@dataclass(frozen=True)
class TisaFit:
    """Kernels ``sum_s amplitude_s * exp(-|sharpness_s| * (offset - center_s) ** 2)`` near a curve.

    Args:
        amplitude, sharpness, center: (..., num_kernels), as in :class:`whereformer.positions.tisa.Tisa`; the kernel
            that explains most comes first.
        constant: (...), what is added to all offsets; the softmax does not see it.
        explained: (...), the share of the curve's variance around its mean, with each offset counted as often as it
            occurs. It is negative if the mean itself is nearer, which can happen without a constant, and 1 for a curve
            without variance.
    """

    amplitude: Tensor
    sharpness: Tensor
    center: Tensor
    constant: Tensor
    explained: Tensor

    @property
    def num_kernels(self) -> int:
        return self.amplitude.shape[-1]

    def curve(self, offsets: Tensor | Sequence[float]) -> Tensor:
        """Return what the kernels and the constant add at offsets (m,): (..., m)."""
        values = torch.as_tensor(offsets, device=self.amplitude.device).to(self.amplitude.dtype)
        return _sum(values, self.amplitude, self.sharpness, self.center) + self.constant.unsqueeze(-1)

    def __getitem__(self, index: Any) -> TisaFit:
        """Return the fit of some of the curves."""
        return TisaFit(*(tensor[index] for tensor in vars(self).values()))


def fit_tisa(
    curve: Any,
    num_kernels: int,
    *,
    offsets: Any = None,
    weights: Any = None,
    constant: bool = False,
) -> TisaFit:
    """Fit TISA's kernels to curves over offsets, each with its own, by weighted least squares.

    The search goes downhill from a few starts, so the best kernels are likely but not certain to be found. With one
    kernel more than a random curve was made of, the fit explained what those kernels do, to a share of 0.005 of the
    variance, for all but about one curve in a thousand.

    More kernels never explain less. Sharpnesses are positive; amplitudes of kernels that nearly cancel are kept from
    growing without bounds by a slight penalty (:data:`RIDGE`).

    Args:
        curve: (..., m) real numbers; a tensor, or what :func:`torch.as_tensor` takes.
        num_kernels: the number of kernels, S.
        offsets: (m,), where the curve is known; by default -(n - 1) .. n - 1, for which m has to be odd. The smallest
            distance between two of them is the unit: no kernel is so sharp that it ends within less.
        weights: (m,), the weight of each offset; by default the number of pairs of n positions at that offset, ``n -
            |offset|``, so that the nearest curve gives the nearest matrix. If ``offsets`` are given, the default is
            equal weights.
        constant: whether to fit a constant too, which a softmax over all keys does not see.

    Returns:
        The fit, in float64.

    Raises:
        TypeError: for complex numbers, or if ``num_kernels`` is not a whole number.
        ValueError: for sizes that do not fit, numbers that are not finite, or a negative number of kernels.
    """
    return fit_tisa_up_to(curve, num_kernels, offsets=offsets, weights=weights, constant=constant)[num_kernels]


@torch.no_grad()
def fit_tisa_up_to(
    curve: Any, num_kernels: int, *, offsets: Any = None, weights: Any = None, constant: bool = False
) -> tuple[TisaFit, ...]:
    """Return the fits of :func:`fit_tisa` with 0, 1, ... ``num_kernels`` kernels, in about the time of the last one."""
    if isinstance(num_kernels, bool) or not isinstance(num_kernels, SupportsIndex):
        raise TypeError(f"num_kernels: expected a whole number, got {num_kernels!r}")
    num_kernels = index(num_kernels)
    if num_kernels < 0:
        raise InputError("num_kernels", f"expected at least 0, got {num_kernels}")
    values, points, weight = _checked(curve, offsets, weights)
    distances = points.unique().diff()
    unit = float(distances.min()) if len(distances) else 1.0
    points = points / unit
    problem = _Problem.of(values.flatten(0, -2) if values.dim() > 1 else values.unsqueeze(0), points, weight, constant)
    batch = values.shape[:-1]
    found = points.new_zeros(len(problem.target), 2, 0)
    fits = [problem.fit(found)]
    for _ in range(num_kernels):
        found = _one_more(problem, found)
        fit = problem.fit(found)
        # The penalty on amplitudes may have preferred kernels that explain slightly less.
        worse = fit.explained < fits[-1].explained
        if bool(worse.any()):
            # One more kernel, of amplitude 0
            before = fits[-1]
            three = ((before.amplitude, 0.0), (before.sharpness, 1.0), (before.center, 0.0))
            idle = (functional.pad(part, (0, 1), value=value) for part, value in three)
            pairs_of = zip((*idle, before.constant, before.explained), vars(fit).values(), strict=True)
            fit = TisaFit(*(torch.where(worse.view(-1, *[1] * (old.dim() - 1)), old, new) for old, new in pairs_of))
        fits.append(fit)
    fits = [replace(fit, sharpness=fit.sharpness / unit**2, center=fit.center * unit) for fit in fits]
    return tuple(
        TisaFit(*(tensor.unflatten(0, batch) if batch else tensor.squeeze(0) for tensor in vars(fit).values()))
        for fit in fits
    )


def fit_loss(
    curve: Any, amplitude: Tensor, sharpness: Tensor, center: Tensor, *, offsets: Any = None, weights: Any = None
) -> Tensor:
    """Return what :func:`fit_tisa` minimizes, without its penalty: ``sum_k weight_k (f(offset_k) - curve_k) ** 2``.

    Args:
        curve, offsets, weights: as in :func:`fit_tisa`.
        amplitude, sharpness, center: (..., num_kernels).

    Returns:
        (...), differentiable.
    """
    values, points, weight = _checked(curve, offsets, weights)
    return (weight * (_sum(points, amplitude, sharpness, center) - values).square()).sum(-1)


def kernels(offsets: Tensor, sharpness: Tensor, center: Tensor) -> Tensor:
    """Return ``exp(-|sharpness| (offset - center) ** 2)``, (..., offsets, num_kernels)."""
    return torch.exp(-sharpness.abs().unsqueeze(-2) * (offsets.unsqueeze(-1) - center.unsqueeze(-2)) ** 2)


def _sum(offsets: Tensor, amplitude: Tensor, sharpness: Tensor, center: Tensor) -> Tensor:
    return (kernels(offsets, sharpness, center) * amplitude.unsqueeze(-2)).sum(-1)


@dataclass(frozen=True)
class _Problem:
    """Curves scaled to about 1, offsets in units of their smallest distance, and weights that sum to 1.

    The kernels that the search varies are ``found``, (items, 2, num_kernels): log sharpness and center.

    Args:
        target: (items, m).
        offsets, weights: (m,).
        constant: whether a constant is fitted.
        middle: (items,), what is subtracted from a curve: its mean if there is a constant, else 0.
        scale: (items,), the unit of each curve.
        ridge: (items,), the cost of a squared amplitude.
    """

    target: Tensor
    offsets: Tensor
    weights: Tensor
    constant: bool
    middle: Tensor
    scale: Tensor
    ridge: Tensor

    @classmethod
    def of(cls, curve: Tensor, offsets: Tensor, weights: Tensor, constant: bool) -> _Problem:
        span = curve.amax(-1) - curve.amin(-1)
        size = curve.abs().amax(-1)
        # Without its mean, a large curve is only as exact as its rounding.
        even = span <= EVEN * size
        if not constant:
            # Without a constant, even a constant curve has to be made of kernels.
            span, even = torch.maximum(span, size), size == 0
        scale = torch.where(even, torch.where(size > 0, size, 1.0), span)
        weights = weights / weights.sum()
        middle = (weights * (curve / scale.unsqueeze(-1))).sum(-1) * scale * float(constant)
        target = (curve - middle.unsqueeze(-1)) / scale.unsqueeze(-1)
        variance = (weights * (target - (weights * target).sum(-1, keepdim=True)).square()).sum(-1)
        return cls(target, offsets, weights, constant, middle, scale, RIDGE * variance.clamp(min=1e-6))

    def __getitem__(self, index: Any) -> _Problem:
        own = (part[index] for part in (self.middle, self.scale, self.ridge))
        return _Problem(self.target[index], self.offsets, self.weights, self.constant, *own)

    def basis(self, found: Tensor) -> Tensor:
        """Return the kernels' values, (items, m, num_kernels + 1), the constant last."""
        values = kernels(self.offsets, found[:, 0].exp(), found[:, 1])
        last = torch.full_like(self.target, float(self.constant)).unsqueeze(-1)
        return torch.cat((values, last), -1)

    def solve(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best amplitudes (items, num_kernels + 1) and the remaining loss, (items,)."""
        weighted = basis * self.weights.unsqueeze(-1)
        gram = weighted.mT @ basis + torch.diag_embed(self.penalty(basis.shape[-1]))
        amplitude = torch.linalg.solve(gram, (weighted.mT @ self.target.unsqueeze(-1)).squeeze(-1))
        rest = self.target - (basis @ amplitude.unsqueeze(-1)).squeeze(-1)
        penalties = (self.penalty(basis.shape[-1]) * amplitude.square()).sum(-1)
        return amplitude, (self.weights * rest.square()).sum(-1) + penalties

    def penalty(self, count: int) -> Tensor:
        """Return the cost of a squared amplitude, (items, count); the constant costs only what rounding needs."""
        penalty = self.ridge.unsqueeze(-1).repeat(1, count)
        penalty[:, -1] = 1e-14 if self.constant else 1.0
        return penalty

    def fit(self, found: Tensor) -> TisaFit:
        """Return the kernels with their best amplitudes, and what they explain, in the curves' own units."""
        basis = self.basis(found)
        amplitude, _ = self.solve(basis)
        rest = self.target - (basis @ amplitude.unsqueeze(-1)).squeeze(-1)
        variance = self.target - (self.weights * self.target).sum(-1, keepdim=True)
        left, all_of_it = ((self.weights * part.square()).sum(-1) for part in (rest, variance))
        tiny = all_of_it <= EVEN**2
        explained = torch.where(tiny, 1.0, 1 - left / torch.where(tiny, 1.0, all_of_it))
        own = amplitude * self.scale.unsqueeze(-1)
        order = (own[:, :-1].abs() * basis[..., :-1].mul(self.weights.unsqueeze(-1)).sum(1)).argsort(
            -1, descending=True
        )
        amplitude, sharpness, center = (
            part.gather(-1, order) for part in (own[:, :-1], found[:, 0].exp(), found[:, 1])
        )
        return TisaFit(amplitude, sharpness, center, self.middle + own[:, -1], explained)


def _one_more(problem: _Problem, found: Tensor) -> Tensor:
    """Return the best kernels, with one more than ``found``."""
    starts = _starts(problem, found)
    items = torch.arange(len(problem.target))
    chosen = []
    for part in items.split(max(1, ITEMS // STARTS)):
        several = problem[part.repeat_interleave(STARTS)]
        refined, loss = _refine(several, starts[part].flatten(0, 1), SCREENING_STEPS)
        best = loss.view(len(part), STARTS).argmin(-1) + torch.arange(len(part)) * STARTS
        chosen.append(refined[best])
    screened = torch.cat(chosen)
    return torch.cat([_refine(problem[part], screened[part], STEPS)[0] for part in items.split(ITEMS)])


def _starts(problem: _Problem, found: Tensor) -> Tensor:
    """Extend ``found`` by each of the most promising kernels of a grid, (items, STARTS, 2, num_kernels + 1).

    A kernel's promise is the decrease of the loss if it is added and all amplitudes are optimal again.
    """
    grid, widths = _grid(problem)
    weighted = kernels(problem.offsets, grid[:1].exp(), grid[1:])[0] * problem.weights.unsqueeze(-1)
    norms = (weighted.square() / problem.weights.clamp(min=1e-300).unsqueeze(-1)).sum(0)
    basis = problem.basis(found)
    amplitude, _ = problem.solve(basis)
    rest = problem.target - (basis @ amplitude.unsqueeze(-1)).squeeze(-1)
    gram = (basis * problem.weights.unsqueeze(-1)).mT @ basis + torch.diag_embed(problem.penalty(basis.shape[-1]))
    inverse = torch.linalg.inv(gram)
    shared = weighted.T @ basis  # (items, grid, num_kernels + 1)
    alone = norms + problem.ridge.unsqueeze(-1) - ((shared @ inverse) * shared).sum(-1)
    promise = (rest @ weighted).square() / alone.clamp(min=problem.ridge.unsqueeze(-1))
    value, place = promise.unflatten(-1, (widths, -1)).max(-1)  # the best center of every width
    best = value.topk(min(STARTS, widths), -1).indices
    if best.shape[-1] < STARTS:
        best = best[:, torch.arange(STARTS) % best.shape[-1]]
    index = best * (grid.shape[1] // widths) + place.gather(-1, best)
    new = grid[:, index].movedim(0, -1).unsqueeze(-1)
    return torch.cat((found.unsqueeze(1).expand(-1, STARTS, -1, -1), new), -1)


def _grid(problem: _Problem) -> tuple[Tensor, int]:
    """Return the candidate kernels, (2, widths * centers), dense at small offsets, and the number of widths."""
    low, high = _limits(problem)
    widths = max(3, 1 + round((high - low) / 0.9))
    furthest = max(1.0, float(problem.offsets.abs().max()))
    centers = [0.0]
    step = 1.0
    while centers[-1] + step <= furthest:
        centers.append(centers[-1] + step)
        step = max(1.0, centers[-1] * 0.15)
    center = problem.offsets.new_tensor([*(-center for center in reversed(centers[1:])), *centers])
    log_sharpness = torch.linspace(low, high, widths, dtype=center.dtype, device=center.device)
    both = torch.broadcast_tensors(log_sharpness[:, None], center)
    return torch.stack([part.flatten() for part in both]), widths


def _limits(problem: _Problem) -> tuple[float, float]:
    """Return the smallest and the largest log sharpness."""
    furthest = problem.offsets.abs().max().clamp(min=1.0)
    return float((FLATTEST / furthest**2).log()), float(problem.offsets.new_tensor(SHARPEST).log())


def _refine(problem: _Problem, found: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Refine sharpness and center by Levenberg-Marquardt, with optimal amplitudes; also return the loss, (items,)."""
    low, high = _limits(problem)
    reach = OUTSIDE * max(1.0, float(problem.offsets.abs().max()))
    found = found.clone()
    basis = problem.basis(found)
    amplitude, loss = problem.solve(basis)
    damping = torch.full_like(loss, 1e-2)
    active = torch.arange(len(loss), device=loss.device)
    idle = torch.zeros_like(active)
    for _ in range(steps):
        own = problem[active]
        tried = found[active] + _step(own, found[active], basis[active], amplitude[active], damping[active])
        tried = torch.stack((tried[:, 0].clamp(low, high), tried[:, 1].clamp(-reach, reach)), 1)
        tried_basis = own.basis(tried)
        tried_amplitude, tried_loss = own.solve(tried_basis)
        gain = loss[active] - tried_loss
        better = gain > 0
        kept = active[better]
        found[kept], basis[kept] = tried[better], tried_basis[better]
        amplitude[kept], loss[kept] = tried_amplitude[better], tried_loss[better]
        damping[active] = torch.where(better, damping[active] * 0.2, damping[active] * 4).clamp(1e-9, 1e6)
        # Stop after a few steps that gain little or nothing.
        idle[active] = torch.where(gain > 1e-6 * tried_loss, 0, idle[active] + 1)
        active = active[idle[active] < 6]
        if not len(active):
            break
    return found, loss


def _step(problem: _Problem, found: Tensor, basis: Tensor, amplitude: Tensor, damping: Tensor) -> Tensor:
    """Return a damped Gauss-Newton step of the kernels; amplitudes move along (Kaufman's projection)."""
    sharpness, center = found[:, 0].exp().unsqueeze(1), found[:, 1].unsqueeze(1)
    distance = problem.offsets[:, None] - center
    slope = basis[..., :-1] * (amplitude[:, :-1].unsqueeze(1) * sharpness * distance)
    jacobian = torch.cat((basis, -slope * distance, 2 * slope), -1)
    weighted = jacobian * problem.weights.unsqueeze(-1)
    linear = basis.shape[-1]
    normal = weighted.mT @ jacobian
    normal[:, :linear, :linear] += torch.diag_embed(problem.penalty(linear))
    rest = problem.target - (basis @ amplitude.unsqueeze(-1)).squeeze(-1)
    gradient = (weighted.mT @ rest.unsqueeze(-1)).squeeze(-1)
    gradient[:, :linear] -= problem.penalty(linear) * amplitude
    # Damp relative to each parameter's own curvature, and slightly for those without any.
    diagonal = normal.diagonal(0, -2, -1)[:, linear:]
    floor = 1e-6 * diagonal.amax(-1, keepdim=True) + 1e-14
    normal[:, linear:, linear:] += torch.diag_embed(damping.unsqueeze(-1) * diagonal + floor * damping.unsqueeze(-1))
    normal.diagonal(0, -2, -1).add_(1e-15)
    return torch.linalg.solve(normal, gradient)[:, linear:].clamp(-100, 100).view_as(found)


def _checked(curve: Any, offsets: Any, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Check curve, offsets and weights, and return them in float64."""
    values = torch.as_tensor(curve)
    if values.dim() < 1 or values.shape[-1] == 0:
        raise InputError("curve", f"expected shape (..., offsets) with at least one offset, got {tuple(values.shape)}")
    size = values.shape[-1]
    if offsets is None:
        if size % 2 == 0:
            raise InputError(
                "curve", f"expected an odd number of offsets, -(n - 1) .. n - 1, got {size}; name others with offsets="
            )
        n = (size + 1) // 2
        offsets = torch.arange(1 - n, n)
        weights = pairs(n) if weights is None else weights
    weights = torch.ones(size) if weights is None else weights
    found = {"curve": values, "offsets": torch.as_tensor(offsets), "weights": torch.as_tensor(weights)}
    for name, given in found.items():
        if given.is_complex():
            raise TypeError(f"{name}: expected real numbers, got {given.dtype}")
        if name != "curve" and given.shape != (size,):
            raise InputError(
                name, f"expected shape ({size},), as many as the curve's offsets, got {tuple(given.shape)}"
            )
        if not bool(given.isfinite().all()):
            raise InputError(name, "expected finite numbers, got NaN or infinity")
    if bool((found["weights"] < 0).any()) or not bool((found["weights"] > 0).any()):
        raise InputError("weights", "expected numbers of at least 0, not all of them 0")
    values, points, weight = (given.to(values.device, torch.float64) for given in found.values())
    return values, points, weight
