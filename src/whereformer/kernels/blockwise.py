"""The "blockwise" backend: the reference for some queries at a time, in O(n) memory, on any device.

A block is some queries and the keys that any of them may reach. Each row of scores has all of its keys, so
``reference`` computes a block as a call of its own. The backward computes each block again and lets autograd
differentiate it, so nothing is kept but the inputs. Scores and all sums are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from . import reference
from .call import Call
from .dropout import keep_mask
from .logsums import LogSums
from .precision import without_autocast
from .problem import ARGUMENTS, GRADIENTS, Problem, register_gradients
from .terms import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
    Term,
    position_values,
)
from .torch_private import recording

BLOCK_SCORES = 2**22
"""The most scores of a block, over all items and heads: memory for some hundred megabytes."""

FEWEST_ROWS = 64
"""A narrow window makes blocks of no fewer queries, because each block takes some time."""

_BY_QUERY = ("query", "key_table_factors", "query_factors", "query_levels", "dense")
"""The inputs with a row for each query, on the axis 2."""

_BY_KEY = {"key": 2, "value": 2, "query_table_factors": 2, "key_factors": 2, "key_levels": 2, "dense": 3}
"""The axis of the keys in the inputs that have one."""


def attend(call: Call) -> tuple[Tensor, LogSums | None]:
    """Compute attention, (batch, heads, n_q, value_dim) in the value's dtype, and ``LogSums`` if the call wants it."""
    with without_autocast(call.device):
        problem = Problem.of(call)
        output, _, lse = _run(problem)
        return output, lse if problem.wants_lse else None


