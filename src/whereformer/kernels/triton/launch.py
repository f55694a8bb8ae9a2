"""The "triton" backend: flash attention with all terms fused in, in O(n) memory, on NVIDIA GPUs.

This module launches the kernels of ``jit``. Calls are computed by plans (``plan``): what is here runs once for each
kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..fields import GRADIENTS, Call, rows_axis
from ..logsums import LogSums
from ..operators import Backend, Operators, Results
from ..precision import without_autocast
from ..terms import position_values
from . import available
from .arguments import (
    LOG2E,
    PREPARED_ROWS,
    SUMS_ROWS,
    SUMS_WIDTH,
    KeyGradients,
    KeyRowSums,
    Known,
    OffsetSums,
    PairRules,
    QueryGradients,
    TableSums,
    Terms,
    ToFill,
    by_column,
    inputs_of,
    level_matrix,
    new_ends,
    new_norm,
    new_rows,
    norm_of,
    of_heads,
    pair_matrix,
    pairs_of,
    parts_of,
    row_matrix,
    terms_of,
)
from .blocks import LARGEST_BLOCK, blocks_of, cdiv, precision_of
from .plan import launch, record


class Triton(Backend):
    """What is kept is the kernels' ``Norm``, (1 or 2, batch, heads, n_q)."""

    name = "triton"
    records = True

    def why_not(self, call: Call, device: torch.device) -> str | None:
        return available.why_not(call, device) or super().why_not(call, device)

    def adapted(self, call: Call) -> Call:
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
        if call.shared > 1 and any(each is not None for each in (call.key_factors, call.key_levels, call.query_table)):
            # What else keys have differs from head to head.
            changes["value"] = call.value.repeat_interleave(call.shared, 1)
            changes["key"] = None if call.key is None else call.key.repeat_interleave(call.shared, 1)
        if call.query_table is not None and call.query_table_factors is None:
            # By the call's own scale, whatever its sign.
            key: Any = changes.get("key", call.key)
            changes["query_table_factors"] = key.float() * call.scale
        if call.query_factors is not None and call.query_factors.shape[3] == 0:
            changes["query_factors"] = changes["key_factors"] = None
        return replace(call, **changes) if changes else call

    def new_kept(self, call: Call) -> Tensor:
        may_be_large = any(each is not None for each in (call.bias, call.query_factors, call.query_levels, call.dense))
        return new_norm(call.value, 2 if may_be_large else 1, call.heads, call.n_q)

    def forward(self, call: Call) -> Results:
        out, norm = call.new_output(), self.new_kept(call)
        if out.numel() == 0 or call.n_k == 0:
            out.zero_()
            norm.fill_(math.inf)
            return out, norm, _lse_of(norm) if call.wants_lse else None
        with torch.no_grad(), without_autocast(out.device), _on(out.device):
            for part, rows, seeds in parts_of(call):
                if part is call:
                    _fill(call, None, out, norm)
                else:
                    part_out, part_norm = part.new_output(), self.new_kept(part)
                    _fill(part, seeds, part_out, part_norm)
                    out[:, :, rows], norm[..., rows] = part_out, part_norm
        return out, norm, _lse_of(norm) if call.wants_lse else None

    def backward(
        self, call: Call, needed: Sequence[str], d_output: Tensor, d_lse: Tensor | None, output: Tensor, kept: Tensor
    ) -> list[Tensor]:
        if output.numel() == 0 or call.n_k == 0:
            return [call.new_gradient(name).zero_() for name in needed]
        sums: dict[str, Tensor] = {}
        with torch.no_grad(), without_autocast(output.device), _on(output.device):
            for part, rows, seeds in parts_of(call):
                if part is call:
                    return _Backward(call, None, needed, d_output, d_lse, output, kept).run()
                of_rows = None if d_lse is None else d_lse[:, :, rows]
                norm = self.new_kept(part).copy_(kept[..., rows])
                given = d_output[:, :, rows], of_rows, output[:, :, rows], norm
                for name, gradient in zip(needed, _Backward(part, seeds, needed, *given).run(), strict=True):
                    by_row = rows_axis(name) == "n_q"
                    if name not in sums:
                        sums[name] = call.new_gradient(name) if by_row else torch.zeros_like(gradient, dtype=call.wide)
                    if by_row:
                        sums[name][:, :, rows] = gradient
                    else:
                        sums[name] += gradient
        return [call.new_gradient(name).copy_(sums[name]) for name in needed]

    def record_forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Any, Callable[..., Any] | None]:
        return record(lambda: self.forward(call), tensors)

    def record_backward(
        self, call: Call, needed: Sequence[str], tensors: Sequence[Tensor], *given: Any
    ) -> tuple[Any, Callable[..., Any] | None]:
        return record(lambda: self.backward(call, needed, *given), tensors)


