"""The "blockwise" backend: the reference for some queries at a time, in O(n) memory, on any device.

A block is some queries and the keys that any of them may reach. Each row of scores has all of its keys, so
``reference`` computes a block as a separate call, by the equation of kernels/call.py. The backward computes each block
again and lets autograd differentiate it, so it needs only the inputs. Scores and all sums are float32 or wider.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import reference
from .backend import Backend, BackwardInputs, ForwardOutputs, Operators
from .call import GRADIENTS, Call, LogSums, select_input
from .dropout import keep_mask
from .precision import without_autocast
from .terms import Positions
from .torch_private import recording

MAX_BLOCK_SCORES = 2**22
"""The largest number of scores of a block, over all items and heads: some hundred megabytes of memory."""

MIN_ROWS = 64
"""The smallest number of queries of a block with a narrow window, because each block takes some time."""


def _attend(call: Call, survives: Tensor | None) -> tuple[Tensor, LogSums | None]:
    """Compute a block's output, (batch, heads, rows, value_dim), and ``LogSums`` if the call needs them."""
    added = [scores for scores in (_bias_scores(call), _query_table_scores(call), call.dense) if scores is not None]
    dense = functools.reduce(torch.add, added) if added else None
    call = replace(call, bias=None, query_table=None, dense=dense, seed=None)
    return reference.attend(call, survives=survives)[:2]


def _bias_scores(call: Call) -> Tensor | None:
    """Return the scores that the bias adds to a block, (1 or batch, heads, rows, keys)."""
    if call.bias is None:
        return None
    # By rows, so that the table's gradient is a sum of sums: one sum over all pairs would round too often.
    columns = reference.read_columns(call, "bias").unsqueeze(1)
    table = call.bias.unsqueeze(1).expand(len(columns), -1, call.n_q, -1)
    return table.gather(-1, columns.expand(-1, call.heads, -1, -1))


def _query_table_scores(call: Call) -> Tensor | None:
    """Return the scores that the table of queries adds to a block, (1 or batch, heads, rows, keys).

    Products of all keys with all vectors could take as much memory as the scores of a whole call. So this multiplies
    some neighboring keys at a time, and only with the vectors that the block's queries read.
    """
    if call.query_table is None:
        return None
    if call.n_k == 0:
        return call.value.new_zeros(1, call.heads, call.n_q, 0)
    columns, size = reference.read_columns(call, "query_table"), max(call.n_q, MIN_ROWS)
    parts = []
    for start in range(0, call.n_k, size):
        keys = range(start, min(start + size, call.n_k))
        key_columns = columns[..., keys.start : keys.stop]
        low, high = (int(key_columns.min()), int(key_columns.max())) if key_columns.numel() else (0, 0)
        part = call.select(range(call.n_q), keys)
        parts.append(reference.query_table_scores(part, call.query_table[:, low : high + 1], key_columns - low))
    return torch.cat(parts, -1)


def _reachable_keys(call: Call, rows: range) -> range:
    """Return the keys that some of the queries may reach."""
    queries, keys = call.positions()
    if not (isinstance(queries, Positions) and isinstance(keys, Positions)):
        return range(call.n_k)

    def index(position: int) -> int:
        """Return the index of the first key at a position or after it."""
        return min(max(-((keys.start - position) // keys.stride), 0), keys.length)

    start, stop = 0, keys.length
    if call.min_offset is not None:
        start = index(queries.start + queries.stride * rows.start + call.min_offset)
    if call.max_offset is not None:
        stop = index(queries.start + queries.stride * (rows.stop - 1) + call.max_offset + 1)
    return range(start, max(start, stop))


def _rows_per_block(call: Call) -> int:
    """Return the number of queries per block, so that its memory is O(n) and its time falls with the window."""
    queries, keys = call.positions()
    low, high = call.min_offset, call.max_offset
    reach, max_rows = call.n_k, call.n_q
    if isinstance(queries, Positions) and isinstance(keys, Positions) and low is not None and high is not None:
        reach = min(reach, (high - low) // keys.stride + 2)
        # All queries of a block together reach twice the keys that each of them reaches, or a few more.
        max_rows = max(reach, MIN_ROWS) * keys.stride // queries.stride
    width = max(min(2 * reach, call.n_k), *(0 if table is None else table.shape[1] for table in call.tables))
    scores = len(call.value) * call.heads * width
    return max(1, min(max_rows, MAX_BLOCK_SCORES // max(1, scores)))


def _iter_blocks(call: Call) -> Iterator[tuple[range, range, Call, Tensor | None]]:
    """Yield blocks: some queries, the keys that they may reach, their call, detached and in the dtype of scores, and
    which weights survive dropout (None without dropout). Every query is in one block."""
    size, seeds = _rows_per_block(call), call.dropout_seeds()
    for start in range(0, call.n_q, size):
        rows = range(start, min(start + size, call.n_q))
        keys = _reachable_keys(call, rows)
        part, survives, changes = call.select(rows, keys), None, {}
        for name in GRADIENTS:
            if (tensor := getattr(part, name)) is not None:
                changes[name] = tensor.detach().to(call.score_dtype)
        if seeds is not None:
            columns = torch.arange(keys.start, keys.stop, device=seeds.device)
            survives = keep_mask(seeds[:, :, rows.start : rows.stop], columns, call.dropout_p)
        yield rows, keys, replace(part, **changes), survives


class Blockwise(Backend):
    """The reference, block by block. The output is saved for the backward, as by all backends, but not read."""

    name = "blockwise"

    def new_buffer(self, call: Call) -> Tensor:
        return call.value.new_empty(0)

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[ForwardOutputs, None]:
        output, lse = call.new_output(), call.new_lse()
        with torch.no_grad(), without_autocast(output.device):
            for rows, _, part, survives in _iter_blocks(call):
                index = slice(rows.start, rows.stop)
                output[:, :, index], sums = _attend(part, survives)
                if sums is not None:
                    lse[..., index] = sums
        return (output, self.new_buffer(call), lse if call.wants_lse else None), None

    def backward(
        self, call: Call, inputs: BackwardInputs, grad_names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], None]:
        gradients = {name: call.new_gradient(name) for name in grad_names}
        # The gradient of dense scores is not a sum over blocks, so it needs no wider memory.
        sums = {
            name: torch.zeros_like(gradient, dtype=gradient.dtype if name == "dense" else call.score_dtype)
            for name, gradient in gradients.items()
        }
        with recording(), without_autocast(inputs.output.device):
            for rows, keys, part, survives in _iter_blocks(call):
                if not keys:
                    continue  # its output is zeros, which depend on no input
                index = slice(rows.start, rows.stop)
                leaves = [getattr(part, name).requires_grad_() for name in grad_names]
                output, lse = _attend(part, survives)
                results, d_results = [output], [inputs.d_output[:, :, index].to(output.dtype)]
                if inputs.d_lse is not None and lse is not None and lse.requires_grad:
                    results.append(lse[1])
                    d_results.append(inputs.d_lse[:, :, index])
                block_gradients = torch.autograd.grad(results, leaves, d_results, materialize_grads=True)
                for name, gradient in zip(grad_names, block_gradients, strict=True):
                    block_sums = select_input(name, sums[name], rows, keys)
                    block_sums += gradient.to(block_sums.dtype)
        return [gradient.copy_(sums[name]) for name, gradient in gradients.items()], None


backend = Blockwise()
operators = Operators(backend)
