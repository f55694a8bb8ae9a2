"""Pooling between blocks, which halves a sequence, and its reverse for the decoder (Dai et al. 2020, Section 2.2)."""

from __future__ import annotations

from collections.abc import Callable
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
    """Halves sequences: two neighbors become one; the last token may have no neighbor.

    Args:
        mode: how hidden states are combined: "mean", "max" or "min".
        separate_cls: the first token does not change, and pairs begin with the second.
        truncate: with separate_cls, drop the last token, so that 512 tokens become 256.
        mask: whether a pooled token counts as a token if "any" of its tokens does, or only if "all" of them do.
    """

    mode: str
    separate_cls: bool
    truncate: bool
    mask: str

    def applies_to(self, length: int) -> bool:
        """Return whether a sequence is long enough to pool: it has two tokens, besides a separate [CLS]."""
        return length > (2 if self.separate_cls else 1)

    def pooled_length(self, length: int) -> int:
        """Return the number of tokens after pooling."""
        if not self.applies_to(length):
            return length
        if not self.separate_cls:
            return (length + 1) // 2
        return 1 + (length - self.truncate) // 2

    def pool_hidden(
        self, hidden: Float[Tensor, "batch n width"], documents: PackedDocuments | None = None
    ) -> Float[Tensor, "batch pooled width"]:
        """Pool hidden states (batch, n, width) to (batch, pooled n, width). Packed documents are pooled separately."""
        first, second = self._pairs(hidden, documents)
        if self.mode == "mean":
            return (first + second) / 2
        return torch.maximum(first, second) if self.mode == "max" else torch.minimum(first, second)

    def pool_site(self, site: Site, documents: PackedDocuments | None = None) -> Site:
        """Pool a site: masks by both tokens of each pair, segments and explicit positions by the first token."""
        segments, starts = (
            None if rows is None else self._pairs(rows, documents)[0] for rows in (site.key_segments, site.key_starts)
        )
        mask = site.key_mask
        if mask is not None:
            first, second = self._pairs(mask)  # packed documents have no padding, so no mask
            mask = first | second if self.mask == "any" else first & second
        positions: PositionsLike
        if documents is not None and site.position_stop is not None:
            # The encoder counted these positions itself; without a position_stop, the caller passed them.
            positions, min_position = documents.pooled.positions, documents.pooled.min_position
        else:
            positions, min_position = self._positions(site.key_positions, documents), 0
        return Site.self_attention(
            positions,
            documents=None if documents is None else documents.pooled.ids,
            segments=segments,
            starts=starts,
            key_mask=mask,
            causal=site.causal,
            position_stop=site.position_stop,
            min_position=min_position,
        )

    def _positions(self, positions: PositionsLike, documents: PackedDocuments | None) -> PositionsLike:
        if isinstance(positions, Positions):
            # [CLS] moves as far away from the next token as that token is from its own neighbor.
            stride = 2 * positions.stride
            start = positions.start - positions.stride if self.separate_cls else positions.start
            return Positions(start, stride, self.pooled_length(positions.length))
        pooled = self._pairs(torch.atleast_2d(positions), documents)[0]
        return pooled[0] if positions.dim() == 1 else pooled

    def _pairs(self, rows: Tensor, documents: PackedDocuments | None = None) -> tuple[Tensor, Tensor]:
        """Return the first and the second token of every pair in (batch, n, ...).

        A separate [CLS] makes a pair with itself, and so does a token without a neighbor.
        """
        if documents is not None:
            first, second = documents.pairs
            return rows[:, first], rows[:, second]
        num_cls = int(self.separate_cls)
        cls, rows = rows[:, :num_cls], rows[:, num_cls : rows.shape[1] - num_cls * self.truncate]
        first, second = rows[:, ::2], rows[:, 1::2]
        # The code does not branch on the length, so compiled code serves even and odd lengths.
        return torch.cat((cls, first), 1), torch.cat((cls, second, first[:, second.shape[1] :]), 1)


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one packed row after some poolings, each pooled as if it were the only one in the row.

    Lengths are on the CPU, because the number of pooled tokens depends on them; only indices go to the device.

    Args:
        pooling: how a document is halved.
        device: the device of the tokens.
        lengths: (documents,), the number of tokens in each.
        start, stride: (documents,), the position of each document's first token, and the distance between neighbors.
        min_position: a lower bound of all positions; [CLS] moves below 0 when its document is pooled.
    """

    pooling: Pooling
    device: torch.device
    lengths: Tensor
    start: Tensor
    stride: Tensor
    min_position: int = 0

    @classmethod
    def from_ids(cls, ids: Tensor, pooling: Pooling) -> PackedDocuments:
        """Return the documents of a row before pooling, by the runs of equal ids (1, n); this waits for the device."""
        lengths = ids[0].cpu().unique_consecutive(return_counts=True)[1]
        return cls(pooling, ids.device, lengths, torch.zeros_like(lengths), torch.ones_like(lengths))

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """The document of each token, (n,), and the token's index within it, (n,)."""
        document = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return document, torch.arange(len(document)) - self._first_token[document]

    @cached_property
    def _first_token(self) -> Tensor:
        """The index of each document's first token in the row, (documents,)."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def ids(self) -> Tensor:
        """The number of each token's document, (1, n)."""
        return self._tokens[0][None].to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token within its document, (1, n)."""
        document, index = self._tokens
        return (self.start[document] + self.stride[document] * index)[None].to(self.device)

    @cached_property
    def pooled(self) -> PackedDocuments:
        """The documents after one more pooling, which does not change short ones."""
        num_cls, pooled_length = int(self.pooling.separate_cls), self.pooling.pooled_length
        lengths = torch.tensor([pooled_length(length) for length in self.lengths.tolist()], dtype=torch.int64)
        is_pooled = lengths < self.lengths
        start = torch.where(is_pooled, self.start - num_cls * self.stride, self.start)
        stride = torch.where(is_pooled, 2 * self.stride, self.stride)
        min_position = 2 * self.min_position - num_cls
        return replace(self, lengths=lengths, start=start, stride=stride, min_position=min_position)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The two tokens of each pooled token, each of shape (pooled n,); the same token twice without a neighbor."""
        num_cls, truncate = int(self.pooling.separate_cls), int(self.pooling.separate_cls and self.pooling.truncate)
        document, index = self.pooled._tokens
        is_pair = (self.pooled.lengths < self.lengths)[document] & (index >= num_cls)
        first = torch.where(is_pair, 2 * index - num_cls, index)
        last = (self.lengths - truncate)[document] - 1
        second = torch.where(is_pair, first + 1, index).minimum(last).maximum(first)
        row_start = self._first_token[document]
        return (row_start + first).to(self.device), (row_start + second).to(self.device)

    def unpool(self, hidden: Tensor, pooled: PackedDocuments, times: int) -> Tensor:
        """Repeat the states of pooled documents, (1, pooled n, width), for these documents; see :func:`unpool`."""
        num_cls = int(self.pooling.separate_cls)
        document, index = self._tokens
        source = torch.where(index < num_cls, index, num_cls + (index - num_cls) // times)
        exists = source < pooled.lengths[document]
        rows = pooled._first_token[document] + source.where(exists, 0)
        return hidden[:, rows.to(self.device)] * exists[:, None].to(self.device)


class FunnelState:
    """The site at the current depth of one forward through a funnel.

    Args:
        pooling: how the sequence is halved between blocks.
        site: the site before pooling.
        documents: the packed documents that are pooled separately; None if each row is one document.
        share: adds to a site the results that its layers share.
        pool_query_only: whether the first layer of a block attends to the tokens before pooling.
    """

    def __init__(
        self,
        pooling: Pooling,
        site: Site,
        documents: PackedDocuments | None,
        share: Callable[[Site], Site],
        *,
        pool_query_only: bool,
    ) -> None:
        self.pooling, self.share, self.pool_query_only = pooling, share, pool_query_only
        self.full_site = self.site = share(site)
        self.full_documents = self.documents = documents

    def pool(self, hidden: Tensor) -> tuple[Tensor, Site, Tensor | None]:
        """Pool before a block, unless the sequence is too short.

        Args:
            hidden: (batch, n, width), the states of the previous block.

        Returns:
            For the block's first layer: its queries (batch, pooled n, width), its site, and its memory. The memory is
            ``hidden`` if only queries are pooled, otherwise None.
        """
        if self.documents is None and not self.pooling.applies_to(hidden.shape[1]):
            return hidden, self.site, None
        queries = self.pooling.pool_hidden(hidden, self.documents)
        unpooled_site, pooled_site = self.site, self.pooling.pool_site(self.site, self.documents)
        self.site = self.share(pooled_site)
        if self.documents is not None:
            self.documents = self.documents.pooled
        if not self.pool_query_only:
            return queries, self.site, None
        return queries, self.share(pooled_site.with_keys_of(unpooled_site)), hidden

    def unpool(self, hidden: Tensor, times: int, length: int) -> Tensor:
        """Return to the full length: repeat states (batch, pooled n, width) to (batch, length, width).

        ``site`` is the full one from then on. ``times`` is the number of tokens that a state stands for. If a sequence
        was too short for some poolings, that number is too large, but only one state besides [CLS] is left to repeat.
        """
        self.site = self.full_site
        if self.full_documents is None or self.documents is None:
            return unpool(hidden, times, length, self.pooling.separate_cls)
        return self.full_documents.unpool(hidden, self.documents, times)


def unpool(
    hidden: Float[Tensor, "batch n width"], times: int, length: int, separate_cls: bool
) -> Float[Tensor, "batch length width"]:
    """Repeat pooled hidden states (batch, n, width) to (batch, length, width).

    Each state stands for ``times`` tokens, and [CLS] for itself. Tokens that truncation dropped get the last state as
    far as its repeats reach, and zeros after that.
    """
    cls, pooled = (hidden[:, :1], hidden[:, 1:]) if separate_cls else (hidden[:, :0], hidden)
    # Each of k poolings drops at most one of its tokens: 2 ** k - 1 = ``times`` - 1 tokens in all. The code does not
    # branch on that number, so compiled code serves all cases.
    repeated = functional.pad(pooled.repeat_interleave(times, 1), (0, 0, 0, times - 1))
    return torch.cat((cls, repeated[:, : length - cls.shape[1]]), 1)