def _lse_of(norm: Tensor) -> LogSums:
    """Return the logs of the rows' sums of exponentials, whose norm is in units of log2."""
    shift = norm[0] * math.log(2)
    empty = shift.isposinf()
    log_sum = norm[1] * math.log(2) if len(norm) > 1 else torch.zeros_like(shift)
    return torch.stack([shift.masked_fill(empty, -math.inf), log_sum.masked_fill(empty, 0.0)])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device, because Triton launches on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _prepare(
    call: Call,
    pairs: PairRules,
    seeds: Tensor | None,
    out: Tensor | None = None,
    d_out: Tensor | None = None,
    d_lse: Tensor | None = None,
    with_offsets: bool = False,
) -> tuple[Tensor | None, OffsetSums]:
    """Fill what ``pairs`` has room for, and in the backward return ``delta``, with the sums of a bias's gradient.

    Args:
        seeds: those of dropout's rows, if they are there already.
    """
    # Imported here, and likewise below, because it imports Triton.
    from .jit.prepare import prepare

    value, batch, heads, n_q = call.value, call.value.shape[0], call.heads, call.n_q
    delta = None if out is None else value.new_empty(batch, heads, n_q, dtype=torch.float32)
    offsets, vectors, length = OffsetSums(None, None), None, 0
    if with_offsets:
        length = _number_of_sums(call)
        offsets = OffsetSums(
            value.new_empty(batch, heads, length, dtype=torch.int64),
            value.new_empty(batch, heads, 4, cdiv(n_q, PREPARED_ROWS), dtype=torch.float32),
        )
        vectors = None if call.value_table is None else of_heads(call.value_table, batch, heads)
    seed = call.seed if seeds is None else None
    if any(each is not None for each in (delta, seed, call.key_mask)):
        launch(
            prepare,
            batch * heads * cdiv(n_q, PREPARED_ROWS),
            row_matrix(out),
            row_matrix(d_out),
            row_matrix(value if with_offsets else None, shared=call.shared),
            row_matrix(vectors),
            ToFill(delta, d_lse, offsets.bounds, offsets.data, seed),
            pairs,
            *(0 if vectors is None else vectors.shape[2], length),
            num_warps=4,
        )
    return delta, offsets


