"""The backward pass of "triton": it launches the gradient kernels and finishes their sums with torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..fields import GRADIENTS, Call
from . import bias_gradient
from .arguments import (
    Inputs,
    KeyGradients,
    KeyRowSums,
    Known,
    OffsetSums,
    PairRules,
    QueryGradients,
    RowCounts,
    TableSums,
    Terms,
    at_rows,
    by_column,
    dropout_seeds_of,
    inputs_of,
    key_table_rows,
    level_matrix,
    new_ends,
    new_norm,
    new_rows,
    norm_of,
    pair_matrix,
    pairs_of,
    parts_of,
    query_table_rows,
    row_matrix,
    terms_of,
)
from .blocks import blocks_of, cdiv

_SUMS_OVER_KEYS = ("query", "query_factors", "query_levels", "key_table_factors", "key_table", "value_table")

_SUMS_OVER_QUERIES = ("key", "value", "key_factors", "key_levels", "query_table", "query_table_factors", "bias")


@dataclass(frozen=True)
class _QueryPart:
    """Some queries of a call, with the first arguments of all gradient kernels."""

    call: Call
    rows: slice
    d_out: Tensor
    delta: Tensor
    inputs: Inputs
    known: Known
    terms: Terms
    pairs: PairRules


class Backward:
    """One backward pass, which fills ``gradients``: the needed ones of ``GRADIENTS``, by name."""

    def __init__(
        self,
        call: Call,
        d_out: Tensor,
        d_lse: Tensor | None,
        out: Tensor,
        norm: Tensor,
        gradients: dict[str, Tensor],
    ) -> None:
        self.call, self.gradients, self.norm = call, gradients, norm
        self.batch, self.heads = call.value.shape[0], call.heads
        self.d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        self.dropout_seeds = dropout_seeds_of(call)
        self.delta = self._row_products(out)
        if d_lse is not None:
            # The derivatives of a row's log of its sum of exponentials are its weights.
            self.delta -= d_lse
        self.parts = list(parts_of(call))
        self.sums = {name: self._place(name) for name in GRADIENTS if name not in ("bias", "dense")}
        self.sums["bias"] = None

    def needs(self, *names: str) -> bool:
        """Whether any of these gradients is needed."""
        return any(name in self.gradients for name in names)

    def _place(self, name: str) -> Tensor | None:
        """Return the memory to sum a gradient in: its own, or float32 if torch adds more to it."""
        tensor: Tensor | None = getattr(self.call, name)
        if tensor is None:
            return None
        if name in ("key_table", "query_table", "value_table"):
            return torch.zeros_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)
        of_keys = name in ("key", "value", "key_factors", "key_levels")
        in_float = name.endswith(("factors", "levels")) or (name == "query" and self.call.key_table is not None)
        if in_float or (of_keys and len(self.parts) > 1):
            return tensor.new_zeros(self.batch, *tensor.shape[1:], dtype=torch.float32)
        gradient = self.gradients.get(name)
        return (
            gradient
            if gradient is not None and gradient.stride(3) == 1
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )

    def run(self) -> None:
        for call, rows in self.parts:
            part = self._part(call, rows)
            if self.needs(*_SUMS_OVER_KEYS):
                self._query_gradients(part)
            if self.needs(*_SUMS_OVER_QUERIES):
                self._key_gradients(part)
            if self.needs("dense"):
                self._dense_gradients(part)
        for name, found in self.sums.items():
            gradient = self.gradients.get(name)
            if gradient is not None and found is not None and found is not gradient:
                shared = found.shape[0] != gradient.shape[0]  # by all rows of the batch
                gradient.copy_(found.sum(0, keepdim=True) if shared else found)

    def _part(self, call: Call, rows: slice) -> _QueryPart:
        d_out, delta, norm = at_rows(self.d_out, rows), at_rows(self.delta, rows).contiguous(), self.norm
        if call is not self.call:
            norm = new_norm(d_out, len(norm), self.heads, call.n_q).copy_(norm[..., rows])
        dropout_seeds = None if self.dropout_seeds is None else self.dropout_seeds[:, :, rows].contiguous()
        return _QueryPart(
            call,
            rows,
            d_out,
            delta,
            inputs_of(call),
            Known(row_matrix(d_out), norm_of(norm, delta)),
            terms_of(call, d_out),
            pairs_of(call, dropout_seeds),
        )

    def _row_products(self, out: Tensor) -> Tensor:
        # Imported here, and likewise below, because it imports Triton.
        from .jit.gradients import row_products

        n_q, size = self.call.n_q, 64
        delta = self.norm.new_empty(self.batch, self.heads, n_q)
        row_products[(self.batch * self.heads * cdiv(n_q, size),)](
            row_matrix(out), row_matrix(self.d_out), delta, RowCounts(n_q, self.heads), BLOCK_M=size
        )
        return delta

    def _query_gradients(self, part: _QueryPart) -> None:
        """Compute all gradients that are sums over keys, and those that follow from them."""
        from .jit.query_gradients import query_gradients

        call, rows, d_out = part.call, part.rows, part.d_out
        blocks = blocks_of("query", call)

        def rows_of(table: Tensor | None, needed: bool) -> Tensor | None:
            return None if table is None or not needed else new_rows(d_out, self.heads, call.n_q, table.shape[1])

        key_rows = rows_of(call.key_table, self.needs("key_table", "key_table_factors", "query"))
        value_rows = rows_of(call.value_table, self.needs("value_table"))
        key_ends, value_ends = (
            None if rows is None else new_ends(d_out, self.heads, call.n_q) for rows in (key_rows, value_rows)
        )
        d_query, d_factors, d_levels = (self.sums[name] for name in ("query", "query_factors", "query_levels"))
        query_gradients[(self.batch * self.heads * cdiv(call.n_q, blocks.rows),)](
            part.inputs,
            part.known,
            QueryGradients(
                query=row_matrix(None if d_query is None else at_rows(d_query, rows)),
                factors=row_matrix(None if d_factors is None else at_rows(d_factors, rows)),
                levels=level_matrix(None if d_levels is None else at_rows(d_levels, rows), self.batch),
                tables=TableSums(key_ends, key_rows, value_ends, value_rows),
            ),
            part.terms,
            part.pairs,
            **blocks.launch,
        )
        d_key_table, d_value_table = self.sums["key_table"], self.sums["value_table"]
        key_table = call.key_table
        if key_ends is not None and key_rows is not None and d_key_table is not None and key_table is not None:
            found = by_column(key_ends, key_rows, key_table.shape[1])
            if (d_table_factors := self.sums["key_table_factors"]) is not None:
                d_table_factors[:, :, rows] += found @ key_table
            elif d_query is not None:
                d_query[:, :, rows] += found @ (key_table * call.scale)
            d_key_table += _fold(found.mT @ key_table_rows(call), d_key_table)
        if value_ends is not None and value_rows is not None and d_value_table is not None:
            found = by_column(value_ends, value_rows, d_value_table.shape[1])
            d_value_table += _fold(found.mT @ d_out.float(), d_value_table)

    def _key_gradients(self, part: _QueryPart) -> None:
        """Compute all gradients that are sums over queries."""
        from .jit.key_gradients import key_gradients

        call = part.call
        blocks, shared, table = blocks_of("key", call), call.shared, call.query_table
        ends = rows = None
        if table is not None and self.needs("query_table", "query_table_factors"):
            ends = new_ends(part.d_out, self.heads, call.n_k)
            rows = new_rows(part.d_out, self.heads, call.n_k, table.shape[1])
        offsets = OffsetSums(None, None)
        if self.needs("bias"):
            offsets = bias_gradient.new_sums(call, part.d_out, part.delta)
        key_gradients[(self.batch * self.heads // shared * cdiv(call.n_k, blocks.keys),)](
            part.inputs,
            part.known,
            KeyGradients(
                row_matrix(self.sums["key"], shared=shared),
                row_matrix(self.sums["value"], shared=shared),
                row_matrix(self.sums["key_factors"]),
                level_matrix(self.sums["key_levels"], self.batch),
                KeyRowSums(ends, rows),
            ),
            offsets,
            part.terms,
            part.pairs,
            ADD=len(self.parts) > 1,
            **blocks.launch,
        )
        if offsets.data is not None:
            found, before = bias_gradient.to_table(call, offsets), self.sums["bias"]
            self.sums["bias"] = found if before is None else before + found
        d_table, d_factors = self.sums["query_table"], self.sums["query_table_factors"]
        if ends is not None and rows is not None and table is not None and d_table is not None:
            assert d_factors is not None
            found = by_column(ends, rows, table.shape[1])
            d_factors += found @ table
            d_table += _fold(found.mT @ query_table_rows(call), d_table)

    def _dense_gradients(self, part: _QueryPart) -> None:
        """Compute the gradient of dense scores."""
        from .jit.dense_gradients import dense_gradients

        blocks = blocks_of("dense", part.call)
        size = blocks.rows
        gradient = self.gradients["dense"][:, :, part.rows]
        tiles = cdiv(part.call.n_q, size) * cdiv(part.call.n_k, size)
        dense_gradients[(gradient.shape[0] * self.heads * tiles,)](
            part.inputs,
            part.known,
            pair_matrix(gradient, gradient.shape[0]),
            part.terms,
            part.pairs,
            self.batch // gradient.shape[0],
            BLOCK=size,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def _fold(found: Tensor, table: Tensor) -> Tensor:
    """Sum a gradient per batch row and head to the shape of ``table``."""
    return found.sum(0) if table.shape[0] == found.shape[1] else found.sum((0, 1)).unsqueeze(0)
