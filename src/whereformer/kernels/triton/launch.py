"""The "triton" backend: flash attention with all terms fused in, in O(n) memory, on NVIDIA GPUs.

This module launches the kernels of ``jit``. Calls are computed by plans (``plan``): what is here runs once for each
kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backend import Backend, BackwardInputs, ForwardOutputs, Operators, Replay
from ..call import Call, ForwardState, LogSums, select_input
from ..terms import position_values
from . import available
from .arguments import (
    LOG2E,
    PREPARED_ROWS,
    SUMS_ROWS,
    SUMS_WIDTH,
    KeyGradients,
    PairRules,
    QueryGradients,
    TableSums,
    Terms,
    ToFill,
    covers,
    has_diagonals,
    inputs_of,
    level_matrix,
    new_table_sums,
    norm_of,
    pair_matrix,
    pairs_of,
    parts_of,
    row_matrix,
    table_matrix,
    terms_of,
)
from .blocks import blocks_of, cdiv, precision_of
from .plan import launch, record

_SUMS_OVER_KEYS = ("query", "query_factors", "query_levels", "key_table_factors", "key_table", "value_table")

_SUMS_OVER_QUERIES = ("key", "value", "key_factors", "key_levels", "query_table", "query_table_factors")


class Triton(Backend):
    """What is kept of each row is its :class:`Norm`, in one number or two."""

    name, supported_inputs = "triton", (*_SUMS_OVER_KEYS, *_SUMS_OVER_QUERIES, "bias", "dense")

    def unsupported_reason(self, call: Call, device: torch.device) -> str | None:
        return available.unsupported_reason(call, device)

    def adapt(self, call: Call) -> Call:
        changes: dict[str, Any] = {}
        if call.scale <= 0:
            # The kernels take the largest product of a row for that of its largest score.
            changes["scale"] = -call.scale or 1.0
            changes["query"] = None if call.query is None else call.query * (-1 if call.scale else 0)
        if call.query_positions is not None or call.key_positions is not None:
            # The kernels take both sequences' positions as affine, or both as tensors.
            matter = call.limits_offsets or any(table is not None for table in call.tables)
            for name, positions in zip(("query_positions", "key_positions"), call.positions(), strict=True):
                changes[name] = position_values(positions, call.value.device) if matter else None
        per_head = call.key_factors, call.key_levels, call.query_table
        if call.group_size > 1 and any(tensor is not None for tensor in per_head):
            # What else keys have differs from head to head.
            changes["value"] = call.value.repeat_interleave(call.group_size, 1)
            changes["key"] = None if call.key is None else call.key.repeat_interleave(call.group_size, 1)
        if call.query_table is not None and call.query_table_factors is None:
            # By the call's own scale, whatever its sign.
            key: Any = changes.get("key", call.key)
            changes["query_table_factors"] = key.float() * call.scale
        return replace(call, **changes) if changes else call

    def new_buffer(self, call: Call) -> Tensor:
        return _forward_state(call).buffer

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[ForwardOutputs, Replay]:
        return record(lambda: self._forward(call), tensors)

    def backward(
        self, call: Call, given: BackwardInputs, grad_names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Replay]:
        return record(lambda: self._backward(call, given, grad_names), tensors)

    def _forward(self, call: Call) -> ForwardOutputs:
        state = _forward_state(call)
        if state.output.numel() == 0 or call.n_k == 0:
            state.output.zero_()
            state.row_stats.fill_(math.inf)
        else:
            for part, rows in parts_of(call):
                _fill(part, state.select(rows))
        return state.output, state.buffer, _lse_of(state.row_stats) if call.wants_lse else None

    def _backward(self, call: Call, given: BackwardInputs, grad_names: Sequence[str]) -> list[Tensor]:
        d_output, d_lse, *results = given
        gradients = {name: call.new_gradient(name) for name in grad_names}
        if d_output.numel() == 0 or call.n_k == 0:
            return [gradient.zero_() for gradient in gradients.values()]
        state, parts = _forward_state(call, *results), list(parts_of(call))
        if len(parts) == 1:
            return list(_Backward(call, state, gradients, d_output, d_lse).run().values())
        sums = {name: torch.zeros_like(gradient, dtype=call.score_dtype) for name, gradient in gradients.items()}
        for part, rows in parts:
            some = slice(rows.start, rows.stop)
            found = {name: torch.empty_like(part.new_gradient(name), dtype=call.score_dtype) for name in grad_names}
            of_part = d_output[:, :, some], None if d_lse is None else d_lse[:, :, some]
            for name, gradient in _Backward(part, state.select(rows), found, *of_part).run().items():
                select_input(name, sums[name], rows).add_(gradient)
        return [gradient.copy_(sums[name]) for name, gradient in gradients.items()]


def _forward_state(call: Call, *results: Tensor) -> ForwardState:
    """Allocate what a forward keeps, or find its parts in what it returned."""
    may_be_large = any(each is not None for each in (call.bias, call.query_factors, call.query_levels, call.dense))
    return call.forward_state(2 if may_be_large else 1, *results)


def _lse_of(norm: Tensor) -> LogSums:
    """Return the logs of the rows' sums of exponentials, whose norm is in units of log2."""
    shift = norm[0] * math.log(2)
    empty = shift.isposinf()
    log_sum = norm[1] * math.log(2) if len(norm) > 1 else torch.zeros_like(shift)
    return torch.stack([shift.masked_fill(empty, -math.inf), log_sum.masked_fill(empty, 0.0)])


