"""T5: relative biases by bucket of offsets (Raffel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..kernels.terms import FactorPair, Term, position_values
from .base import ModelShape, OffsetFunction, as_offsets
from .site import Site


def buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, ...]:
    """Return the bucket of every offset in -max_distance .. max_distance; offsets beyond are in the last buckets.

    This computes with Python floats: at the edges of the logarithmic buckets, a single rounding error matters.
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


class T5(OffsetFunction):
    """Adds one trained number per head and bucket of offsets to the scores; all layers share one table.

    Every near offset has its own bucket; farther offsets share logarithmically wider buckets up to ``max_distance``. T5
    does not divide query . key by sqrt(head_dim) but draws smaller query weights. Here the bias is added after the
    division, which gives the same model.

    Args:
        num_buckets: the total number of buckets, for both directions together unless the model is causal.
        max_distance: offsets from this one on (in fact, from slightly before) are in the last bucket of their side.
        reset_cls: give [CLS] (position 0 or below) separate buckets, as TUPE-R does: scores of [CLS] as a key use an
            additional bucket, and scores of [CLS] as a query use the bucket that no offset has.
    Shape:
        weight: (num_heads, num_buckets), with one more column for ``reset_cls``; Glorot uniform.
    Extrapolation: any length.
    Source: Raffel et al. (2020), arXiv 1910.10683; tensorflow/mesh ``_relative_position_bucket``.
    """

    paper, year = "Raffel et al.", 2020
    accepts_fractional = False
    shares_curve = True

    def __init__(
        self, model: ModelShape, *, num_buckets: int = 32, max_distance: int = 128, reset_cls: bool = False
    ) -> None:
        super().__init__(model)
        self.bidirectional, self.one_sided = not model.causal, model.causal
        exact = num_buckets // (4 if self.bidirectional else 2)
        if exact < 1 or (self.bidirectional and num_buckets % 2):
            expected = "an even number of at least 4" if self.bidirectional else "at least 2"
            raise InputError("num_buckets", f"expected {expected}, got {num_buckets}")
        if max_distance <= exact:
            raise InputError("max_distance", f"expected more than {exact} (the exact buckets), got {max_distance}")
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.reset_cls = reset_cls
        self.shift_invariant = not reset_cls
        self.buckets = buckets(num_buckets, max_distance, self.bidirectional)
        last_buckets = self.buckets[0], self.buckets[-1]
        pairs = zip(self.buckets[max_distance::-1], self.buckets[max_distance:], strict=True)
        self.last_change = max((distance + 1 for distance, pair in enumerate(pairs) if pair != last_buckets), default=0)
        self.weight = nn.Parameter(torch.empty(model.num_heads, num_buckets + reset_cls))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def reach(self, *, layer: int = 0) -> int:
        return self.last_change

    def curve_sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def curve(self, offsets: Tensor | Sequence[float], *, layer: int = 0) -> Tensor:
        values = as_offsets(offsets, self.weight)
        integers = values.long()
        if values.is_floating_point() and not bool((integers == values).all()):
            raise TypeError("offsets: this method is defined only at integer offsets, got fractional ones")
        index = integers.clamp(-self.max_distance, self.max_distance) + self.max_distance
        columns = torch.tensor(self.buckets, device=index.device)[index]
        # index_select, because the gradient of an index takes many times longer.
        return self.weight.index_select(1, columns.flatten()).unflatten(1, columns.shape)

    def terms_at(self, site: Site) -> tuple[Term, ...]:
        bias = super().terms_at(site)
        device = self.weight.device
        lengths = [position_values(rows, device).shape[-1] for rows in (site.query_positions, site.key_positions)]
        return bias if 0 in lengths or not self.reset_cls else (*bias, self._cls_correction(site))

    def _cls_correction(self, site: Site) -> FactorPair:
        """Return scores of rank two, which replace the bias in the row and column of [CLS] by its two buckets."""
        device = self.weight.device
        queries, keys = (
            torch.atleast_2d(position_values(rows, device)) for rows in (site.query_positions, site.key_positions)
        )
        query_is_cls, key_is_cls = ((values <= 0).to(self.weight.dtype) for values in (queries, keys))
        first_query = _first_position(queries, site.query_documents, site.key_documents)
        first_key = _first_position(keys, site.key_documents, site.query_documents)
        # (heads, batch, n_q) and (heads, batch, n_k)
        to_cls = self.weight[:, -1, None, None] - self.curve(first_key - queries)
        from_cls = self.weight[:, self.num_buckets // 2, None, None] - self.curve(keys - first_query)
        query_factors = [(1 - query_is_cls) * to_cls, query_is_cls.expand_as(to_cls)]
        key_factors = [key_is_cls.expand_as(from_cls), from_cls]
        return FactorPair(torch.stack(query_factors, -1).transpose(0, 1), torch.stack(key_factors, -1).transpose(0, 1))


def _first_position(positions: Tensor, documents: Tensor | None, token_documents: Tensor | None) -> Tensor:
    """Return the smallest position in each token's document, (1 or batch, 1 or num_tokens).

    It is not the same for all documents: pooling moves the [CLS] of long texts farther to the left.

    Args:
        positions: (1 or batch, n), the positions, in ascending order within each document.
        documents: (batch, n), the document of each position; None: each row is one document.
        token_documents: (batch, num_tokens), the document of each token to return the smallest position for.
    """
    if documents is None or token_documents is None:
        return positions.amin(-1, keepdim=True)
    ordered, order = documents.sort(dim=-1, stable=True)
    index = torch.searchsorted(ordered, token_documents.contiguous()).clamp(max=ordered.shape[-1] - 1)
    return positions.expand(len(ordered), -1).gather(-1, order.gather(-1, index))
