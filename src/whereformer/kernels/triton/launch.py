"""The "triton" backend: flash attention with all terms fused in, in O(n) memory, on NVIDIA GPUs.

This module launches the kernels of ``jit``, once for each kind of call: ``plan`` records a function for later calls.
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
from . import arguments, available
from .blocks import cdiv, choose_blocks, choose_precision
from .plan import launch, record

_SUMS_OVER_KEYS = ("query", "query_factors", "query_levels", "key_table_factors", "key_table", "value_table")
_SUMS_OVER_QUERIES = ("key", "value", "key_factors", "key_levels", "query_table", "query_table_factors")


class Triton(Backend):
    """The backend; of each row it saves the :class:`Norm`, in one number or two."""

    name, supported_inputs = "triton", (*_SUMS_OVER_KEYS, *_SUMS_OVER_QUERIES, "bias", "dense")

    def unsupported_reason(self, call: Call, device: torch.device) -> str | None:
        return available.unsupported_reason(call, device)

    def adapt(self, call: Call) -> Call:
        call = super().adapt(call)
        changes: dict[str, Any] = {}
        if call.scale <= 0:
            # The kernels find a row's largest score by its largest product, which needs a positive scale.
            changes["scale"] = -call.scale or 1.0
            changes["query"] = None if call.query is None else call.query * (-1 if call.scale else 0)
        if call.query_positions is not None or call.key_positions is not None:
            # The kernels take both sequences' positions as affine, or both as tensors.
            matter = call.limits_offsets or any(table is not None for table in call.tables)
            for name, positions in zip(("query_positions", "key_positions"), call.positions(), strict=True):
                changes[name] = position_values(positions, call.value.device) if matter else None
        per_head = call.key_factors, call.key_levels, call.query_table
        if call.group_size > 1 and any(tensor is not None for tensor in per_head):
            # These tensors of keys differ from head to head.
            changes["value"] = call.value.repeat_interleave(call.group_size, 1)
            changes["key"] = None if call.key is None else call.key.repeat_interleave(call.group_size, 1)
        if call.query_table is not None and call.query_table_factors is None:
            # By the call's own scale, whatever its sign.
            key: Any = changes.get("key", call.key)
            changes["query_table_factors"] = key.float() * call.scale
        return replace(call, **changes) if changes else call

    def new_buffer(self, call: Call) -> Tensor:
        return _forward_state(call).buffer

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[ForwardOutputs, Replay | None]:
        return record(lambda: self._forward(call), tensors)

    def backward(
        self, call: Call, inputs: BackwardInputs, grad_names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Replay | None]:
        return record(lambda: self._backward(call, inputs, grad_names), tensors)

    def _forward(self, call: Call) -> ForwardOutputs:
        state = _forward_state(call)
        if state.output.numel() == 0 or call.n_k == 0:
            state.output.zero_()
            state.row_stats.fill_(math.inf)
        else:
            for part, rows in arguments.split_queries(call):
                _launch_forward(part, state.select(rows))
        return state.output, state.buffer, _compute_log_sums(state.row_stats) if call.wants_lse else None

    def _backward(self, call: Call, inputs: BackwardInputs, grad_names: Sequence[str]) -> list[Tensor]:
        d_output, d_lse, *results = inputs
        gradients = {name: call.new_gradient(name) for name in grad_names}
        if d_output.numel() == 0 or call.n_k == 0:
            return [gradient.zero_() for gradient in gradients.values()]
        state, parts = _forward_state(call, *results), list(arguments.split_queries(call))
        if len(parts) == 1:
            return list(_Backward(call, state, gradients, d_output, d_lse).run().values())
        sums = {name: torch.zeros_like(gradient, dtype=call.score_dtype) for name, gradient in gradients.items()}
        for part, rows in parts:
            index = slice(rows.start, rows.stop)
            shares = {name: torch.empty_like(part.new_gradient(name), dtype=call.score_dtype) for name in grad_names}
            part_d_output, part_d_lse = d_output[:, :, index], None if d_lse is None else d_lse[:, :, index]
            backward = _Backward(part, state.select(rows), shares, part_d_output, part_d_lse)
            for name, gradient in backward.run().items():
                select_input(name, sums[name], rows).add_(gradient)
        return [gradient.copy_(sums[name]) for name, gradient in gradients.items()]


def _forward_state(call: Call, *results: Tensor) -> ForwardState:
    """Allocate the state of a forward, or find its parts in the forward's results: one or two numbers of a ``Norm``."""
    may_be_large = any(term is not None for term in (call.bias, call.query_factors, call.query_levels, call.dense))
    return call.forward_state(2 if may_be_large else 1, *results)


