"""A call as the struct ``Call`` of call.h: its fields in their order, eight bytes each."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..fields import TABLES, Call
from ..operators import Given
from ..terms import position_values
from .library import compute, level_for

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""The dtypes that the kernel reads and writes, with their numbers in call.h."""

_BYTES, _THREADS, _SEED = 0, 2, 40
"""The indices of the struct's size, of the number of threads and of dropout's seed among the fields."""

INPUTS = (
    *("query", "key", "value", *TABLES, "key_table_factors", "query_table_factors"),
    *("query_factors", "key_factors", "query_levels", "key_levels", "dense"),
)
"""All inputs that have gradients, in their order in the struct."""

WHOLE = ("query", "key", "value", "dense")
"""The inputs whose gradients have strides of their own; those of others are in one piece."""

_FARTHEST = 2**62 + 2**61
"""Tables begin nearer than that, so that sums with their lengths do not overflow. All offsets lie within 2**63."""


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
    def of(cls, call: Call, output: Tensor, whole: Tensor | None = None) -> Kept:
        """Allocate it, or find its parts."""
        sizes, wide = output.shape[:3], call.wide
        # All keys beyond a table's end share a vector, whose gradient sums what is wrong with all of their weights.
        vectors = call.key_table is not None or call.query_table is not None
        rounds = vectors and output.dtype != wide
        numbers = 2 * sizes.numel()
        if whole is None:
            whole = output.new_empty(numbers + (output.numel() + 1) // 2 * rounds, dtype=wide)
        log_sums = whole[:numbers].view(2, *sizes)
        rounded_off = whole[numbers:].view(output.dtype) if rounds else None
        return cls(whole, log_sums, rounded_off)


class Backward(NamedTuple):
    """What the backward gets besides the call, and where to put its gradients, of how many parts.

    Those of tables are (batch parts, row parts, heads, ...). Those of keys, values and what else has a row per key
    are (row parts, batch, ...), those of queries and what else has a row per query (batch, ...). That of ``dense`` is
    like it.
    """

    given: Given
    gradients: Mapping[str, Tensor]
    parts: tuple[int, int]


def parts_of_forward(call: Call) -> tuple[int, int]:
    """Return how many parts batch and queries are divided into, each a task for a thread."""
    batch, key_heads = call.value.shape[:2]
    return batch, _row_parts(batch * key_heads, call.n_q, _TASKS)


def parts_of_backward(call: Call, needed: Sequence[str]) -> tuple[int, int]:
    """Return the same for the backward, where each part has sums of its own for what its items share.

    It does not depend on the number of threads, so neither do the sums.
    """
    batch, key_heads = call.value.shape[:2]
    parts = batch
    if any(name in needed for name in TABLES):
        parts = min(batch, -(-_TASKS // key_heads))
    if "dense" in needed and call.dense is not None and len(call.dense) < batch:
        # Items that share a matrix are in one part.
        parts = 1
    # Each part of the queries sums the gradients of all keys in memory of its own.
    return parts, _row_parts(parts * key_heads, call.n_q, _TASKS // 2)


_TASKS = 8
"""Tasks enough for the cores of most processors; each of the forward packs keys and values for itself."""

_FEWEST_ROWS = 512
"""The fewest queries in a part: each part packs all keys for itself."""


def _row_parts(tasks: int, n_q: int, wanted: int) -> int:
    return max(1, min(-(-wanted // tasks), n_q // _FEWEST_ROWS))


class Arguments:
    """A call in the kernel's layout.

    Args:
        data: the struct, of which the kernel computes the call while what its pointers point to lives.
        made: what the kernel fills: the output and what is kept, or the gradients.
        pointers: its pointers: the index of each, the tensor into which it points, which has to live as long, and how
            far from its beginning.
    """

    def __init__(
        self,
        call: Call,
        backward: Backward | None = None,
        poison: bool = False,
    ) -> None:
        given, gradients, parts = backward or (None, {}, parts_of_forward(call))
        output = call.new_output() if given is None else given.output
        kept = Kept.of(call, output, None if given is None else given.kept)
        self.made = [output, kept.whole] if given is None else list(gradients.values())
        self.data = array("q")
        self.pointers: list[tuple[int, Tensor, int]] = []
        batch, key_heads, n_k, value_dim = call.value.shape
        heads = output.shape[1]
        factors = (call.query_factors, call.key_table_factors, call.query_table_factors, call.query_levels)
        ranks = [0 if each is None else each.shape[3] for each in factors]
        low, high = call.min_offset, call.max_offset
        self._numbers(0, level_for(output.dtype), torch.get_num_threads(), given is not None, poison)
        self._numbers(batch, heads, key_heads, call.n_q, n_k)
        self._numbers(0 if call.query is None else call.query.shape[3], value_dim, *ranks)
        self._numbers(DTYPES[call.value.dtype], *parts)
        self._positions(call)
        self._numbers(low is not None, high is not None, low or 0, high or 0)
        self._mask(call.key_mask)
        self._whole_numbers(call.query_documents)
        self._whole_numbers(call.key_documents)
        self._numbers(*struct.unpack("3q", struct.pack("3d", call.scale, call.softcap or 0.0, call.dropout_p)))
        assert len(self.data) == _SEED
        self._numbers(0 if call.seed is None else int(call.seed))
        first = dict(zip(TABLES, call.first, strict=True))
        for name in INPUTS:
            tensor: Tensor | None = getattr(call, name)
            if name in TABLES:
                self._table(tensor, first[name])
            elif name == "dense":
                self._tensor(tensor if tensor is None or tensor.dtype in DTYPES else tensor.float())
            elif name in ("query_factors", "key_factors"):
                self._tensor(None if tensor is None or ranks[0] == 0 else tensor.to(call.wide))
            else:
                self._tensor(tensor)
        self._tensor(output)
        self._pointer(kept.log_sums, kept.whole)
        self._pointer(kept.rounded_off, kept.whole)
        self._tensor(None if given is None else given.d_output)
        self._contiguous(None if given is None or given.d_lse is None else given.d_lse.to(call.wide))
        for name in INPUTS:
            tensor = gradients.get(name)
            if tensor is not None and name in ("key", "value"):
                self._tensor(tensor.flatten(0, 1), tensor)  # row parts times batch
            elif name in WHOLE:
                self._tensor(tensor)
            else:
                self._contiguous(tensor)
        self.data[_BYTES] = 8 * len(self.data)

    def filling(self, call: Call, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """Return a function that computes calls of other ``tensors``, which replace the call's and what else was given,
        into new memory like that of ``made``, which it returns.

        There is none if the kernel reads a copy, or if two of the tensors are the same, as query and key may be: other
        calls of the kind may tell them apart.
        """
        known = [*tensors, *self.made]
        places = {id(each): place for place, each in enumerate(known)}
        if len(places) < len(known) or any(id(whole) not in places for _, whole, _ in self.pointers):
            return None
        pointers = [(index, places[id(whole)], start) for index, whole, start in self.pointers]
        (value, *seeds) = [places[id(each)] for each in (call.value, call.seed) if each is not None]
        layouts = [(each.shape, each.stride(), each.dtype) for each in self.made]
        fields = self.data

        def fill(tensors: Sequence[Tensor]) -> list[Tensor]:
            new, data = tensors[value].new_empty_strided, array("q", fields)
            made = [new(size, strides, dtype=dtype) for size, strides, dtype in layouts]
            known = (*tensors, *made)
            for index, place, start in pointers:
                data[index] = known[place].data_ptr() + start
            data[_THREADS] = torch.get_num_threads()
            if seeds:
                data[_SEED] = int(tensors[seeds[0]])
            compute(data)
            return made

        return fill

    def _numbers(self, *numbers: int) -> None:
        self.data.extend(numbers)

    def _pointer(self, tensor: Tensor | None, whole: Tensor | None = None) -> None:
        """Add the address of a tensor, which may be a part of a ``whole``."""
        if tensor is not None:
            start = 0 if whole is None else tensor.data_ptr() - whole.data_ptr()
            self.pointers.append((len(self.data), tensor if whole is None else whole, start))
        self._numbers(0 if tensor is None else tensor.data_ptr())

    def _contiguous(self, tensor: Tensor | None) -> None:
        self._pointer(None if tensor is None else _in_memory(tensor.contiguous()))

    def _whole_numbers(self, tensor: Tensor | None) -> None:
        self._pointer(None if tensor is None else tensor.to(torch.int64).contiguous())

    def _tensor(self, tensor: Tensor | None, whole: Tensor | None = None) -> None:
        """Add a tensor of four axes. Items of an axis of size 1 may be shared by more."""
        if tensor is None:
            self._numbers(0, 0, 0, 0, 0, 0)
            return
        tensor = _in_memory(tensor)
        strides = tensor.stride()
        self._pointer(tensor, whole)
        self._numbers(DTYPES[tensor.dtype], 0 if tensor.shape[0] == 1 else strides[0], *strides[1:])

    def _table(self, table: Tensor | None, first: int) -> None:
        """Add a table over offsets: its length, its first offset, and its stride."""
        if table is None:
            self._numbers(0, 0, 0, 0)
            return
        # A head's part has to be in one piece; heads may lie apart, as in a longer table.
        if table.stride()[1:] != ((1,) if table.dim() == 2 else (table.shape[2], 1)):
            table = table.contiguous()
        table = _in_memory(table)
        self._pointer(table)
        near = max(-_FARTHEST, min(first, _FARTHEST))
        self._numbers(table.shape[1], near, 0 if len(table) == 1 else table.stride(0))

    def _positions(self, call: Call) -> None:
        """Add the fields from ``listed`` to ``rounding``."""
        if call.min_offset is None and call.max_offset is None and all(getattr(call, name) is None for name in TABLES):
            self._numbers(0, 0, 1, 0, 0, 0, 0, 0, 0)
            return
        explicit = call.query_positions is not None or call.key_positions is not None
        if not explicit and (call.affine[3] == 1 or call.n_k <= 1):
            self._numbers(0, *call.affine[:3], 0, 0, 0, 0, 0)
            return
        listed = [position_values(positions, "cpu") for positions in call.positions()]
        kind, rounding = 1, 0
        if any(positions.is_floating_point() for positions in listed):
            dtype = torch.promote_types(listed[0].dtype, listed[1].dtype)
            kind, rounding = 2, DTYPES.get(dtype, 0)
            listed = [positions.to(dtype).double() for positions in listed]
        self._numbers(kind, 0, 1, 0)
        for positions in listed:
            self._contiguous(positions)
        self._numbers(*(at.shape[-1] if at.dim() == 2 and len(at) > 1 else 0 for at in listed), rounding)

    def _mask(self, mask: Tensor | None) -> None:
        self._pointer(mask)
        self._numbers(*((0, 0) if mask is None else mask.stride()))


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its numbers: a part of a conjugate has the other sign there, and the zeros of
    forward-mode differentiation have no memory."""
    return torch.zeros_like(tensor) if tensor.data_ptr() == 0 and tensor.numel() else tensor.resolve_neg()