def _prepare(
    call: Call,
    pairs: PairRules,
    state: ForwardState | None = None,
    d_out: Tensor | None = None,
    d_lse: Tensor | None = None,
) -> Tensor | None:
    """Fill what ``pairs`` has room for, and return ``delta`` in the backward."""
    # Imported here, and likewise below, because it imports Triton.
    from .jit.prepare import prepare

    stats = None if state is None else state.row_stats
    delta = None if stats is None else stats.new_empty_strided(stats.shape[1:], stats.stride()[1:])
    seed = call.seed if call.seed is not None and call.seed.dim() == 0 else None
    if any(each is not None for each in (delta, seed, call.key_mask)):
        launch(
            prepare,
            call.value.shape[0] * call.heads * cdiv(call.n_q, PREPARED_ROWS),
            row_matrix(None if state is None else state.output),
            row_matrix(None if state is None else state.rounding_error),
            row_matrix(d_out),
            ToFill(delta, None if delta is None else delta.stride(1), d_lse, seed),
            pairs,
            num_warps=4,
        )
    return delta


def _met_by(name: str, call: Call, d_out: Tensor | None) -> tuple[Tensor | None, float]:
    """Return what a table of vectors is multiplied with, (1 or batch, heads, n, dim), and the factor on that."""
    if name == "value_table":
        return d_out, 1.0
    factors = call.query_table_factors if name == "query_table" else call.key_table_factors
    return (call.query, call.scale) if factors is None else (factors, 1.0)


