"""Cross-entropy with label smoothing that reads the logits once forward and once backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The label of tokens that are not predicted, as everywhere in transformers."""
AT_A_TIME = {"cpu": 2**18, "cuda": 2**26}
"""The number of logits that are converted to float32 at a time: as many as a CPU core's cache holds."""


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Sum the cross-entropy over tokens, in nats; torch's own needs three to five more tensors the size of the logits.

    Args:
        logits: (tokens, vocabulary), of any floating dtype.
        labels: (tokens,), -100 where there is nothing to predict.
        smoothing: the share of a label that is spread over the whole vocabulary.

    Returns:
        A float32 scalar; float64 for float64 logits.
    """
    return _Smoothed.apply(logits, labels, smoothing)  # type: ignore[no-untyped-call]


class _Smoothed(torch.autograd.Function):
    """``log sum exp(logits) - (1 - smoothing) * logits[label] - smoothing * mean(logits)``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        normalizers, losses = [], []
        for part, wanted in _parts(logits, labels):
            normalizer = part.logsumexp(-1)
            right = part.gather(1, _known(wanted)).squeeze(1)
            normalizers.append(normalizer)
            losses.append(normalizer - (1 - smoothing) * right - smoothing * part.mean(-1))
        ctx.save_for_backward(logits, labels, torch.cat(normalizers))
        ctx.smoothing = smoothing
        return torch.cat(losses).masked_fill(labels == IGNORED, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, normalizers = ctx.saved_tensors
        found = torch.empty_like(logits)
        start = 0
        for part, wanted in _parts(logits, labels):
            end = start + len(part)
            # softmax - smoothing / vocabulary - (1 - smoothing) at the label
            slope = (part - normalizers[start:end].unsqueeze(1)).exp_().sub_(ctx.smoothing / part.shape[1])
            right = torch.full_like(slope[:, :1], ctx.smoothing - 1)
            slope.scatter_add_(1, _known(wanted), right)
            found[start:end] = slope.mul_(torch.where(wanted == IGNORED, 0.0, gradient).unsqueeze(1))
            start = end
        return found, None, None


def _known(labels: Tensor) -> Tensor:
    """Return labels (tokens, 1) with a valid one in place of ignored ones. Other invalid labels stay and are
    refused."""
    return labels.masked_fill(labels == IGNORED, 0).unsqueeze(1)


def _parts(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows at a time, in float32 or float64, with their labels."""
    rows = max(1, AT_A_TIME.get(logits.device.type, AT_A_TIME["cuda"]) // logits.shape[1])
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    for part, wanted in zip(logits.split(rows), labels.split(rows), strict=True):
        yield part.to(exact), wanted
