"""What layers hand to the attention function as a mask, and which is no matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import Term


class WindowMask(NamedTuple):
    """The mask of a sliding window, which models hand to their layers in place of a tensor; causality is part of it.

    Only the attention function looks inside. Models that take FlexAttention's masks let other objects pass, too, and
    what moves or checkpoints their arguments looks into tuples.

    Args:
        before, after: how far each query attends.
        n_k: the number of keys; the last of them is at the last query.
        padding: (batch, 1, 1, n_k) bool, True = may be attended; None without padding.
    """

    before: int
    after: int
    n_k: int
    padding: Tensor | None


class Asked(NamedTuple):
    """What a model asked transformers for, without a window: causal attention or one to every key, and padding.

    Args:
        causal: whether later keys are masked.
        n_k: the number of keys; the last of them is at the last query.
        padding: (batch, 1, 1, n_k) bool, True = may be attended; None without padding.
    """

    causal: bool
    n_k: int
    padding: Tensor | None


class Regions(NamedTuple):
    """The regions of tokens: a query attends only to keys of its own.

    Args:
        ids: (batch or a divisor of it, n), the same for every so many rows of a batch.
    """

    ids: Tensor


class BiasMask(NamedTuple):
    """A bias in terms, which a model adds to its masks and hands on in place of one.

    Args:
        terms: the bias.
        mask: what else masks; None masks nothing.
    """

    terms: tuple[Term, ...]
    mask: Tensor | None = None

    def __add__(self, other: BiasMask | Tensor) -> BiasMask:  # type: ignore[override]
        """Add another bias, or a mask. A boolean mask stays one, where a sum of tensors would not."""
        if not isinstance(other, BiasMask):
            other = BiasMask((), other)
        masks = [mask for mask in (self.mask, other.mask) if mask is not None]
        if len(masks) == 2:
            masks = [masks[0] & masks[1] if masks[0].dtype == masks[1].dtype == torch.bool else masks[0] + masks[1]]
        return BiasMask(self.terms + other.terms, masks[0] if masks else None)
