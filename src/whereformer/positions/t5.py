"""T5: relative biases by bucket of offsets (Raffel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import FactorPair, OffsetBias, PositionsLike, Term, position_values
from .base import ModelShape, OffsetFunction, Place, offset_span, whole_offsets


def buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, ...]:
    """Return the bucket of every offset in -max_distance .. max_distance; offsets beyond are in the end buckets.

    This computes with Python floats: at the edges of the logarithmic buckets, one rounding error decides.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2

    def bucket(offset: int) -> int:
        distance = abs(offset) if bidirectional else max(-offset, 0)
        if distance >= exact:
            fraction = math.log(distance / exact) / math.log(max_distance / exact)
            distance = min(side - 1, exact + int(fraction * (side - exact)))
        return distance + (side if bidirectional and offset > 0 else 0)

    return tuple(bucket(offset) for offset in range(-max_distance, max_distance + 1))


class Table(NamedTuple):
    """What all layers share: the table's first offset, the buckets of its columns, and the buckets of all offsets."""

    first: int
    columns: Tensor
    buckets: Tensor


class T5(OffsetFunction):
    """Adds one trained number per head and bucket of offsets to the scores; all layers share one table.

    Each near offset has its own bucket; farther ones share logarithmically wider buckets up to ``max_distance``. T5
    does not divide query . key by sqrt(head_dim) but draws smaller query weights. Here the bias is added after the
    division, which gives the same model.

    Args:
        num_buckets: the total number of buckets, for both directions together unless the model is causal.
        max_distance: offsets from here on (in fact, from slightly before) are in the last bucket of their direction.
        reset_cls: give [CLS] (position 0 or below) its own buckets, as TUPE-R does: queries that look at it use an
            extra bucket, and its own row uses the bucket that no offset has.
    Shape:
        weight: (num_heads, num_buckets), with one more column for ``reset_cls``; Glorot uniform.
    Extrapolation: any length.
    Source: Raffel et al. (2020), arXiv 1910.10683; tensorflow/mesh ``_relative_position_bucket``.
    """

    paper, year = "Raffel et al.", 2020
    fractional = False

    def __init__(
        self, model: ModelShape, *, num_buckets: int = 32, max_distance: int = 128, reset_cls: bool = False
    ) -> None:
        super().__init__(model)
        self.bidirectional = not model.causal
        exact = num_buckets // (4 if self.bidirectional else 2)
        if exact < 1 or (self.bidirectional and num_buckets % 2):
            least = "an even number of at least 4" if self.bidirectional else "at least 2"
            raise InputError("num_buckets", f"expected {least}, got {num_buckets}")
        if max_distance <= exact:
            raise InputError("max_distance", f"expected more than {exact} (the exact buckets), got {max_distance}")
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.reset_cls = reset_cls
        self.buckets = buckets(num_buckets, max_distance, self.bidirectional)
        ends = self.buckets[0], self.buckets[-1]
        pairs = zip(self.buckets[max_distance::-1], self.buckets[max_distance:], strict=True)
        self.last_change = max((distance + 1 for distance, pair in enumerate(pairs) if pair != ends), default=0)
        self.weight = nn.Parameter(torch.empty(model.num_heads, num_buckets + reset_cls))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def reach(self, *, layer: int = 0, shared: Any = None) -> int:
        return self.last_change

    def prepare(self) -> Tensor:
        """Return the buckets on the weights' device."""
        return torch.tensor(self.buckets, device=self.weight.device)

    def prepare_for(self, queries: PositionsLike, keys: PositionsLike, prepared: Tensor | None = None) -> Table:
        """Return the bucket that each offset of the table reads.

        The weights are not shared: a layer that runs again alone for its gradient could not reach those of a shared
        table.
        """
        span = offset_span(queries, keys, self.last_change)
        if span is None:
            raise TypeError("t5: needs whole positions, got fractional ones")
        first, last = span
        buckets = self.prepare() if prepared is None else prepared
        offsets = torch.arange(first, last + 1, device=buckets.device)
        return Table(first, self._columns(offsets, buckets), buckets)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        return self.weight[:, self._columns(offsets, self.prepare())]

    def terms(self, hidden: Tensor, place: Place) -> tuple[Term, ...]:
        table = self.prepared_at(place)
        bias = OffsetBias(self.weight[:, table.columns], table.first)
        if not self.reset_cls or hidden.shape[1] == 0:
            return (bias,)
        return bias, self._cls_correction(hidden, place, table.buckets)

    def _columns(self, offsets: Tensor | Sequence[float], buckets: Tensor) -> Tensor:
        """Return the bucket of each offset: the column of ``weight`` that it reads."""
        clamped = whole_offsets(offsets, self.weight).clamp(-self.max_distance, self.max_distance)
        return buckets[clamped + self.max_distance]

    def _cls_correction(self, hidden: Tensor, place: Place, buckets: Tensor) -> FactorPair:
        """Return the scores (rank two) that turn the bias of [CLS]'s row and column into that of its own two
        buckets."""
        query_values, key_values = (
            torch.atleast_2d(position_values(p, hidden.device)) for p in (place.queries, place.keys)
        )
        query_is_cls, key_is_cls = ((values <= 0).to(self.weight.dtype) for values in (query_values, key_values))
        first_query = query_values.amin(-1, keepdim=True)
        first_key = key_values.amin(-1, keepdim=True)
        # (heads, batch, n_q) and (heads, batch, n_k)
        plain_to = self.weight[:, self._columns(first_key - query_values, buckets)]
        plain_from = self.weight[:, self._columns(key_values - first_query, buckets)]
        to_cls = self.weight[:, -1, None, None] - plain_to
        from_cls = self.weight[:, self.num_buckets // 2, None, None] - plain_from
        ones = [(1 - query_is_cls) * to_cls, query_is_cls.expand_as(to_cls)]
        others = [key_is_cls.expand_as(from_cls), from_cls]
        return FactorPair(torch.stack(ones, -1).transpose(0, 1), torch.stack(others, -1).transpose(0, 1))