def _products_with(
    rows: Tensor | None, table: Tensor, call: Call, n: int, zeros: Tensor | None, scale: float = 1.0, times: float = 1.0
) -> Tensor | None:
    """Return ``scale * rows @ (times * table).mT``, (batch, heads, n, T), and fill ``zeros`` with zeros.

    Args:
        rows: (1 or batch, heads, n, dim); None for zeros only.
    """
    from .jit.vectors import products

    batch, heads, length = call.value.shape[0], call.heads, table.shape[1]
    out = None if rows is None else call.value.new_empty(batch, heads, n, length, dtype=torch.float32)
    launch(
        products,
        batch * heads * cdiv(n, SUMS_ROWS) * (SUMS_ROWS // PREPARED_ROWS),
        row_matrix(rows, batch),
        row_matrix(of_heads(table, batch, heads)),
        out,
        zeros,
        *(scale, times, n, heads, length),
        BLOCK=32 if length <= 32 else 64,
        PRECISION=precision_of(call),
        num_warps=4,
    )
    return out


def _terms(call: Call, d_out: Tensor | None, sums: dict[str, Tensor]) -> Terms:
    """Return what makes the call's scores; the gradient kernels also need the output's gradient.

    This fills ``sums``, the rows of ``TableSums`` of each table, with zeros.
    """
    keys = queries = values = None
    if (table := call.key_table) is not None:
        rows, scale = (call.query, call.scale) if call.key_table_factors is None else (call.key_table_factors, 1.0)
        keys = _products_with(rows, table, call, call.n_q, sums.get("key_table"), scale, LOG2E)
    if (table := call.query_table) is not None:
        queries = _products_with(call.query_table_factors, table, call, call.n_k, sums.get("query_table"), times=LOG2E)
    if (table := call.value_table) is not None and (d_out is not None or "value_table" in sums):
        values = _products_with(d_out, table, call, call.n_q, sums.get("value_table"))
    return terms_of(call, keys, queries, values)


def _fill(call: Call, seeds: Tensor | None, out: Tensor, norm: Tensor) -> None:
    """Fill the output and the norm of a call."""
    from .jit.forward import forward

    batch, heads, blocks, table = call.value.shape[0], call.heads, blocks_of("forward", call), call.value_table
    pairs = pairs_of(call, seeds)
    _prepare(call, pairs, seeds)
    sums = {} if table is None else {"value_table": new_rows(out, heads, call.n_q, table.shape[1])}
    launch(
        forward,
        batch * heads * cdiv(call.n_q, blocks.rows),
        inputs_of(call),
        row_matrix(out),
        norm_of(norm),
        row_matrix(None if table is None else of_heads(table, batch, heads)),
        sums.get("value_table"),
        _terms(call, None, sums),
        pairs,
        **blocks.launch,
    )


_BY_TABLE = {
    "key_table": ("key_table", "key_table_factors", "query"),
    "query_table": ("query_table", "query_table_factors"),
    "value_table": ("value_table",),
}
"""The gradients that need the sums by offset of each table."""

_SUMS_OVER_KEYS = ("query", "query_factors", "query_levels", "key_table_factors", "key_table", "value_table")

_SUMS_OVER_QUERIES = ("key", "value", "key_factors", "key_levels", "query_table", "query_table_factors", "bias")


class _Backward:
    """One backward pass; ``seeds`` are those of dropout's rows, if they are there already."""

    def __init__(
        self,
        call: Call,
        seeds: Tensor | None,
        needed: Sequence[str],
        d_out: Tensor,
        d_lse: Tensor | None,
        out: Tensor,
        norm: Tensor,
    ) -> None:
        self.call, self.batch, self.heads = call, call.value.shape[0], call.heads
        self.gradients = {name: call.new_gradient(name) for name in needed}
        out, self.d_out = (each if each.stride(3) == 1 else each.contiguous() for each in (out, d_out))
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        self.pairs = pairs_of(call, seeds)
        delta, self.offsets = _prepare(call, self.pairs, seeds, out, self.d_out, d_lse, with_offsets=self.needs("bias"))
        self.inputs, self.known = inputs_of(call), Known(row_matrix(self.d_out), norm_of(norm, delta))
        self.sums = {
            name: new_rows(out, self.heads, call.n_k if name == "query_table" else call.n_q, table.shape[1])
            for name, gradients in _BY_TABLE.items()
            if (table := getattr(call, name)) is not None and self.needs(*gradients)
        }
        self.terms = _terms(call, self.d_out, self.sums)
        tables = ("bias", *_BY_TABLE, "dense")
        self.places = {name: self._place(name) for name in GRADIENTS if name not in tables}

    def needs(self, *names: str) -> bool:
        """Whether any of these gradients is needed."""
        return any(name in self.gradients for name in names)

    def _place(self, name: str) -> Tensor | None:
        """Return the memory to sum a gradient in: its own, or float32 if more is added to it."""
        tensor: Tensor | None = getattr(self.call, name)
        if tensor is None:
            return None
        if name.endswith(("factors", "levels")):
            return tensor.new_zeros(self.batch, *tensor.shape[1:], dtype=torch.float32)
        return self.gradients[name] if name in self.gradients else self.call.new_gradient(name)

    def run(self) -> list[Tensor]:
        """Return the gradients."""
        if self.needs(*_SUMS_OVER_KEYS):
            self._query_gradients()
        if self.needs(*_SUMS_OVER_QUERIES):
            self._key_gradients()
        if self.needs("dense"):
            self._dense_gradients()
        for name, gradient in self.gradients.items():
            found = self.places.get(name)
            if found is not None and found is not gradient:
                # Rows that all of the batch share have the sum of their gradients.
                gradient.copy_(found.sum(0, keepdim=True) if len(found) != len(gradient) else found)
        return list(self.gradients.values())

    def _query_gradients(self) -> None:
        """Compute all gradients that are sums over keys, and those that follow from them."""
        from .jit.query_gradients import query_gradients

        call, blocks, table = self.call, blocks_of("query", self.call), self.call.key_table
        key_sums, value_sums = self.sums.get("key_table"), self.sums.get("value_table")
        key_ends, value_ends = (
            None if sums is None else new_ends(self.d_out, self.heads, call.n_q) for sums in (key_sums, value_sums)
        )
        meets = table is not None and call.key_table_factors is None and self.needs("query")
        launch(
            query_gradients,
            self.batch * self.heads * cdiv(call.n_q, blocks.rows),
            self.inputs,
            self.known,
            QueryGradients(
                query=row_matrix(self.places["query"]),
                factors=row_matrix(self.places["query_factors"]),
                levels=level_matrix(self.places["query_levels"], self.batch),
                tables=TableSums(key_ends, key_sums, value_ends, value_sums),
            ),
            row_matrix(of_heads(table, self.batch, self.heads) if table is not None and meets else None),
            self.terms,
            self.pairs,
            **blocks.launch,
        )
        if key_ends is not None and key_sums is not None and table is not None:
            if (d_table_factors := self.places["key_table_factors"]) is not None:
                d_table_factors += by_column(key_ends, key_sums, table.shape[1]) @ table
            met, scale = (call.query, call.scale) if call.key_table_factors is None else (call.key_table_factors, 1.0)
            self._table_gradient("key_table", met, key_ends, key_sums, scale)
        if value_ends is not None and value_sums is not None:
            self._table_gradient("value_table", self.d_out, value_ends, value_sums)

    def _table_gradient(self, name: str, met: Tensor | None, ends: Tensor, sums: Tensor, scale: float = 1.0) -> None:
        """Compute the gradient of a table from sums by offset and what its vectors meet times ``scale``, (1 or batch,
        heads, n, dim)."""
        from .jit.vectors import table_gradients

        if not self.needs(name) or met is None:
            return
        gradient, (n, dim) = self.gradients[name], met.shape[2:]
        length = gradient.shape[1]
        out = met.new_empty(self.batch, self.heads, length, dim, dtype=torch.float32)
        launch(
            table_gradients,
            self.batch * self.heads * (cdiv(max(length - 2, 0), SUMS_WIDTH) + 1),
            row_matrix(met, self.batch),
            ends,
            sums,
            out,
            *(scale, n, self.heads, length),
            PRECISION=precision_of(self.call),
            num_warps=4,
        )
        self.gradients[name] = out.sum(0) if len(gradient) == self.heads else out.sum((0, 1)).unsqueeze(0)

    def _key_gradients(self) -> None:
        """Compute all gradients that are sums over queries."""
        from .jit.key_gradients import key_gradients

        call, blocks, table = self.call, blocks_of("key", self.call), self.call.query_table
        sums = self.sums.get("query_table")
        ends = None if sums is None else new_ends(self.d_out, self.heads, call.n_k)
        launch(
            key_gradients,
            self.batch * self.heads // call.shared * cdiv(call.n_k, blocks.keys),
            self.inputs,
            self.known,
            KeyGradients(
                row_matrix(self.places["key"], shared=call.shared),
                row_matrix(self.places["value"], shared=call.shared),
                row_matrix(self.places["key_factors"]),
                level_matrix(self.places["key_levels"], self.batch),
                KeyRowSums(ends, sums),
            ),
            self.offsets,
            self.terms,
            self.pairs,
            **blocks.launch,
        )
        if self.needs("bias"):
            _finish_bias(call, self.pairs, self.offsets, self.gradients["bias"])
        if ends is not None and sums is not None and table is not None:
            if (d_factors := self.places["query_table_factors"]) is not None:
                d_factors += by_column(ends, sums, table.shape[1]) @ table
            self._table_gradient("query_table", call.query_table_factors, ends, sums)

    def _dense_gradients(self) -> None:
        """Compute the gradient of dense scores."""
        from .jit.dense_gradients import dense_gradients

        blocks, gradient = blocks_of("dense", self.call), self.gradients["dense"]
        items, size = len(gradient), blocks.rows
        launch(
            dense_gradients,
            items * self.heads * cdiv(self.call.n_q, size) * cdiv(self.call.n_k, size),
            self.inputs,
            self.known,
            pair_matrix(gradient, items),
            self.terms,
            self.pairs,
            self.batch // items,
            BLOCK=size,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


# --- the gradient of a bias, a sum of whole numbers, which is the same in any order


def _finish_bias(call: Call, pairs: PairRules, offsets: OffsetSums, gradient: Tensor) -> None:
    """Compute the gradient of a bias, (heads, T), from the sums."""
    from .jit.prepare import finish_bias

    (batch, heads, number), length = offsets.data.shape, gradient.shape[1]
    first, stride = -call.n_k, 1
    if _by_diagonal(call):
        query_start, _, key_start, stride = call.affine
        first = key_start - query_start + (1 - call.n_q - LARGEST_BLOCK) * stride - call.first[0]
    left = min(max(-first // stride + 1, 0), number)
    right = min(max(-((first - max(length - 1, 1)) // stride), left), number)
    columns = 128
    launch(
        finish_bias,
        heads * cdiv(length, columns),
        gradient,
        offsets,
        pairs,
        *(first, left, right, number, length, batch),
        STRIDE=stride,
        BLOCK=columns,
        num_warps=1,
    )


def _number_of_sums(call: Call) -> int:
    """Return how many sums a row of ``OffsetSums`` has."""
    assert call.bias is not None
    by_diagonal = call.n_q + call.n_k - 1 + 2 * LARGEST_BLOCK
    return by_diagonal if _by_diagonal(call) else call.bias.shape[1] + 2 * call.n_k


def _by_diagonal(call: Call) -> bool:
    _, query_stride, _, key_stride = call.affine
    return call.query_positions is None and query_stride == key_stride


backend = Triton()
operators = Operators(backend)