class _Block:
    """Some queries of a problem with the keys that they may reach.

    Args:
        rows: the queries.
        keys: the keys.
    """

    def __init__(self, problem: Problem, rows: range) -> None:
        self.problem, self.rows = problem, slice(rows.start, rows.stop)
        self.keys = _keys_of(problem, rows)

    def inputs(self) -> dict[str, Tensor]:
        """Return the block's part of each input of ``GRADIENTS``, in the dtype of scores and without its history."""
        found = {}
        for name in GRADIENTS:
            tensor: Tensor | None = getattr(self.problem, name)
            if tensor is not None:
                tensor = tensor.detach()
                if name in _BY_QUERY:
                    tensor = tensor[:, :, self.rows]
                if name in _BY_KEY:
                    tensor = self._at_keys(name, tensor)
                found[name] = tensor.to(self.problem.dtype)
        return found

    def add(self, name: str, gradient: Tensor, whole: Tensor) -> None:
        """Add the gradient of the block's part of an input to that of the whole input."""
        gradient = gradient.to(whole.dtype)
        if name in _BY_QUERY:
            whole = whole[:, :, self.rows]
        if name in _BY_KEY:
            whole = self._at_keys(name, whole)
        whole += gradient

    def _at_keys(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of an input that belongs to the block's keys."""
        return tensor.narrow(_BY_KEY[name], self.keys.start, len(self.keys))

    def attend(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, LogSums | None]:
        """Compute the block's output, (batch, heads, rows, value_dim), and ``LogSums`` if the problem wants it."""
        problem, rows, keys = self.problem, self.rows, slice(self.keys.start, self.keys.stop)
        device = problem.value.device
        query_positions, key_positions = (position_values(at, device) for at in problem.positions())
        documents = problem.query_documents, problem.key_documents
        call = Call(
            query=inputs.get("query"),
            key=inputs.get("key"),
            value=inputs["value"],
            terms=(),
            n_q=rows.stop - rows.start,
            n_k=len(self.keys),
            scale=problem.scale,
            key_mask=None if problem.key_mask is None else problem.key_mask[:, keys],
            window=(None if problem.min_offset is None else -problem.min_offset, problem.max_offset),
            softcap=problem.softcap,
            dropout_p=problem.dropout_p,
            given_query_positions=query_positions[..., rows],
            given_key_positions=key_positions[..., keys],
            query_documents=None if documents[0] is None else documents[0][:, rows],
            key_documents=None if documents[1] is None else documents[1][:, keys],
            return_lse=problem.wants_lse,
        )
        seeds = problem.dropout_seeds
        kept = (
            None
            if seeds is None
            else keep_mask(seeds[:, :, rows], torch.arange(keys.start, keys.stop, device=device), problem.dropout_p)
        )
        return reference.attend_keeping(replace(call, terms=self._terms(inputs, call)), kept)

    def _terms(self, inputs: Mapping[str, Tensor], call: Call) -> tuple[Term, ...]:
        """Return the terms of a call, given it without them."""
        first_bias, first_key, first_query, first_value = self.problem.first
        terms: list[Term] = []
        if "bias" in inputs:
            # By rows, so that the table's gradient is a sum of sums: one sum of so many numbers would round too often.
            columns = reference.columns_of(call, OffsetBias(inputs["bias"], first_bias)).unsqueeze(1)
            table = inputs["bias"].unsqueeze(1).expand(len(columns), -1, call.n_q, -1)
            terms.append(DenseBias(table.gather(-1, columns.expand(-1, call.heads, -1, -1))))
        if "key_table" in inputs:
            terms.append(OffsetKeys(inputs["key_table"], first_key, 1, inputs.get("key_table_factors")))
        if "query_table" in inputs:
            of_queries = OffsetQueries(inputs["query_table"], first_query, 1, inputs.get("query_table_factors"))
            terms.append(DenseBias(_by_keys(call, of_queries)))
        if "value_table" in inputs:
            terms.append(OffsetValues(inputs["value_table"], first_value))
        if "query_factors" in inputs:
            terms.append(FactorPair(inputs["query_factors"], inputs["key_factors"]))
        if "query_levels" in inputs:
            levels = (inputs[name].unbind(-1) for name in ("query_levels", "key_levels"))
            terms.extend(starmap(DistanceDecay, zip(*levels, strict=True)))
        if "dense" in inputs:
            terms.append(DenseBias(inputs["dense"]))
        return tuple(terms)


def _by_keys(call: Call, term: OffsetQueries) -> Tensor:
    """Return what the term adds to a block's scores, (1 or batch, heads, rows, keys).

    The products of all keys with all vectors could be as many as the scores of a whole call. Some neighboring keys at a
    time need only the vectors that the block's queries read.
    """
    columns, size = reference.columns_of(call, term), max(call.n_q, FEWEST_ROWS)
    if columns.numel() == 0:
        return call.value.new_zeros(1, call.heads, call.n_q, call.n_k)
    parts = []
    for start in range(0, call.n_k, size):
        keys = slice(start, start + size)
        some = columns[..., keys]
        low, high = int(some.min()), int(some.max())
        part = OffsetQueries(
            term.table[:, low : high + 1], 0, 1, None if term.factors is None else term.factors[:, :, keys]
        )
        key = None if call.key is None else call.key[:, :, keys]
        parts.append(reference.scores_of_queries(replace(call, key=key), part, some - low, call.value.dtype))
    return torch.cat(parts, -1)


def _keys_of(problem: Problem, rows: range) -> range:
    """Return the keys that some of the queries may reach."""
    queries, keys = problem.positions()
    if not (isinstance(queries, Positions) and isinstance(keys, Positions)):
        return range(problem.n_k)

    def index(position: int) -> int:
        """Return the index of the first key at a position or after it."""
        return min(max(-((keys.start - position) // keys.stride), 0), keys.length)

    start, stop = 0, keys.length
    if problem.min_offset is not None:
        start = index(queries.start + queries.stride * rows.start + problem.min_offset)
    if problem.max_offset is not None:
        stop = index(queries.start + queries.stride * (rows.stop - 1) + problem.max_offset + 1)
    return range(start, max(start, stop))


def _rows_per_block(problem: Problem) -> int:
    """Return how many queries a block has, so that its memory is O(n) and its time falls with the window."""
    queries, keys = problem.positions()
    low, high = problem.min_offset, problem.max_offset
    reach, most = problem.n_k, problem.n_q
    if isinstance(queries, Positions) and isinstance(keys, Positions) and low is not None and high is not None:
        reach = min(reach, (high - low) // keys.stride + 2)
        # All queries of a block together reach twice as many keys as each of them, or a few more.
        most = max(reach, FEWEST_ROWS) * keys.stride // queries.stride
    tables = (problem.bias, problem.key_table, problem.query_table, problem.value_table)
    width = max(min(2 * reach, problem.n_k), *(0 if table is None else table.shape[1] for table in tables))
    scores = len(problem.value) * problem.heads * width
    return max(1, min(most, BLOCK_SCORES // max(1, scores)))


def _blocks_of(problem: Problem) -> Iterator[_Block]:
    """Yield the blocks; every query is in one."""
    size = _rows_per_block(problem)
    for start in range(0, problem.n_q, size):
        yield _Block(problem, range(start, min(start + size, problem.n_q)))


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    output, lse = problem.new_output(), problem.new_lse()
    with torch.no_grad(), without_autocast(output.device):
        for block in _blocks_of(problem):
            output[:, :, block.rows], sums = block.attend(block.inputs())
            if sums is not None:
                lse[..., block.rows] = sums
    return output, output.new_empty(0), lse


def _run_backward(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    output: Tensor,
    kept: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    problem = Problem(*arguments)
    gradients = problem.new_gradients(needed)
    names = [name for name, need in zip(GRADIENTS, needed, strict=True) if need]
    # A pair's own gradient is no sum over blocks, so it needs no wider memory.
    sums = {
        name: torch.zeros_like(gradient, dtype=gradient.dtype if name == "dense" else problem.dtype)
        for name, gradient in zip(names, gradients, strict=True)
    }
    with recording(), without_autocast(output.device):
        for block in _blocks_of(problem):
            inputs = block.inputs()
            leaves = [inputs[name].requires_grad_() for name in names]
            found, logs = block.attend(inputs)
            results, given = [found], [output_gradient[:, :, block.rows].to(found.dtype)]
            if lse_gradient is not None and logs is not None and logs.requires_grad:
                results.append(logs[1])
                given.append(lse_gradient[:, :, block.rows])
            parts = torch.autograd.grad(results, leaves, given, materialize_grads=True)
            for name, part in zip(names, parts, strict=True):
                block.add(name, part, sums[name])
    return [gradient.copy_(sums[name]) for name, gradient in zip(names, gradients, strict=True)]


_SCHEMAS = (
    f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    f"(Tensor output_gradient, Tensor? lse_gradient, Tensor output, Tensor kept, bool[] needed, {ARGUMENTS}) "
    "-> Tensor[]",
)
_forward = torch.library.custom_op("whereformer::blockwise_forward", _run_forward, mutates_args=(), schema=_SCHEMAS[0])
_backward = torch.library.custom_op(
    "whereformer::blockwise_backward", _run_backward, mutates_args=(), schema=_SCHEMAS[1]
)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    return problem.new_output(), problem.value.new_empty(0), problem.new_lse()


@_backward.register_fake
def _(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    output: Tensor,
    kept: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    return Problem(*arguments).new_gradients(needed)


_run = register_gradients(_forward, _backward, _run_forward, _run_backward)
