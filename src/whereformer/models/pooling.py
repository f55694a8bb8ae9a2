"""Pooling between blocks, which halves a sequence, and its reverse for the decoder (Dai et al. 2020, Section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
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

    def hidden(
        self, hidden: Float[Tensor, "batch n width"], texts: Texts | None = None
    ) -> Float[Tensor, "batch pooled width"]:
        """Pool hidden states (batch, n, width) to (batch, pooled n, width); each of a row's texts by itself."""
        first, second = self._pairs(hidden, texts)
        if self.mode == "mean":
            return (first + second) / 2
        return torch.maximum(first, second) if self.mode == "max" else torch.minimum(first, second)

    def site(self, site: Site, texts: Texts | None = None) -> Site:
        """Pool where tokens attend to one another: masks by both tokens, segments and explicit positions by the first
        of the two."""
        segments, starts = (
            None if rows is None else self._pairs(rows, texts)[0] for rows in (site.key_segments, site.key_starts)
        )
        mask = site.key_mask
        if mask is not None:
            first, second = self._pairs(mask)
            mask = first | second if self.mask == "any" else first & second
        documents = None if texts is None else texts.pooled.documents
        at: PositionsLike
        if texts is not None and site.end is not None:
            # What texts reach is known, so positions are those of the texts; others are given.
            at, least = texts.pooled.positions, texts.pooled.least
        else:
            at, least = self._positions(site.keys, texts), 0
        more = {"key_mask": mask, "causal": site.causal, "end": site.end, "least": least}
        return Site.within(at, documents=documents, segments=segments, starts=starts, **more)

    def _positions(self, positions: PositionsLike, texts: Texts | None) -> PositionsLike:
        if isinstance(positions, Positions):
            # [CLS] moves as far away from the next token as that token is from its own neighbor.
            stride = 2 * positions.stride
            start = positions.start - positions.stride if self.separate_cls else positions.start
            return Positions(start, stride, self.length(positions.length))
        pooled = self._pairs(torch.atleast_2d(positions), texts)[0]
        return pooled[0] if positions.dim() == 1 else pooled

    def _pairs(self, rows: Tensor, texts: Texts | None = None) -> tuple[Tensor, Tensor]:
        """Return the first and the second of every pair in (batch, n, ...).

        A separate [CLS], and a token left alone, are their own second.
        """
        if texts is not None:
            first, second = texts.pairs
            return rows[:, first], rows[:, second]
        kept = int(self.separate_cls)
        cls, rows = rows[:, :kept], rows[:, kept : rows.shape[1] - kept * self.truncate]
        first, second = rows[:, ::2], rows[:, 1::2]
        # There is no branch on the length, so that the same compiled code serves even and odd lengths.
        return torch.cat((cls, first), 1), torch.cat((cls, second, first[:, second.shape[1] :]), 1)


@dataclass(frozen=True)
class Texts:
    """The texts of one row, as far as they have been pooled, each by itself as if it had the row alone.

    Numbers are on the CPU, since the number of pooled tokens depends on them; only indices go to the device.

    Args:
        pooling: what halves each text.
        device: where the tokens are.
        lengths: (texts,), the number of tokens in each.
        start, stride: (texts,), the position of each text's first token, and from one token to the next.
        least: what no position is below; [CLS] moves below 0 when its text is pooled.
    """

    pooling: Pooling
    device: torch.device
    lengths: Tensor
    start: Tensor
    stride: Tensor
    least: int = 0

    @classmethod
    def of(cls, documents: Tensor, pooling: Pooling) -> Texts:
        """Return the texts of a row before pooling, by the runs of equal ids in documents (1, n); waits for them."""
        lengths = documents[0].cpu().unique_consecutive(return_counts=True)[1]
        return cls(pooling, documents.device, lengths, torch.zeros_like(lengths), torch.ones_like(lengths))

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """The text of each token, and its number there, (n,) each."""
        text = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return text, torch.arange(len(text)) - self._first[text]

    @cached_property
    def _first(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def documents(self) -> Tensor:
        """The number of each token's text, (1, n)."""
        return self._rows[0][None].to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its text, (1, n)."""
        text, here = self._rows
        return (self.start[text] + self.stride[text] * here)[None].to(self.device)

    @cached_property
    def pooled(self) -> Texts:
        """The texts after one more pooling, which leaves short ones as they are."""
        kept, length = int(self.pooling.separate_cls), self.pooling.length
        lengths = torch.tensor([length(n) for n in self.lengths.tolist()], dtype=torch.int64)
        applies = lengths < self.lengths
        start = torch.where(applies, self.start - kept * self.stride, self.start)
        stride = torch.where(applies, 2 * self.stride, self.stride)
        return replace(self, lengths=lengths, start=start, stride=stride, least=2 * self.least - kept)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The two tokens that each pooled token is made of, (pooled n,) each; the same one twice if it stays alone."""
        kept, truncate = int(self.pooling.separate_cls), int(self.pooling.separate_cls and self.pooling.truncate)
        text, here = self.pooled._rows
        applies = (self.pooled.lengths < self.lengths)[text] & (here >= kept)
        first = torch.where(applies, 2 * here - kept, here)
        second = torch.where(applies, first + 1, here).minimum((self.lengths - truncate)[text] - 1).maximum(first)
        return (self._first[text] + first).to(self.device), (self._first[text] + second).to(self.device)

    def unpool(self, hidden: Tensor, pooled: Texts, times: int) -> Tensor:
        """Repeat each state of the pooled texts, (1, pooled n, width), for these; see :func:`unpool`."""
        kept = int(self.pooling.separate_cls)
        text, here = self._rows
        source = torch.where(here < kept, here, kept + (here - kept) // times)
        exists = source < pooled.lengths[text]
        rows = pooled._first[text] + source.where(exists, 0)
        return hidden[:, rows.to(self.device)] * exists[:, None].to(self.device)


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
