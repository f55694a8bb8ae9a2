"""TISA: translation-invariant self-attention with Gaussian kernels over offsets (Wennberg & Henter 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from ..kernels.tracing import can_read
from .base import ModelShape, OffsetFunction, as_offsets, check_min, float_dtype


class Tisa(OffsetFunction):
    """Adds ``sum_s amplitude_s * exp(-|sharpness_s| * (offset - center_s) ** 2)`` to the scores, per head.

    Args:
        num_kernels: Gaussians per head (S in the paper); 0 means no position information.
        share_layers: use one set of kernels for all layers instead of one set per layer.
    Shape:
        amplitude, sharpness, center: (layers, num_heads, num_kernels); ``center`` in tokens, ``sharpness`` in tokens **
            -2. Drawn from N(0.1, 0.01 ** 2), N(0.1, 0.01 ** 2) and N(0, 5 ** 2).
    Extrapolation: any length and any real offset.
    Cost: on the CPU a table covers only the offsets at which a kernel, or its gradient, exceeds rounding error, up to
        the next power of two on each side, so that few table lengths occur. On other devices and in compiled code, it
        covers all offsets, because reading the kernels would stall the device.
    Source: Wennberg & Henter (2021), arXiv 2106.01950, eq. 5. The authors' released code evaluates its kernels at
        query - key - 1; :func:`from_released` converts its parameters.
    """

    paper, year = "Wennberg & Henter", 2021

    def __init__(self, model: ModelShape, *, num_kernels: int = 5, share_layers: bool = False) -> None:
        super().__init__(model)
        check_min(0, num_kernels=num_kernels)
        self.num_kernels = num_kernels
        self.shares_curve = share_layers
        size = (1 if share_layers else model.num_layers, model.num_heads, num_kernels)
        self.amplitude = nn.Parameter(torch.empty(size))
        self.sharpness = nn.Parameter(torch.empty(size))
        self.center = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.amplitude, 0.1, 0.01)
        nn.init.normal_(self.sharpness, 0.1, 0.01)
        nn.init.normal_(self.center, 0.0, 5.0)

    def kernel_parameters(self) -> tuple[nn.Parameter, ...]:
        return self.amplitude, self.sharpness, self.center

    def curve_sources(self) -> tuple[Tensor, ...]:
        return self.kernel_parameters()

    def reach_per_layer(self) -> list[int | None]:
        """Return the reach of every layer that has its own kernels; this reads the kernels, so it waits for them."""
        if not can_read(self.amplitude):
            return [None] * len(self.amplitude)
        if self.amplitude.numel() == 0:
            return [1] * len(self.amplitude)
        with torch.no_grad():
            numbers = torch.stack(self.kernel_parameters()).tolist()
        # Beyond its reach, a kernel adds less than a score's rounding error, even together with the other kernels.
        min_score = torch.finfo(float_dtype(self.amplitude)).eps / self.amplitude.shape[-1]
        reaches: list[int | None] = []
        for layer in zip(*numbers, strict=True):
            amplitudes, decays, centers = ([*map(abs, chain(*heads))] for heads in layer)
            decay = min(decays)
            # An amplitude below 1 counts as 1: its gradient is the kernel itself.
            distance = math.sqrt(math.log(max(*amplitudes, 1.0) / min_score) / decay) if decay > 0 else math.inf
            reach = max(centers) + distance
            # None if the reach is not a number, or if a kernel never decays.
            reaches.append(2 ** math.ceil(math.log2(max(reach, 1.0))) if reach < 2**30 else None)
        return reaches

    def reach(self, *, layer: int = 0) -> int | None:
        return self.reach_per_layer()[0 if self.shares_curve else layer]

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        row = 0 if self.shares_curve else layer
        return self._curves(as_offsets(offsets, self.center), *(kernels[row] for kernels in self.kernel_parameters()))

    def curve_per_layer(self, offsets: Tensor) -> Sequence[Tensor]:
        return self._curves(offsets, *self.kernel_parameters()).unbind()

    def _curves(self, offsets: Tensor, *parameters: Tensor) -> Tensor:
        """Return the curves (..., offsets) of amplitude, sharpness and center, each of shape (..., num_kernels)."""
        dtype = float_dtype(self.amplitude)
        amplitude, sharpness, center = (kernels.to(dtype) for kernels in parameters)
        # Few operations, because a GPU waits for the host at each of them.
        distance = center.unsqueeze(-1) - offsets.flatten()
        kernels = torch.exp(-sharpness.abs().unsqueeze(-1) * distance.square())
        curves = (amplitude.unsqueeze(-1) * kernels).sum(-2).to(dtype)
        return curves if offsets.dim() == 1 else curves.unflatten(-1, offsets.shape)


def from_released(amplitudes: Tensor, sharpness: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert one layer's parameters from the authors' released module to amplitude, sharpness and center.

    That module computes f(query - key - 1) where the paper and :class:`Tisa` compute f(key - query). With ``center =
    -(offset + 1)`` these are the same function. Its parameters are (num_kernels, num_heads); the results are
    (num_heads, num_kernels), to copy into ``Tisa.amplitude[layer]``, ``sharpness`` and ``center``.
    """
    return amplitudes.mT, sharpness.mT, -(offsets.mT + 1)