def _terms(call: Call, d_out: Tensor | None, sums: dict[str, TableSums]) -> Terms:
    """Return what makes the call's scores, after multiplying tables of vectors with what they meet, and filling the
    rows of their ``sums`` with zeros."""
    from .jit.offsets import products

    found: dict[str, Tensor | None] = {}
    batch, heads = call.value.shape[0], call.heads
    for name in _BY_TABLE:
        table, (rows, scale) = getattr(call, name), _met_by(name, call, d_out)
        if table is None or (rows is None and name not in sums):
            continue
        n, length = call.n_k if name == "query_table" else call.n_q, table.shape[1]
        found[name] = None if rows is None else call.value.new_empty(batch, heads, n, length, dtype=torch.float32)
        size = _rows_of(table)
        launch(
            products,
            batch * heads * cdiv(n, SUMS_ROWS) * (SUMS_ROWS // size["ROWS"]),
            row_matrix(rows),
            table_matrix(table, call),
            found[name],
            sums[name].rows if name in sums else None,
            *(scale, 1.0 if name == "value_table" else LOG2E, n, heads, length),
            PRECISION=precision_of(call),
            **size,
        )
    return terms_of(call, found)


def _rows_of(table: Tensor) -> dict[str, int]:
    """Return how many rows of the table's width a program reads at once, which fit into 99 KiB in float32."""
    width = table.shape[2]
    return {"ROWS": 64 if width <= 64 else 32 if width <= 128 else 16, "num_warps": 4 if width <= 64 else 8}


def _fill(call: Call, state: ForwardState) -> None:
    """Fill the output of a call and what is kept beside it."""
    from .jit.forward import forward

    blocks, pairs = blocks_of("forward", call), pairs_of(call)
    _prepare(call, pairs)
    sums = {} if call.value_table is None else {"value_table": new_table_sums(call, "value_table")}
    launch(
        forward,
        call.value.shape[0] * call.heads * cdiv(call.n_q, blocks.rows),
        inputs_of(call),
        row_matrix(state.output),
        row_matrix(state.rounding_error),
        norm_of(state.row_stats),
        table_matrix(call.value_table, call),
        sums["value_table"].rows if sums else None,
        _terms(call, None, sums),
        pairs,
        **blocks.launch,
    )


_DIAGONAL_PROGRAMS = 1500
"""About the most programs of the kernel of diagonals: enough for a GPU, and each has sums of its own."""

_FEWEST_PAIRS = 2**22
"""Pairs whose gradients are in memory at once, where a bias has no diagonals: more only beside large inputs."""


def _diagonals(call: Call, between: bool) -> tuple[int, int]:
    """Return the first and the last diagonal, key index - query index, whose pairs add to the gradient of a bias.

    If ``between``, only those whose offsets are between the ends of its table.
    """
    assert call.bias is not None
    lows, highs = [call.min_offset], [call.max_offset]
    if between:
        lows.append(call.first[0] + 1)
        highs.append(call.first[0] + call.bias.shape[1] - 2)
    start, stride = call.affine[2] - call.affine[0], call.affine[3]
    first = max([1 - call.n_q, *(-((start - low) // stride) for low in lows if low is not None)])
    last = min([call.n_k - 1, *((high - start) // stride for high in highs if high is not None)])
    return first, last


_BY_TABLE = {
    "key_table": ("key_table", "key_table_factors", "query"),
    "query_table": ("query_table", "query_table_factors"),
    "value_table": ("value_table",),
}
"""The gradients that need the sums by offset of each table."""


class _Backward:
    """One backward pass, which fills ``gradients``."""

    def __init__(
        self, call: Call, state: ForwardState, gradients: dict[str, Tensor], d_out: Tensor, d_lse: Tensor | None
    ) -> None:
        self.call, self.gradients, self.programs = call, gradients, call.value.shape[0] * call.heads
        self.d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        self.d_lse = None if d_lse is None else d_lse.float().contiguous()
        self.state, pairs = state, pairs_of(call)
        delta = _prepare(call, pairs, state, self.d_out, self.d_lse)
        has = [name for name in _BY_TABLE if getattr(call, name) is not None and self.needs(*_BY_TABLE[name])]
        if self.needs("bias") and has_diagonals(call) and not covers(call, call.first[0], gradients["bias"].shape[1]):
            has.append("bias")
        self.sums = {name: new_table_sums(call, name) for name in has}
        self.first = inputs_of(call, self.d_out), norm_of(state.row_stats, delta)
        self.last = _terms(call, self.d_out, self.sums), pairs
        # Where the kernels put them: rows that all of the batch share have a gradient of each item.
        self.places = {
            name: gradient.new_empty(call.value.shape[0], *gradient.shape[1:], dtype=torch.float32)
            if name.endswith(("factors", "levels"))
            else gradient
            for name, gradient in gradients.items()
        }

    def needs(self, *names: str) -> bool:
        """Whether any of these gradients is needed."""
        return any(name in self.gradients for name in names)

    def run(self) -> dict[str, Tensor]:
        """Return the gradients by name."""
        if self.needs(*_SUMS_OVER_KEYS) or "bias" in self.sums:
            self._query_gradients()
        if self.needs(*_SUMS_OVER_QUERIES):
            self._key_gradients()
        if self.needs("bias"):
            self._bias_by_diagonals() if has_diagonals(self.call) else self._bias_by_pairs()
        if self.needs("dense"):
            self._dense_gradients()
        for name, found in self.places.items():
            if found is not self.gradients[name]:
                parts = len(found) // len(self.gradients[name])
                self.gradients[name].copy_(found.sum(0, keepdim=True) if parts > 1 else found)
        return self.gradients

    def _query_gradients(self) -> None:
        """Compute all gradients that are sums over keys, and those that follow from them."""
        from .jit.query_gradients import query_gradients

        call, blocks, places, nothing = self.call, blocks_of("query", self.call), self.places, TableSums(None, None)
        meets_query = call.key_table_factors is None and self.needs("query")
        launch(
            query_gradients,
            self.programs * cdiv(call.n_q, blocks.rows),
            *self.first,
            QueryGradients(
                row_matrix(places.get("query")),
                row_matrix(places.get("query_factors")),
                level_matrix(places.get("query_levels")),
                self.sums.get("key_table", nothing),
                self.sums.get("value_table", nothing),
                self.sums.get("bias", nothing),
            ),
            table_matrix(call.key_table if meets_query else None, call),
            *self.last,
            **blocks.launch,
        )
        self._table_gradients("key_table")
        self._table_gradients("value_table")

    def _key_gradients(self) -> None:
        """Compute all gradients that are sums over queries, and those that follow from them."""
        from .jit.key_gradients import key_gradients

        call, blocks, places = self.call, blocks_of("key", self.call), self.places
        launch(
            key_gradients,
            self.programs // call.group_size * cdiv(call.n_k, blocks.keys),
            *self.first,
            KeyGradients(
                row_matrix(places.get("key"), shared=call.group_size),
                row_matrix(places.get("value"), shared=call.group_size),
                row_matrix(places.get("key_factors")),
                level_matrix(places.get("key_levels")),
                self.sums.get("query_table", TableSums(None, None)),
            ),
            *self.last,
            **blocks.launch,
        )
        self._table_gradients("query_table")

    def _bias_by_pairs(self) -> None:
        """Compute the gradient of a bias, (heads, T), from that of all scores, of a few queries at a time.

        Pairs are added up as whole numbers, whose sum is the same in any order.
        """
        call, gradient = self.call, self.gradients["bias"]
        (batch, heads), n_k, length = self.d_out.shape[:2], call.n_k, gradient.shape[1]
        size = max(1, max(_FEWEST_PAIRS, self.d_out.numel() // 4) // (batch * heads * n_k))
        total = gradient.new_zeros(gradient.shape, dtype=torch.float64)
        for part, rows in parts_of(call, size):
            some = slice(rows.start, rows.stop)
            dense = gradient.new_empty(batch, heads, len(rows), n_k, dtype=torch.float32)
            d_lse = None if self.d_lse is None else self.d_lse[:, :, some]
            _Backward(part, self.state.select(rows), {"dense": dense}, self.d_out[:, :, some], d_lse).run()
            columns = (part.offsets() - call.first[0]).clamp(0, length - 1)
            # The largest power of 2 with which no sum overflows; it is not finite where a gradient is not.
            most = 2.0 ** (62 - (batch * len(rows) * n_k).bit_length())
            unit = (most / dense.abs().amax().clamp_min(2.0**-60)).log2().floor().exp2()
            whole = (dense * unit).long()
            whole = whole.sum(0, keepdim=True) if len(columns) == 1 else whole
            sums = whole.new_zeros(length, heads)
            sums.index_add_(0, columns.flatten(), whole.movedim(1, -1).reshape(-1, heads))
            total += sums.mT / unit.double()
        gradient.copy_(total)

    def _bias_by_diagonals(self) -> None:
        """Compute the gradient of a bias, (heads, T), from sums over all pairs with each offset."""
        from .jit.diagonals import diagonals, finish_bias

        call, gradient, sums = self.call, self.gradients["bias"], self.sums.get("bias")
        batch, blocks = call.value.shape[0], blocks_of("square", call)
        first, last = _diagonals(call, between=sums is not None)
        # Those of a diagonal of tiles are on both sides of its own.
        low, size = first // blocks.rows, blocks.rows
        count = max(0, last // size + 2 - low) if first <= last else 0
        parts = max(1, min(batch, _DIAGONAL_PROGRAMS // max(1, count * call.heads)))
        out = call.value.new_empty(call.heads, count, parts, 2, size, dtype=torch.float32)
        if count:
            launch(
                diagonals,
                count * call.heads * parts,
                *self.first,
                out,
                *self.last,
                *(low, count, parts, batch),
                BLOCK=size,
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )
        (query_start, _, key_start, stride), columns = call.affine, 128
        launch(
            finish_bias,
            call.heads * cdiv(gradient.shape[1], columns),
            gradient,
            out,
            None if sums is None else sums.ends,
            call.first[0] - (key_start - query_start) - low * size * stride,
            *(gradient.shape[1], count, parts, batch, call.heads, call.n_q),
            STRIDE=stride,
            BLOCK=size,
            COLUMNS=columns,
            num_warps=1,
        )

    def _table_gradients(self, name: str) -> None:
        """Compute the gradients of a table of vectors and of its factors from the sums by offset."""
        from .jit.offsets import table_gradients

        table, sums, (met, scale) = getattr(self.call, name), self.sums.get(name), _met_by(name, self.call, self.d_out)
        if sums is None:
            return
        if self.needs(f"{name}_factors"):
            self.places[f"{name}_factors"] = sums.by_column(table.shape[1]) @ table
        if not self.needs(name) or met is None:
            return
        (batch, heads), (n, dim), length = sums.ends.shape[:2], met.shape[2:], table.shape[1]
        shared = heads // len(table)
        out = table.new_empty(batch * shared, len(table), length, dim, dtype=torch.float32)
        launch(
            table_gradients,
            self.programs * (cdiv(max(length - 2, 0), SUMS_WIDTH) + 1),
            row_matrix(met),
            *sums,
            out,
            *(scale, n, heads, length),
            PRECISION=precision_of(self.call),
            **_rows_of(table),
        )
        self.places[name] = self.gradients[name] = out.sum(0)

    def _dense_gradients(self) -> None:
        """Compute the gradient of dense scores."""
        from .jit.gradients import dense_gradients

        call, blocks, gradient = self.call, blocks_of("square", self.call), self.gradients["dense"]
        items, size = len(gradient), blocks.rows
        launch(
            dense_gradients,
            items * call.heads * cdiv(call.n_q, size) * cdiv(call.n_k, size),
            *self.first,
            pair_matrix(gradient),
            *self.last,
            call.value.shape[0] // items,
            BLOCK=size,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


backend = Triton()
operators = Operators(backend)