def _compute_log_sums(norm: Tensor) -> LogSums:
    """Return the log-sum-exps of rows from their norm, which is in units of log2."""
    shift = norm[0] * math.log(2)
    empty = shift.isposinf()
    log_sum = norm[1] * math.log(2) if len(norm) > 1 else torch.zeros_like(shift)
    return torch.stack([shift.masked_fill(empty, -math.inf), log_sum.masked_fill(empty, 0.0)])


def _launch_prepare(
    call: Call, state: ForwardState | None = None, d_out: Tensor | None = None, d_lse: Tensor | None = None
) -> tuple[arguments.PairRules, Tensor | None]:
    """Fill the seeds, the keys' end and ``delta`` by the first kernel; return the rules of pairs and ``delta``."""
    # Imported here, and likewise below, because it imports Triton.
    from .jit.prepare import prepare

    pairs, stats = arguments.build_pair_rules(call), None if state is None else state.row_stats
    delta = None if stats is None else stats.new_empty_strided(stats.shape[1:], stats.stride()[1:])
    seed = call.seed if call.seed is not None and call.seed.dim() == 0 else None
    if any(tensor is not None for tensor in (delta, seed, call.key_mask)):
        launch(
            prepare,
            call.value.shape[0] * call.heads * cdiv(call.n_q, arguments.PREPARED_ROWS),
            arguments.row_matrix(None if state is None else state.output),
            arguments.row_matrix(None if state is None else state.rounding_error),
            arguments.row_matrix(d_out),
            *(delta, None if delta is None else delta.stride(1), d_lse, seed),
            pairs,
            num_warps=4,
        )
    return pairs, delta


def _table_operand(name: str, call: Call, d_out: Tensor | None) -> tuple[Tensor | None, float]:
    """Return the rows that a table of vectors is multiplied with, (1 or batch, heads, n, dim), and their scale."""
    if name == "value_table":
        return d_out, 1.0
    factors = call.query_table_factors if name == "query_table" else call.key_table_factors
    return (call.query, call.scale) if factors is None else (factors, 1.0)


