"""TISA's kernels that come nearest to a curve over offsets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TisaFit:
    """Kernels ``sum_s amplitude_s * exp(-|sharpness_s| * (offset - center_s) ** 2)`` near a curve.

    Args:
        amplitude, sharpness, center: (..., num_kernels), as :class:`whereformer.positions.tisa.Tisa` has them.
        constant: (...), what is added to all offsets; the softmax does not see it.
        explained: (...), the share of the curve's variance, each offset counted as often as it occurs.
    """

    amplitude: Tensor
    sharpness: Tensor
    center: Tensor
    constant: Tensor
    explained: Tensor
