"""What layers hand to the attention function as a mask, and which is no matrix."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