def _prepare_terms(call: Call, d_out: Tensor | None, sums: dict[str, arguments.TableSums]) -> arguments.Terms:
    """Describe a call's terms to the kernels, after multiplying tables of vectors with their rows, and filling the rows
    of their ``sums`` with zeros."""
    from .jit.offsets import products

    products_by_name: dict[str, Tensor | None] = {}
    batch, heads = call.value.shape[0], call.heads
    for name in _GRADIENTS_BY_TABLE:
        table, (rows, scale) = getattr(call, name), _table_operand(name, call, d_out)
        if table is None or (rows is None and name not in sums):
            continue
        n, length = call.n_k if name == "query_table" else call.n_q, table.shape[1]
        out = None if rows is None else call.value.new_empty(batch, heads, n, length, dtype=torch.float32)
        options, products_by_name[name] = _table_options(table), out
        launch(
            products,
            batch * heads * cdiv(n, arguments.SUMS_ROWS) * (arguments.SUMS_ROWS // options["ROWS"]),
            arguments.row_matrix(rows),
            arguments.table_matrix(table, call),
            out,
            sums[name].rows if name in sums else None,
            *(scale, 1.0 if name == "value_table" else arguments.LOG2E, n, heads, length),
            PRECISION=choose_precision(call),
            **options,
        )
    return arguments.build_terms(call, products_by_name)


def _table_options(table: Tensor) -> dict[str, int]:
    """Return the launch options for a table: a program reads at most ROWS rows of its width, 99 KiB in float32."""
    width = table.shape[2]
    return {"ROWS": 64 if width <= 64 else 32 if width <= 128 else 16, "num_warps": 4 if width <= 64 else 8}


def _launch_forward(call: Call, state: ForwardState) -> None:
    """Fill the state of a call."""
    from .jit.forward import forward

    blocks, (pairs, _) = choose_blocks("forward", call), _launch_prepare(call)
    sums = {} if call.value_table is None else {"value_table": arguments.allocate_table_sums(call, "value_table")}
    launch(
        forward,
        call.value.shape[0] * call.heads * cdiv(call.n_q, blocks.rows),
        arguments.build_inputs(call),
        arguments.row_matrix(state.output),
        arguments.row_matrix(state.rounding_error),
        arguments.build_norm(state.row_stats),
        arguments.table_matrix(call.value_table, call),
        sums["value_table"].rows if sums else None,
        _prepare_terms(call, None, sums),
        pairs,
        **blocks.launch_options,
    )


_DIAGONAL_PROGRAMS = 1500
"""About the most programs of the kernel of diagonals: enough for a GPU, and each stores its own sums."""

_MIN_PAIRS = 2**22
"""About the fewest pairs whose gradients are in memory at once if a bias has no diagonals."""


_GRADIENTS_BY_TABLE = {
    "key_table": ("key_table", "key_table_factors", "query"),
    "query_table": ("query_table", "query_table_factors"),
    "value_table": ("value_table",),
}
"""For each table of vectors, the gradients that need its sums by offset."""


class _Backward:
    """One backward pass, which fills ``gradients``."""

    def __init__(
        self, call: Call, state: ForwardState, gradients: dict[str, Tensor], d_out: Tensor, d_lse: Tensor | None
    ) -> None:
        self.call, self.gradients, self.programs = call, gradients, call.value.shape[0] * call.heads
        self.d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        self.d_lse = None if d_lse is None else d_lse.float().contiguous()
        self.state, (pairs, delta) = state, _launch_prepare(call, state, self.d_out, self.d_lse)
        tables = {name: names for name, names in _GRADIENTS_BY_TABLE.items() if getattr(call, name) is not None}
        summed = [name for name, names in tables.items() if self.needs(*names)]
        bias = gradients.get("bias")
        reads_beyond = bias is not None and not arguments.covers_all_offsets(call, call.first[0], bias.shape[1])
        if reads_beyond and arguments.has_diagonals(call):
            summed.append("bias")
        self.sums = {name: arguments.allocate_table_sums(call, name) for name in summed}
        # The leading and the trailing arguments of all gradient kernels.
        self.leading = arguments.build_inputs(call, self.d_out), arguments.build_norm(state.row_stats, delta)
        self.trailing = _prepare_terms(call, self.d_out, self.sums), pairs
        # The kernels write into these: rows that the whole batch shares have a gradient for each item.
        self.gradient_buffers = {
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
            self._launch_query_gradients()
        if self.needs(*_SUMS_OVER_QUERIES):
            self._launch_key_gradients()
        if self.needs("bias"):
            self._launch_diagonals() if arguments.has_diagonals(self.call) else self._compute_bias_by_pairs()
        if self.needs("dense"):
            self._launch_dense_gradients()
        for name, buffer in self.gradient_buffers.items():
            gradient = self.gradients[name]
            if buffer is not gradient:
                gradient.copy_(buffer.sum(0, keepdim=True) if len(buffer) > len(gradient) else buffer)
        return self.gradients

    def _launch_query_gradients(self) -> None:
        """Compute all gradients that are sums over keys, and the gradients that follow from these."""
        from .jit.query_gradients import query_gradients

        call, blocks, buffers = self.call, choose_blocks("query", self.call), self.gradient_buffers
        meets_query = call.key_table_factors is None and self.needs("query")
        launch(
            query_gradients,
            self.programs * cdiv(call.n_q, blocks.rows),
            *self.leading,
            arguments.QueryGradients(
                arguments.row_matrix(buffers.get("query")),
                arguments.row_matrix(buffers.get("query_factors")),
                arguments.level_matrix(buffers.get("query_levels")),
                *(self.sums.get(name, arguments.NO_SUMS) for name in ("key_table", "value_table", "bias")),
            ),
            arguments.table_matrix(call.key_table if meets_query else None, call),
            *self.trailing,
            **blocks.launch_options,
        )
        self._launch_table_gradients("key_table")
        self._launch_table_gradients("value_table")

    def _launch_key_gradients(self) -> None:
        """Compute all gradients that are sums over queries, and the gradients that follow from these."""
        from .jit.key_gradients import key_gradients

        call, blocks, buffers = self.call, choose_blocks("key", self.call), self.gradient_buffers
        launch(
            key_gradients,
            self.programs // call.group_size * cdiv(call.n_k, blocks.keys),
            *self.leading,
            arguments.KeyGradients(
                arguments.row_matrix(buffers.get("key"), call.group_size),
                arguments.row_matrix(buffers.get("value"), call.group_size),
                arguments.row_matrix(buffers.get("key_factors")),
                arguments.level_matrix(buffers.get("key_levels")),
                self.sums.get("query_table", arguments.NO_SUMS),
            ),
            *self.trailing,
            **blocks.launch_options,
        )
        self._launch_table_gradients("query_table")

    def _compute_bias_by_pairs(self) -> None:
        """Compute the gradient of a bias, (heads, T), from the gradient of all scores, of a few queries at a time.

        Pairs are added up as integers, whose sum is the same in any order.
        """
        call, gradient = self.call, self.gradients["bias"]
        (batch, heads), n_k, length = self.d_out.shape[:2], call.n_k, gradient.shape[1]
        size = max(1, max(_MIN_PAIRS, self.d_out.numel() // 4) // (batch * heads * n_k))
        total = gradient.new_zeros(gradient.shape, dtype=torch.float64)
        for part, rows in arguments.split_queries(call, size):
            index = slice(rows.start, rows.stop)
            dense = gradient.new_empty(batch, heads, len(rows), n_k, dtype=torch.float32)
            d_lse = None if self.d_lse is None else self.d_lse[:, :, index]
            _Backward(part, self.state.select(rows), {"dense": dense}, self.d_out[:, :, index], d_lse).run()
            columns = (part.offsets() - call.first[0]).clamp(0, length - 1)
            # The largest power of 2 that lets no sum overflow; it is not finite if a gradient is not.
            max_integer = 2.0 ** (62 - (batch * len(rows) * n_k).bit_length())
            unit = (max_integer / dense.abs().amax().clamp_min(2.0**-60)).log2().floor().exp2()
            integers = (dense * unit).long()
            integers = integers.sum(0, keepdim=True) if len(columns) == 1 else integers
            sums = integers.new_zeros(length, heads)
            sums.index_add_(0, columns.flatten(), integers.movedim(1, -1).reshape(-1, heads))
            total += sums.mT / unit.double()
        gradient.copy_(total)

    def _launch_diagonals(self) -> None:
        """Compute the gradient of a bias, (heads, T), from sums over all pairs with each offset."""
        from .jit.diagonals import diagonals, finish_bias

        call, gradient, sums = self.call, self.gradients["bias"], self.sums.get("bias")
        batch, blocks = call.value.shape[0], choose_blocks("square", call)
        query_start, _, key_start, stride = call.affine
        start, length = key_start - query_start, gradient.shape[1]
        # The first and the last diagonal, key index - query index, whose pairs add to the gradient. If there are sums,
        # they have the pairs whose offsets are not between the ends of the table.
        lows, highs = [call.min_offset], [call.max_offset]
        if sums is not None:
            lows.append(call.first[0] + 1)
            highs.append(call.first[0] + length - 2)
        first = max([1 - call.n_q, *(-((start - low) // stride) for low in lows if low is not None)])
        last = min([call.n_k - 1, *((high - start) // stride for high in highs if high is not None)])
        # A diagonal of tiles has diagonals of pairs on both sides of its middle.
        low, size = first // blocks.rows, blocks.rows
        count = max(0, last // size + 2 - low) if first <= last else 0
        parts = max(1, min(batch, _DIAGONAL_PROGRAMS // max(1, count * call.heads)))
        out = call.value.new_empty(call.heads, count, parts, 2, size, dtype=torch.float32)
        if count:
            launch(
                diagonals,
                count * call.heads * parts,
                *self.leading,
                out,
                *self.trailing,
                *(low, count, parts, batch),
                BLOCK=size,
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )
        launch(
            finish_bias,
            call.heads * cdiv(length, arguments.BIAS_COLUMNS),
            gradient,
            out,
            None if sums is None else sums.ends,
            call.first[0] - start - low * size * stride,
            *(length, count, parts, batch, call.heads, call.n_q),
            STRIDE=stride,
            BLOCK=size,
            num_warps=1,
        )

    def _launch_table_gradients(self, name: str) -> None:
        """Compute the gradients of a table of vectors and of its factors from the sums by offset, in new buffers."""
        from .jit.offsets import table_gradients

        call = self.call
        table, sums, (rows, scale) = getattr(call, name), self.sums.get(name), _table_operand(name, call, self.d_out)
        if sums is None:
            return
        if self.needs(f"{name}_factors"):
            self.gradient_buffers[f"{name}_factors"] = sums.by_column(table.shape[1]) @ table
        if not self.needs(name) or rows is None:
            return
        batch, heads, (n, dim), length = call.value.shape[0], call.heads, rows.shape[2:], table.shape[1]
        group_size = heads // len(table)  # the number of heads that share a table
        out = table.new_empty(batch * group_size, len(table), length, dim, dtype=torch.float32)
        launch(
            table_gradients,
            self.programs * (cdiv(max(length - 2, 0), arguments.SUMS_WIDTH) + 1),
            arguments.row_matrix(rows),
            *sums,
            out,
            *(scale, n, heads, length),
            PRECISION=choose_precision(call),
            **_table_options(table),
        )
        self.gradient_buffers[name] = self.gradients[name] = out.sum(0)

    def _launch_dense_gradients(self) -> None:
        """Compute the gradient of dense scores."""
        from .jit.gradients import dense_gradients

        call, blocks, gradient = self.call, choose_blocks("square", self.call), self.gradients["dense"]
        items, size = len(gradient), blocks.rows
        launch(
            dense_gradients,
            items * call.heads * cdiv(call.n_q, size) * cdiv(call.n_k, size),
            *self.leading,
            arguments.pair_matrix(gradient),
            *self.trailing,
            call.value.shape[0] // items,
            BLOCK=size,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


backend = Triton()
operators = Operators(backend)
