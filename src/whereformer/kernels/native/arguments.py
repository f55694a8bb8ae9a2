"""A problem as the struct ``Call`` of call.h: its fields in their order, eight bytes each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import Problem
from ..terms import Positions, position_values
from ..torch_private import zeros_without_memory

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""The dtypes that the kernel reads and writes, with their numbers in call.h."""

THREADS = 2
"""The index of the number of threads among the fields."""

_LAYOUT = struct.Struct("=37q3d126q")
"""Pointers and numbers, with scale, soft cap and dropout in between."""

_ABSENT = (0, 0, 0, 0, 0, 0)
_FARTHEST = 2**62 + 2**61
"""Tables begin nearer than that, so that sums with their lengths do not overflow. All offsets lie within 2**63."""


@dataclass(frozen=True)
class Gradients:
    """Where the kernel puts gradients; None where one is not needed.

    Tables' are (batch parts, row parts, heads, ...). Those of keys, values and what else has a row per key are (row
    parts, batch, ...), those of queries and what else has a row per query (batch, ...). That of ``dense`` is like it.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    key_table: Tensor | None = None
    query_table: Tensor | None = None
    value_table: Tensor | None = None
    key_table_factors: Tensor | None = None
    query_table_factors: Tensor | None = None
    query_factors: Tensor | None = None
    key_factors: Tensor | None = None
    query_levels: Tensor | None = None
    key_levels: Tensor | None = None
    dense: Tensor | None = None


@dataclass(frozen=True)
class Backward:
    """What the backward gets besides the problem: gradients of the output and of the log-sum-exp, and where to put its
    own."""

    d_output: Tensor
    d_log_sums: Tensor | None
    gradients: Gradients


@dataclass(frozen=True)
class Kept:
    """What the forward keeps for the backward, besides the output: parts of one tensor.

    Args:
        whole: all of it, in the dtype of scores.
        log_sums: ``LogSums``, (2, batch, heads, n_q).
        rounded_off: what rounding took from the output, like the output; None where it does not matter.
    """

    whole: Tensor
    log_sums: Tensor
    rounded_off: Tensor | None

    @classmethod
    def of(cls, problem: Problem, whole: Tensor | None = None, for_backward: bool = True) -> Kept:
        """Allocate it, or find its parts."""
        batch, _, _, value_dim = problem.value.shape
        rows = batch * problem.heads * problem.n_q
        # All keys beyond a table's end share a vector, whose gradient sums what is wrong with all of their weights.
        vectors = problem.key_table is not None or problem.query_table is not None
        rounds = for_backward and vectors and problem.value.dtype != problem.dtype
        numbers = 2 * rows
        if whole is None:
            whole = problem.value.new_empty(numbers + (rows * value_dim + 1) // 2 * rounds, dtype=problem.dtype)
        log_sums = whole[:numbers].view(2, batch, problem.heads, problem.n_q)
        rounded_off = whole[numbers:].view(problem.value.dtype) if rounds else None
        return cls(whole, log_sums, rounded_off)


def parts_of_forward(problem: Problem) -> tuple[int, int]:
    """Return how many parts batch and queries are divided into, each a task for a thread."""
    batch, key_heads = problem.value.shape[:2]
    return batch, _row_parts(batch * key_heads, problem.n_q, _TASKS)


def parts_of_backward(problem: Problem, needed: Sequence[str]) -> tuple[int, int]:
    """Return the same for the backward, where each part has sums of its own for what its items share.

    It does not depend on the number of threads, so neither do the sums.
    """
    batch, key_heads = problem.value.shape[:2]
    parts = batch
    if any(name in needed for name in ("bias", "key_table", "query_table", "value_table")):
        parts = min(batch, -(-_TASKS // key_heads))
    if "dense" in needed and problem.dense is not None and len(problem.dense) < batch:
        # Items that share a matrix are in one part.
        parts = 1
    # Each part of the queries sums the gradients of all keys in memory of its own.
    return parts, _row_parts(parts * key_heads, problem.n_q, _TASKS // 2)


_TASKS = 8
"""Tasks enough for the cores of most processors; each of the forward packs keys and values for itself."""

_FEWEST_ROWS = 512
"""The fewest queries in a part: each part packs all keys for itself."""


def _row_parts(tasks: int, n_q: int, wanted: int) -> int:
    return max(1, min(-(-wanted // tasks), n_q // _FEWEST_ROWS))


class Arguments:
    """A problem in the kernel's layout.

    Args:
        data: the struct.
        read: the tensors to which it points, which have to live as long; without the kernel's own results.
    """

    def __init__(
        self,
        problem: Problem,
        output: Tensor,
        kept: Kept,
        level: int,
        parts: tuple[int, int],
        backward: Backward | None = None,
        poison: bool = False,
    ) -> None:
        self.read: list[Tensor] = []
        batch, key_heads, n_k, value_dim = problem.value.shape
        query = problem.query
        head_dim = 0 if query is None else query.shape[3]
        factors = (problem.query_factors, problem.key_table_factors, problem.query_table_factors, problem.query_levels)
        ranks = [0 if each is None else each.shape[3] for each in factors]
        rank = ranks[0]
        threads = torch.get_num_threads()
        seed = 0 if problem.seed is None else int(problem.seed)
        least, most = problem.min_offset, problem.max_offset
        self.data = _LAYOUT.pack(
            *(_LAYOUT.size, level, threads, backward is not None, poison),
            *(batch, problem.heads, key_heads, problem.n_q, n_k, head_dim, value_dim, *ranks),
            *(DTYPES[problem.value.dtype], *parts),
            *self._positions(problem),
            *(least is not None, most is not None, least or 0, most or 0),
            *self._key_mask(problem.key_mask),
            self._whole_numbers(problem.query_documents),
            self._whole_numbers(problem.key_documents),
            *(problem.scale, problem.softcap or 0.0, problem.dropout_p, seed),
            *self._tensor(query),
            *self._tensor(problem.key),
            *self._tensor(problem.value),
            *(output.data_ptr(), DTYPES[output.dtype], *output.stride()),
            kept.log_sums.data_ptr(),
            0 if kept.rounded_off is None else kept.rounded_off.data_ptr(),
            *self._tables(problem),
            *self._tensor(problem.key_table_factors),
            *self._tensor(problem.query_table_factors),
            *self._tensor(problem.query_factors if rank else None),
            *self._tensor(problem.key_factors if rank else None),
            *self._tensor(problem.query_levels),
            *self._tensor(problem.key_levels),
            *self._dense(problem.dense),
            *self._backward(problem, backward),
        )

    def _keep(self, tensor: Tensor) -> int:
        self.read.append(tensor)
        return tensor.data_ptr()

    def _contiguous(self, tensor: Tensor | None) -> int:
        return 0 if tensor is None else self._keep(_in_memory(tensor.contiguous()))

    def _whole_numbers(self, tensor: Tensor | None) -> int:
        return 0 if tensor is None else self._keep(tensor.to(torch.int64).contiguous())

    def _tensor(self, tensor: Tensor | None) -> tuple[int, ...]:
        """Return a tensor of four axes. Items of an axis of size 1 may be shared by more."""
        if tensor is None:
            return _ABSENT
        tensor = _in_memory(tensor)
        strides = tensor.stride()
        return (self._keep(tensor), DTYPES[tensor.dtype], 0 if tensor.shape[0] == 1 else strides[0], *strides[1:])

    def _dense(self, dense: Tensor | None) -> tuple[int, ...]:
        """Return the scores of pairs, in a dtype that the kernel reads."""
        return self._tensor(dense if dense is None or dense.dtype in DTYPES else dense.float())

    def _positions(self, problem: Problem) -> tuple[int, ...]:
        """Return the fields from ``listed`` to ``rounding``."""
        if all(table is None for table in _tables_of(problem)) and not problem.limits_offsets:
            return 0, 0, 1, 0, 0, 0, 0, 0, 0
        queries, keys = problem.positions()
        if isinstance(queries, Positions) and isinstance(keys, Positions) and (keys.stride == 1 or keys.length <= 1):
            return 0, queries.start, queries.stride, keys.start, 0, 0, 0, 0, 0
        listed = [position_values(positions, "cpu") for positions in (queries, keys)]
        kind, rounding = 1, 0
        if any(positions.is_floating_point() for positions in listed):
            dtype = torch.promote_types(listed[0].dtype, listed[1].dtype)
            kind, rounding = 2, DTYPES.get(dtype, 0)
            listed = [positions.to(dtype).double() for positions in listed]
        pointers = [self._contiguous(positions) for positions in listed]
        strides = [positions.shape[-1] if positions.dim() == 2 and len(positions) > 1 else 0 for positions in listed]
        return kind, 0, 1, 0, *pointers, *strides, rounding

    def _key_mask(self, mask: Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if mask is None else (self._keep(mask), *mask.stride())

    def _tables(self, problem: Problem) -> tuple[int, ...]:
        """Return the pointers to the tables over offsets; then of each its length, its first offset, and its stride."""
        pointers, sizes = [], []
        for table, first in zip(_tables_of(problem), problem.first, strict=True):
            if table is None:
                pointers.append(0)
                sizes += [0, 0, 0]
                continue
            # A head's part has to be in one piece; heads may lie apart, as in a longer table.
            if table.stride()[1:] != ((1,) if table.dim() == 2 else (table.shape[2], 1)):
                table = table.contiguous()
            table = _in_memory(table)
            pointers.append(self._keep(table))
            sizes += [table.shape[1], _near(first), 0 if len(table) == 1 else table.stride(0)]
        return *pointers, *sizes

    def _backward(self, problem: Problem, given: Backward | None) -> tuple[int, ...]:
        if given is None:
            return (*_ABSENT, 0, *_ABSENT * 3, *(0,) * 10, *_ABSENT)
        into = given.gradients
        return (
            *self._tensor(given.d_output),
            self._contiguous(given.d_log_sums),
            *self._tensor(into.query),
            *self._tensor_of_parts(into.key),
            *self._tensor_of_parts(into.value),
            *map(self._contiguous, (into.bias, into.key_table, into.query_table, into.value_table)),
            *map(self._contiguous, (into.key_table_factors, into.query_factors, into.query_levels)),
            *map(self._contiguous, (into.query_table_factors, into.key_factors, into.key_levels)),
            *self._tensor(into.dense),
        )

    def _tensor_of_parts(self, tensor: Tensor | None) -> tuple[int, ...]:
        """Return (row parts, batch, heads, n, dim) as one of row parts times batch."""
        return self._tensor(None if tensor is None else tensor.flatten(0, 1))


def _tables_of(problem: Problem) -> tuple[Tensor | None, ...]:
    return problem.bias, problem.key_table, problem.query_table, problem.value_table


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its numbers: a part of a conjugate has the other sign there, and the zeros of
    forward-mode differentiation have no memory."""
    return torch.zeros_like(tensor) if zeros_without_memory(tensor) else tensor.resolve_neg()


def _near(first: int) -> int:
    return max(-_FARTHEST, min(first, _FARTHEST))
