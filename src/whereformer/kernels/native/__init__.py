"""The "native" backend: attention on the CPU by one compiled kernel, in O(n) memory.

The kernel is attention.cpp beside this file; build.py compiles it and library.py loads it. It gets a call as the struct
``Call`` of call.h: its fields in their order, eight bytes each.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..fields import AXES, TABLES, Call
from ..operators import Again, Backend, Given, Operators, Results
from ..terms import position_values
from .library import compute, level_for
from .library import why_not as why_no_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""The dtypes that the kernel reads and writes, with their numbers in call.h."""

_BYTES, _THREADS, _SEED = 0, 2, 39
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

poisons = False
"""Whether the kernel's scratch memory begins as NaN; for tests."""


def parts_of(call: Call, needed: Sequence[str] | None = None) -> tuple[int, int]:
    """Return how many parts batch and queries are divided into, each a task for a thread.

    In the backward, for the gradients that are ``needed``, each part has sums of its own for what its items share. The
    number of parts does not depend on the number of threads, so neither do the sums.
    """
    batch, key_heads = call.value.shape[:2]
    parts, wanted = batch, _TASKS
    if needed is not None:
        # Each part of the queries sums the gradients of all keys in memory of its own.
        wanted = _TASKS // 2
        if any(name in needed for name in TABLES):
            parts = min(batch, -(-_TASKS // key_heads))
        if "dense" in needed and call.dense is not None and len(call.dense) < batch:
            # Items that share a matrix are in one part.
            parts = 1
    return parts, max(1, min(-(-wanted // (parts * key_heads)), call.n_q // _FEWEST_ROWS))


_TASKS = 8
"""Tasks enough for the cores of most processors; each of the forward packs keys and values for itself."""

_FEWEST_ROWS = 512
"""The fewest queries in a part: each part packs all keys for itself."""


class Arguments:
    """A call in the kernel's layout.

    Args:
        parts: see :func:`parts_of`.
        given: what the backward gets besides the call; None in the forward.
        into: where to put gradients, by name. Those of tables are (batch parts, row parts, heads, ...). Those of keys,
            values and what else has a row per key are (row parts, batch, ...), those of queries and what else has a row
            per query (batch, ...). That of ``dense`` is like it.

    Attributes:
        data: the struct, of which the kernel computes the call while what its pointers point to lives.
        kept: the output and what is kept beside it.
        made: what the kernel fills: the output and what is kept, or the gradients.
        pointers: its pointers: the index of each, the tensor into which it points, which has to live as long, and how
            far from its beginning.
    """

    def __init__(
        self, call: Call, parts: tuple[int, int], given: Given | None = None, into: dict[str, Tensor] | None = None
    ) -> None:
        gradients = into or {}
        self.kept = kept = call.kept(2, *((None, None) if given is None else given[2:]))
        self.made = [kept.output, kept.whole] if given is None else list(gradients.values())
        self.data = array("q")
        self.pointers: list[tuple[int, Tensor, int]] = []
        batch, key_heads, n_k, value_dim = call.value.shape
        factors = (call.query_factors, call.key_table_factors, call.query_table_factors, call.query_levels)
        ranks = [0 if each is None else each.shape[3] for each in factors]
        low, high = call.min_offset, call.max_offset
        self._numbers(0, level_for(kept.output.dtype), torch.get_num_threads(), given is not None, poisons)
        self._numbers(batch, kept.sums.shape[2], key_heads, call.n_q, n_k)
        self._numbers(0 if call.query is None else call.query.shape[3], value_dim, *ranks)
        self._numbers(DTYPES[call.value.dtype], *parts)
        self._positions(call)
        self._numbers(low is not None, high is not None, low or 0, high or 0)
        self._pointer(call.key_mask)
        self._numbers(*((0, 0) if call.key_mask is None else call.key_mask.stride()))
        for documents in (call.query_documents, call.key_documents):
            self._pointer(None if documents is None else documents.to(torch.int64).contiguous())
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
                self._tensor(None if tensor is None else tensor.to(call.wide))
            else:
                self._tensor(tensor)
        self._tensor(kept.output)
        self._pointer(kept.sums, kept.whole)
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
        self._pointer(None if tensor is None else tensor.contiguous())

    def _tensor(self, tensor: Tensor | None, whole: Tensor | None = None) -> None:
        """Add a tensor of four axes. Items of an axis of size 1 may be shared by more."""
        if tensor is None:
            self._numbers(0, 0, 0, 0, 0, 0)
            return
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
        self._pointer(table)
        near = max(-_FARTHEST, min(first, _FARTHEST))
        self._numbers(table.shape[1], near, 0 if len(table) == 1 else table.stride(0))

    def _positions(self, call: Call) -> None:
        """Add the fields from ``listed`` to the strides of positions."""
        if call.min_offset is None and call.max_offset is None and all(getattr(call, name) is None for name in TABLES):
            self._numbers(0, 0, 1, 0, 0, 0, 0, 0)
            return
        explicit = call.query_positions is not None or call.key_positions is not None
        if not explicit and (call.affine[3] == 1 or call.n_k <= 1):
            self._numbers(0, *call.affine[:3], 0, 0, 0, 0)
            return
        listed = [position_values(positions, "cpu") for positions in call.positions()]
        self._numbers(1, 0, 1, 0)
        for positions in listed:
            self._contiguous(positions)
        self._numbers(*(at.shape[-1] if at.dim() == 2 and len(at) > 1 else 0 for at in listed))


def _is_empty(call: Call) -> bool:
    return 0 in (*call.value.shape[:3], call.n_q)


class Native(Backend):
    """What is kept of each row are its ``LogSums``."""

    name, inputs = "native", INPUTS

    def why_not(self, call: Call, device: torch.device) -> str | None:
        if (reason := why_no_library()) is not None:
            return reason
        if device.type != "cpu":
            return f"needs tensors on the CPU, got {device.type}"
        if call.value.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"needs {names}, got {str(call.value.dtype).removeprefix('torch.')}"
        positions = [each for each in (call.query_positions, call.key_positions) if each is not None]
        if any(each.is_floating_point() for each in positions) and call.limits_offsets:
            return "needs whole positions for causality and windows, got fractional ones"
        return None

    def new_kept(self, call: Call) -> Tensor:
        return call.kept(2).whole

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Results, Again]:
        if _is_empty(call):
            kept = call.kept(2)
            kept.whole.zero_()
            kept.sums[0] = -math.inf
            return (kept.output.zero_(), kept.whole, kept.sums.clone() if call.wants_lse else None), None
        arguments, wants_lse = Arguments(call, parts_of(call)), call.wants_lse
        compute(arguments.data)
        size, strides = arguments.kept.sums.shape, arguments.kept.sums.stride()

        def results(output: Tensor, kept: Tensor) -> Results:
            return output, kept, kept.as_strided(size, strides).clone() if wants_lse else None

        fill = arguments.filling(call, tensors)
        return results(*arguments.made), None if fill is None else lambda *tensors: results(*fill(tensors))

    def backward(
        self, call: Call, given: Given, needed: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Again]:
        if _is_empty(call):
            return [call.new_gradient(name).zero_() for name in needed], None
        parts = parts_of(call, needed)
        into = _new_gradients(call, needed, parts)
        arguments = Arguments(call, parts, given, into)
        compute(arguments.data)
        present = [name for name in AXES if getattr(call, name) is not None]
        places = [(name, present.index(name)) for name in needed]

        def finished(tensors: Sequence[Tensor], filled: Sequence[Tensor]) -> list[Tensor]:
            pairs = zip(places, filled, strict=True)
            return [_finished(name, tensors[place], found) for (name, place), found in pairs]

        gradients = finished(tensors, arguments.made)
        # The kernel leaves out pairs of dense scores, so their memory has to begin as zeros.
        fill = None if "dense" in into else arguments.filling(call, tensors)
        if fill is None:
            return gradients, None
        return gradients, lambda *tensors: finished(tensors, fill(tensors))


def _new_gradients(call: Call, needed: Sequence[str], parts: tuple[int, int]) -> dict[str, Tensor]:
    """Allocate what the kernel fills, by name."""
    batch_parts, row_parts = parts
    gradients = {}
    for name in needed:
        tensor: Tensor = getattr(call, name)
        size, dtype = tuple(tensor.shape), call.wide
        if name == "query":
            gradients[name] = call.new_gradient(name)
        elif name == "dense":
            gradients[name] = tensor.new_zeros(size, dtype=dtype)
        elif name in ("key", "value"):
            batch, heads, n_k, width = size
            dtype = dtype if row_parts > 1 else tensor.dtype
            gradients[name] = tensor.new_empty((row_parts, batch, n_k, heads, width), dtype=dtype).transpose(2, 3)
        elif name in TABLES:
            gradients[name] = tensor.new_empty((batch_parts, row_parts, call.heads, *size[1:]), dtype=dtype)
        else:
            rows = (call.value.shape[0], *size[1:])
            first = (row_parts,) if AXES[name][2] == "n_k" else ()
            gradients[name] = tensor.new_empty((*first, *rows), dtype=dtype)
    return gradients


def _finished(name: str, like: Tensor, found: Tensor) -> Tensor:
    """Return a gradient in the shape and dtype of its input, from the parts that the kernel filled."""
    if name in TABLES:
        found = _sum(found.flatten(0, 1))
    elif AXES[name][2] == "n_k":
        found = _sum(found)
    if len(like) < len(found):
        found = _sum(found).unsqueeze(0)
    return found.to(like.dtype)


def _sum(parts: Tensor) -> Tensor:
    """Sum over the first axis, one after another: any number of threads gives the same bits."""
    found = parts[0]
    for index in range(1, len(parts)):
        found = found + parts[index] if index == 1 else found.add_(parts[index])
    return found


backend = Native()
operators = Operators(backend)
