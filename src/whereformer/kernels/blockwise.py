"""The "blockwise" backend: the reference for some queries at a time, in O(n) memory, on any device.

A block is some queries and the keys that any of them may reach. Each row of scores has all of its keys, so
``reference`` computes a block as a call of its own. The backward computes each block again and lets autograd
differentiate it, so nothing is kept but the inputs. Scores and all sums are float32 or wider.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import reference
from .backend import Backend, BackwardInputs, ForwardOutputs, Operators, Replay
from .call import GRADIENTS, Call, LogSums, select_input
from .dropout import keep_mask
from .precision import without_autocast
from .terms import Positions
from .torch_private import recording

BLOCK_SCORES = 2**22
"""The most scores of a block, over all items and heads: memory for some hundred megabytes."""

FEWEST_ROWS = 64
"""A narrow window makes blocks of no fewer queries, because each block takes some time."""


def _attend(call: Call, kept: Tensor | None) -> tuple[Tensor, LogSums | None]:
    """Compute a block's output, (batch, heads, rows, value_dim), and ``LogSums`` if the call wants it."""
    added = [each for each in (_from_bias(call), _from_keys(call), call.dense) if each is not None]
    dense = functools.reduce(torch.add, added) if added else None
    return reference.attend(replace(call, bias=None, query_table=None, dense=dense, seed=None), kept=kept)[:2]


def _from_bias(call: Call) -> Tensor | None:
    """Return what the bias adds to a block's scores, (1 or batch, heads, rows, keys)."""
    if call.bias is None:
        return None
    # By rows, so that the table's gradient is a sum of sums: one sum of so many numbers would round too often.
    columns = reference.columns_of(call, "bias").unsqueeze(1)
    table = call.bias.unsqueeze(1).expand(len(columns), -1, call.n_q, -1)
    return table.gather(-1, columns.expand(-1, call.heads, -1, -1))


def _from_keys(call: Call) -> Tensor | None:
    """Return what the table of queries adds to a block's scores, (1 or batch, heads, rows, keys).

    The products of all keys with all vectors could be as many as the scores of a whole call. Some neighboring keys at a
    time need only the vectors that the block's queries read.
    """
    if call.query_table is None:
        return None
    if call.n_k == 0:
        return call.value.new_zeros(1, call.heads, call.n_q, 0)
    columns, size = reference.columns_of(call, "query_table"), max(call.n_q, FEWEST_ROWS)
    parts = []
    for start in range(0, call.n_k, size):
        keys = range(start, min(start + size, call.n_k))
        some = columns[..., keys.start : keys.stop]
        low, high = (int(some.min()), int(some.max())) if some.numel() else (0, 0)
        part = call.select(range(call.n_q), keys)
        parts.append(reference.scores_of_queries(part, call.query_table[:, low : high + 1], some - low))
    return torch.cat(parts, -1)


def _keys_of(call: Call, rows: range) -> range:
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
    """Return how many queries a block has, so that its memory is O(n) and its time falls with the window."""
    queries, keys = call.positions()
    low, high = call.min_offset, call.max_offset
    reach, most = call.n_k, call.n_q
    if isinstance(queries, Positions) and isinstance(keys, Positions) and low is not None and high is not None:
        reach = min(reach, (high - low) // keys.stride + 2)
        # All queries of a block together reach twice as many keys as each of them, or a few more.
        most = max(reach, FEWEST_ROWS) * keys.stride // queries.stride
    width = max(min(2 * reach, call.n_k), *(0 if table is None else table.shape[1] for table in call.tables))
    scores = len(call.value) * call.heads * width
    return max(1, min(most, BLOCK_SCORES // max(1, scores)))


def _blocks_of(call: Call) -> Iterator[tuple[range, range, Call, Tensor | None]]:
    """Yield blocks: some queries and the keys that they may reach, their call in the dtype of scores without its
    history, and the weights that dropout keeps, if any. Every query is in one block."""
    size, seeds = _rows_per_block(call), call.dropout_seeds()
    for start in range(0, call.n_q, size):
        rows = range(start, min(start + size, call.n_q))
        keys = _keys_of(call, rows)
        part, kept, changes = call.select(rows, keys), None, {}
        for name in GRADIENTS:
            if (tensor := getattr(part, name)) is not None:
                changes[name] = tensor.detach().to(call.score_dtype)
        if seeds is not None:
            columns = torch.arange(keys.start, keys.stop, device=seeds.device)
            kept = keep_mask(seeds[:, :, rows.start : rows.stop], columns, call.dropout_p)
        yield rows, keys, replace(part, **changes), kept


class Blockwise(Backend):
    """Nothing is kept but the output."""

    name = "blockwise"

    def new_buffer(self, call: Call) -> Tensor:
        return call.value.new_empty(0)

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[ForwardOutputs, Replay]:
        output, lse = call.new_output(), call.new_lse()
        with torch.no_grad(), without_autocast(output.device):
            for rows, _, part, kept in _blocks_of(call):
                some = slice(rows.start, rows.stop)
                output[:, :, some], sums = _attend(part, kept)
                if sums is not None:
                    lse[..., some] = sums
        return (output, self.new_buffer(call), lse if call.wants_lse else None), None

    def backward(
        self, call: Call, given: BackwardInputs, grad_names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Replay]:
        gradients = {name: call.new_gradient(name) for name in grad_names}
        # A pair's own gradient is no sum over blocks, so it needs no wider memory.
        sums = {
            name: torch.zeros_like(gradient, dtype=gradient.dtype if name == "dense" else call.score_dtype)
            for name, gradient in gradients.items()
        }
        with recording(), without_autocast(given.output.device):
            for rows, keys, part, kept in _blocks_of(call):
                if not keys:
                    continue  # its output is zeros, which depend on nothing
                some = slice(rows.start, rows.stop)
                leaves = [getattr(part, name).requires_grad_() for name in grad_names]
                found, logs = _attend(part, kept)
                results, d_results = [found], [given.d_output[:, :, some].to(found.dtype)]
                if given.d_lse is not None and logs is not None and logs.requires_grad:
                    results.append(logs[1])
                    d_results.append(given.d_lse[:, :, some])
                gradients_of_part = torch.autograd.grad(results, leaves, d_results, materialize_grads=True)
                for name, gradient in zip(grad_names, gradients_of_part, strict=True):
                    whole = select_input(name, sums[name], rows, keys)
                    whole += gradient.to(whole.dtype)
        return [gradient.copy_(sums[name]) for name, gradient in gradients.items()], None


backend = Blockwise()
operators = Operators(backend)
