"""Pooling between blocks, which halves a sequence, and its reverse for the decoder (Dai et al. 2020, Section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import Positions, PositionsLike
from ..positions import Site

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Pooling:
    """Halves sequences: two neighbors become one; the last token may be left alone.

    Args:
        mode: how hidden states are combined: "mean", "max" or "min".
        separate_cls: the first token stays as it is, and pairs begin with the second.
        truncate: with separate_cls, drop the last token.
        mask: a pooled token is real if "any" of its tokens is, or if "all" are.
    """

    mode: str
    separate_cls: bool
    truncate: bool
    mask: str

    def applies_to(self, length: int) -> bool:
        """Whether a sequence is long enough to pool: two tokens besides [CLS], one of which may be dropped."""
        return length > (2 if self.separate_cls else 1)

    def length(self, length: int) -> int:
        """The number of tokens after pooling."""
        if not self.applies_to(length):
            return length
        if not self.separate_cls:
            return (length + 1) // 2
        return 1 + (length - self.truncate) // 2

    def hidden(self, hidden: Float[Tensor, "batch n width"]) -> Float[Tensor, "batch pooled width"]:
        """Pool hidden states (batch, n, width) to (batch, pooled n, width)."""
        first, second = self._pairs(hidden)
        if self.mode == "mean":
            pooled = (first + second) / 2
        else:
            pooled = torch.maximum(first, second) if self.mode == "max" else torch.minimum(first, second)
        return self._with_cls(hidden, pooled)

    def site(self, site: Site) -> Site:
        """Pool where tokens attend to one another: masks by both tokens, segments and explicit positions by the first
        of the two."""
        mask, segments, at = site.key_mask, site.key_segments, self._positions(site.keys)
        if mask is not None:
            first, second = self._pairs(mask)
            mask = self._with_cls(mask, first | second if self.mask == "any" else first & second)
        if segments is not None:
            segments = self._with_cls(segments, self._pairs(segments)[0])
        return replace(
            site, queries=at, keys=at, shared=None, key_mask=mask, query_segments=segments, key_segments=segments
        )

    def _positions(self, positions: PositionsLike) -> PositionsLike:
        if isinstance(positions, Positions):
            # [CLS] moves as far away from the next token as that token is from its own neighbor.
            stride = 2 * positions.stride
            start = positions.start - positions.stride if self.separate_cls else positions.start
            return Positions(start, stride, self.length(positions.length))
        rows = torch.atleast_2d(positions)
        pooled = self._with_cls(rows, self._pairs(rows)[0])
        return pooled if positions.dim() == 2 else pooled[0]

    def _pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second of every pair in (batch, n, ...); a token left alone is its own second."""
        if self.separate_cls:
            rows = rows[:, 1 : rows.shape[1] - self.truncate]
        first, second = rows[:, ::2], rows[:, 1::2]
        # There is no branch on the length, so that the same compiled code serves even and odd lengths.
        return first, torch.cat((second, first[:, second.shape[1] :]), 1)

    def _with_cls(self, rows: Tensor, pooled: Tensor) -> Tensor:
        return torch.cat((rows[:, :1], pooled), 1) if self.separate_cls else pooled


def unpool(
    hidden: Float[Tensor, "batch n width"], times: int, length: int, separate_cls: bool
) -> Float[Tensor, "batch length width"]:
    """Repeat pooled hidden states (batch, n, width) to (batch, length, width).

    Each state stands for ``times`` tokens, and [CLS] for itself. Tokens that truncation dropped get zeros.
    """
    cls, others = (hidden[:, :1], hidden[:, 1:]) if separate_cls else (hidden[:, :0], hidden)
    # At most ``times`` - 1 tokens were dropped. There is no branch on that, so that the same compiled code serves all
    # cases.
    others = functional.pad(others.repeat_interleave(times, 1), (0, 0, 0, times - 1))
    return torch.cat((cls, others[:, : length - cls.shape[1]]), 1)
