"""DeBERTa: disentangled attention. Words attend to offsets, and offsets to words (He et al. 2021)."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from ..kernels.terms import OffsetKeys, OffsetQueries, Term
from .base import ModelShape, PositionMethod, check_min, offset_span
from .site import Site
from .tables import Layers, Sources, split_layers


def table_row(offset: int, num_buckets: int | None, max_distance: int) -> int:
    """Return the row of the table that an offset reads.

    Without buckets, every distance up to ``max_distance`` has a row. With buckets, every distance up to
    ``num_buckets / 2`` has a row, and farther distances share logarithmically wider buckets. The rows are in descending
    order of offsets, because the authors' table is over query - key.
    """
    distance, span = abs(offset), max_distance if num_buckets is None else num_buckets
    middle = span // 2
    if num_buckets is not None and distance > middle:
        fraction = math.log(distance / middle) / math.log((max_distance - 1) / middle)
        distance = math.ceil(fraction * (middle - 1)) + middle
    return min(max(span - (distance if offset > 0 else -distance), 0), 2 * span - 1)


class Rows(NamedTuple):
    """The rows of the table, and the layers' parameters, which all layers share.

    Args:
        first, last: the first and the last offset.
        vectors: the rows of the table that occur, (num_rows, hidden_size).
        row_of_offset: the index of each offset's row in ``vectors``; None if every offset has a separate row, in order.
        key_weights, query_weights, query_biases: the parameters of each distinct layer.
        sources: all parameters.
    """

    first: int
    last: int
    vectors: Tensor
    row_of_offset: Tensor | None
    key_weights: Layers | None
    query_weights: Layers | None
    query_biases: Layers | None
    sources: Sources


class Deberta(PositionMethod):
    """Adds the product of the query with a vector of the offset, and of the key with another one, to the scores.

    ``score_ij = (<q_i, k_j> + <q_i, K[r]> + <k_j, Q[r]>) / sqrt(3 head_dim)`` with the row r of the offset. K and Q are
    projections of one table, which all layers share; the projections belong to the layers. The scores are divided by
    sqrt(3 head_dim), or by sqrt(2 head_dim) with only one of the two terms: the query is multiplied by 3 ** -0.5 before
    attention divides by sqrt(head_dim). Both products with the offset are tables over offsets, so memory is O(n). When
    joined with rope, they are products with the rotated query and key.

    Args:
        max_distance: offsets from this distance on share a vector.
        num_buckets: the number of buckets in each direction, as in versions 2 and 3: half of them contain a single
            distance, and the others are logarithmically wider. With None, every distance below ``max_distance`` has a
            row, as in version 1.
        c2p: whether to add the product of query and offset (content to position).
        p2c: whether to add the product of offset and key (position to content).
    Shape (with L distinct layers, and ``num_buckets`` or else ``max_distance`` as span):
        table: (2 * span, hidden_size), over query - key. key_weight, query_weight: (L, num_heads * head_dim,
            hidden_size). All are normal with standard deviation ``initializer_range``. query_bias: (L, num_heads
            * head_dim), zeros; keys have no bias, because one number for all keys changes no weight.
    Extrapolation: any length; all distances from ``max_distance`` on share a vector.
    Source: He et al. (2021), arXiv 2006.03654, eq. 4, and its code, which reads the same row for both terms. Buckets
        are computed as in transformers; the authors first clip offsets at ``max_distance - 1``, so that no offset reads
        row 0. Versions 2 and 3 normalize the table and use the projections of the words for it; this class does not.
    """

    paper, year = "He et al.", 2021
    acts_on = frozenset({"scores"})
    accepts_fractional = False
    shift_invariant = True
    needs_query_key = True
    rotates_any_heads = True

    def __init__(
        self,
        model: ModelShape,
        *,
        max_distance: int = 512,
        num_buckets: int | None = 256,
        c2p: bool = True,
        p2c: bool = True,
    ) -> None:
        super().__init__(model)
        check_min(1, max_distance=max_distance)
        if num_buckets is not None and (num_buckets < 4 or num_buckets % 2):
            raise InputError("num_buckets", f"expected an even number of at least 4, or None, got {num_buckets}")
        if num_buckets is not None and max_distance <= num_buckets // 2 + 1:
            bound = num_buckets // 2 + 1
            raise InputError("max_distance", f"expected more than {bound} (num_buckets / 2 + 1), got {max_distance}")
        if not (c2p or p2c):
            raise InputError("c2p", "expected c2p or p2c to be True, got False for both")
        self.max_distance, self.num_buckets = max_distance, num_buckets
        self.rows = [table_row(offset, num_buckets, max_distance) for offset in range(-max_distance, max_distance + 1)]
        self.num_products = 1 + c2p + p2c
        layers, inner = max(model.layer_of_pass) + 1, model.num_heads * model.head_dim
        span = max_distance if num_buckets is None else num_buckets
        self.table = nn.Parameter(torch.empty(2 * span, model.hidden_size))
        self.key_weight = nn.Parameter(torch.empty(layers, inner, model.hidden_size)) if c2p else None
        self.query_weight = nn.Parameter(torch.empty(layers, inner, model.hidden_size)) if p2c else None
        self.query_bias = nn.Parameter(torch.empty(layers, inner)) if p2c else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.table, self.key_weight, self.query_weight):
            if weight is not None:
                nn.init.normal_(weight, 0.0, self.model.initializer_range)
        if self.query_bias is not None:
            nn.init.zeros_(self.query_bias)

    def compute_shared(self, site: Site) -> Rows:
        """Return the rows that these positions read.

        Raises:
            TypeError: for fractional positions.
        """
        span = offset_span(site.query_positions, site.key_positions, self.max_distance)
        if span is None:
            raise TypeError("deberta: needs integer positions, got fractional ones")
        first, last = span
        rows = self.rows[first + self.max_distance : last + self.max_distance + 1]
        low, high = rows[-1], rows[0]
        layer_parameters = self.key_weight, self.query_weight, self.query_bias
        key_weights, query_weights, query_biases = (
            None if parameter is None else split_layers(parameter) for parameter in layer_parameters
        )
        sources = Sources(self, self.table, *(parameter for parameter in layer_parameters if parameter is not None))
        # Flipped, because the rows of the table descend where offsets ascend.
        vectors = sources.get_or_compute("vectors", span, lambda: self.table[low : high + 1].flip(0))
        row_of_offset = None
        if len(vectors) < len(rows):
            index = partial(torch.tensor, [high - row for row in rows], device=self.table.device)
            row_of_offset = Sources(self, self._like).get_or_compute("rows", span, index)
        return Rows(first, last, vectors, row_of_offset, key_weights, query_weights, query_biases, sources)

    def transform_qkv(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        return query * self.num_products**-0.5, key, value

    def terms(self, hidden: Tensor, site: Site) -> tuple[Term, ...]:
        rows: Rows = self.get_shared(site)
        span, layer = (rows.first, rows.last), self.model.layer_of_pass[site.layer]
        return rows.sources.get_or_compute(site.layer, span, lambda: self._build_terms(rows, layer))

    def _build_terms(self, rows: Rows, layer: int) -> tuple[Term, ...]:
        """Return the terms of a distinct layer."""
        terms: tuple[Term, ...] = ()
        if rows.key_weights is not None:
            terms += (OffsetKeys(self._project(rows, rows.key_weights[layer]), rows.first),)
        if rows.query_weights is not None and rows.query_biases is not None:
            # transform_qkv has divided the query by the root of num_products, but not the key.
            # After the projection, which may be in half precision, the factor would round once more.
            scale = self.num_products**-0.5
            scaled = rows._replace(vectors=rows.vectors * scale)
            vectors = self._project(scaled, rows.query_weights[layer], rows.query_biases[layer] * scale)
            terms += (OffsetQueries(vectors, rows.first),)
        return terms

    def _project(self, rows: Rows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Project the rows, and return the vector of each offset, (heads, offsets, head_dim)."""
        projected = functional.linear(rows.vectors, weight, bias)
        vectors = projected.unflatten(-1, (self.model.num_heads, -1)).transpose(0, 1)
        return vectors.contiguous() if rows.row_of_offset is None else vectors.index_select(1, rows.row_of_offset)
