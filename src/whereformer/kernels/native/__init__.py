"""The "native" backend: attention on the CPU by one compiled kernel, in O(n) memory.

The kernel is attention.cpp beside this file; build.py compiles it and library.py loads it. It gets a call as the struct
``Call`` of call.h, of which every field has eight bytes: :class:`Struct`.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call import AXES, TABLES, Call
from ..operators import Again, Backend, Given, Operators, Results
from ..terms import Positions, position_values
from .library import compute, level_for
from .library import why_not as why_no_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""The dtypes that the kernel reads and writes, with their numbers in call.h."""

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


def _words(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class _Tensor(ctypes.Structure):
    """Four axes: batch, head, row and number."""

    _fields_ = (*_words("data dtype"), ("stride", 4 * ctypes.c_int64))


class _Table(ctypes.Structure):
    """A table over offsets."""

    _fields_ = (*_words("data length first stride"),)


class Struct(ctypes.Structure):
    """``Call`` of call.h, which explains the fields."""

    _fields_ = (
        *_words("bytes level threads backward poison"),
        *_words("batch heads key_heads n_q n_k head_dim value_dim rank key_rank query_rank levels"),
        *_words("dtype batch_parts row_parts"),
        *_words("listed query_start query_stride key_start query_positions key_positions"),
        *_words("query_positions_stride key_positions_stride has_least has_most least most key_mask"),
        ("key_mask_strides", 2 * ctypes.c_int64),
        *_words("query_documents key_documents"),
        *[(name, ctypes.c_double) for name in ("scale", "softcap", "dropout_p")],
        *_words("seed"),
        *[(name, _Table if name in TABLES else _Tensor) for name in INPUTS],
        ("output", _Tensor),
        *_words("log_sums rounded_off"),
        ("d_output", _Tensor),
        *_words("d_log_sums"),
        *[(f"d_{name}", _Tensor if name in WHOLE else ctypes.c_int64) for name in INPUTS],
    )


def _index(field: str) -> int:
    """Return where a field begins, in words."""
    return int(getattr(Struct, field).offset) // 8


class Arguments:
    """A call in the kernel's layout.

    Args:
        parts: see :func:`parts_of`.
        given: what the backward gets besides the call; None in the forward.
        into: where to put gradients, by name. Those of tables are (batch parts, row parts, heads, ...). Those of keys,
            values and what else has a row per key are (row parts, batch, ...), those of queries and what else has a row
            per query (batch, ...). That of ``dense`` is like it, and begins as zeros.

    Attributes:
        struct: of which the kernel computes the call while what its addresses point to lives.
        kept: the output and what is kept beside it.
        made: what the kernel fills, by name: the output and what is kept, or the gradients.
        addresses: the words that are addresses: the index of each, the tensor into which it points, and how far from
            its beginning.
        copies: each tensor that the kernel reads in another's place, that one, and the function between them.
    """

    def __init__(
        self, call: Call, parts: tuple[int, int], given: Given | None = None, into: dict[str, Tensor] | None = None
    ) -> None:
        self.addresses: list[tuple[int, Tensor, int]] = []
        self.copies: list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]] = []
        # A hook on saved tensors may have brought them back with other strides.
        saved = (None, None) if given is None else (given.output, self._read(given.kept, Tensor.contiguous))
        self.kept = kept = call.forward_state(2, *saved)
        self.made = {"output": kept.output, "kept": kept.buffer} if into is None else into
        self.struct = struct = Struct(bytes=ctypes.sizeof(Struct), level=level_for(kept.output.dtype))
        struct.threads, struct.backward, struct.poison = torch.get_num_threads(), given is not None, poisons
        struct.batch, struct.key_heads, struct.n_k, struct.value_dim = call.value.shape
        struct.heads, struct.n_q = kept.row_stats.shape[2], call.n_q
        struct.head_dim = 0 if call.query is None else call.query.shape[3]
        ranks = ("rank", "query_factors"), ("levels", "query_levels")
        for field, name in (*ranks, ("key_rank", "key_table_factors"), ("query_rank", "query_table_factors")):
            if (factors := getattr(call, name)) is not None:
                setattr(struct, field, factors.shape[3])
        struct.dtype, (struct.batch_parts, struct.row_parts) = DTYPES[call.value.dtype], parts
        self._positions(call)
        struct.has_least, struct.least = call.min_offset is not None, call.min_offset or 0
        struct.has_most, struct.most = call.max_offset is not None, call.max_offset or 0
        if call.key_mask is not None:
            self._point("key_mask", call.key_mask)
            struct.key_mask_strides[:] = call.key_mask.stride()
        for name in ("query_documents", "key_documents"):
            if (documents := getattr(call, name)) is not None:
                self._point(name, self._read(documents, partial(_listed, None)))
        struct.scale, struct.softcap, struct.dropout_p = call.scale, call.softcap or 0.0, call.dropout_p
        struct.seed = 0 if call.seed is None else int(call.seed)
        for name, first in zip(TABLES, call.first, strict=True):
            if (table := getattr(call, name)) is not None:
                self._table(name, table, first)
        for name in INPUTS:
            if name not in TABLES and (tensor := getattr(call, name)) is not None:
                is_factors = name in ("query_factors", "key_factors")
                dtype = call.score_dtype if is_factors or tensor.dtype not in DTYPES else tensor.dtype
                self._four_axes(name, self._read(tensor, partial(Tensor.to, dtype=dtype)))
        self._four_axes("output", kept.output)
        self._point("log_sums", kept.row_stats, kept.buffer)
        if kept.rounding_error is not None:
            self._point("rounded_off", kept.rounding_error, kept.buffer)
        if given is not None:
            self._four_axes("d_output", given.d_output)
            if given.d_lse is not None:
                d_lse = self._read(given.d_lse, partial(Tensor.to, dtype=call.score_dtype))
                self._point("d_log_sums", self._read(d_lse, Tensor.contiguous))
        for name, gradient in (into or {}).items():
            if name not in WHOLE:
                self._point(f"d_{name}", gradient)
            else:  # those of keys and values have row parts times batch
                self._four_axes(f"d_{name}", gradient.flatten(0, -4), gradient)

    def filling(self, call: Call, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function that computes calls of other ``tensors``, which replace the call's and what else was given,
        into new memory like that of ``made``, which it returns."""
        made_names, made = list(self.made), list(self.made.values())
        known = [*tensors, *made, *(copy for copy, _, _ in self.copies)]
        places = {id(tensor): place for place, tensor in enumerate(known)}
        addresses = [(index, places[id(whole)], start) for index, whole, start in self.addresses]
        copies = [(places[id(tensor)], read) for _, tensor, read in self.copies]
        value, seed = places[id(call.value)], None if call.seed is None else places[id(call.seed)]
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]
        template, dense = array("q", bytes(self.struct)), made_names.index("dense") if "dense" in made_names else None

        def fill(tensors: Sequence[Tensor]) -> list[Tensor]:
            new, words = tensors[value].new_empty_strided, array("q", template)
            made = [new(size, strides, dtype=dtype) for size, strides, dtype in layouts]
            if dense is not None:
                made[dense].zero_()
            known = [*tensors, *made]
            for place, read in copies:
                known.append(read(known[place]))
            for index, place, start in addresses:
                words[index] = known[place].data_ptr() + start
            words[_THREADS] = torch.get_num_threads()
            if seed is not None:
                words[_SEED] = int(tensors[seed])
            compute(words.buffer_info()[0])
            return made

        return fill

    def _read(self, tensor: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what the kernel reads in a tensor's place, which may be the tensor."""
        result = read(tensor)
        if result is not tensor:
            self.copies.append((result, tensor, read))
        return result

    def _point(self, field: str, tensor: Tensor, whole: Tensor | None = None) -> None:
        """Set a field to the address of a tensor, which may be a part of a ``whole``."""
        index, start = _index(field), 0 if whole is None else tensor.data_ptr() - whole.data_ptr()
        self.addresses.append((index, tensor if whole is None else whole, start))
        ctypes.c_int64.from_buffer(self.struct, 8 * index).value = tensor.data_ptr()

    def _four_axes(self, field: str, tensor: Tensor, whole: Tensor | None = None) -> None:
        """Set a field to a tensor of four axes. Items of an axis of size 1 may be shared by more."""
        self._point(field, tensor, whole)
        described, strides = getattr(self.struct, field), tensor.stride()
        described.dtype = DTYPES[tensor.dtype]
        described.stride[:] = 0 if tensor.shape[0] == 1 else strides[0], *strides[1:]

    def _table(self, field: str, table: Tensor, first: int) -> None:
        """Set a field to a table over offsets: its length, its first offset, and its stride."""
        # A head's part has to be in one piece; heads may lie apart, as in a longer table.
        if table.stride()[1:] != ((1,) if table.dim() == 2 else (table.shape[2], 1)):
            table = self._read(table, Tensor.contiguous)
        self._point(field, table)
        described = getattr(self.struct, field)
        described.length, described.first = table.shape[1], max(-_FARTHEST, min(first, _FARTHEST))
        described.stride = 0 if len(table) == 1 else table.stride(0)

    def _positions(self, call: Call) -> None:
        """Set the fields from ``listed`` to the strides of positions."""
        struct = self.struct
        struct.query_stride = 1
        if call.min_offset is None and call.max_offset is None and all(getattr(call, name) is None for name in TABLES):
            return
        explicit = call.query_positions is not None or call.key_positions is not None
        if not explicit and (call.affine[3] == 1 or call.n_k <= 1):
            struct.query_start, struct.query_stride, struct.key_start, _ = call.affine
            return
        struct.listed = 1
        for name, positions in zip(("query_positions", "key_positions"), call.positions(), strict=True):
            if isinstance(positions, Positions):
                listed = self._read(call.value, partial(_listed, positions))
            else:
                listed = self._read(positions, partial(_listed, None))
            self._point(name, listed)
            setattr(struct, f"{name}_stride", listed.shape[-1] if listed.dim() == 2 and len(listed) > 1 else 0)


_THREADS, _SEED = _index("threads"), _index("seed")


def _listed(positions: Positions | None, tensor: Tensor) -> Tensor:
    """Return affine positions as int64 in one piece, or a tensor of positions or documents if there are none."""
    return position_values(tensor if positions is None else positions, "cpu").contiguous()


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
        return call.forward_state(2).whole

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Results, Again]:
        if _is_empty(call):
            kept = call.forward_state(2)
            kept.buffer.zero_()
            kept.row_stats[0] = -math.inf
            return (kept.output.zero_(), kept.buffer, kept.row_stats.clone() if call.wants_lse else None), None
        arguments, wants_lse = Arguments(call, parts_of(call)), call.wants_lse
        compute(ctypes.addressof(arguments.struct))
        size, strides = arguments.kept.row_stats.shape, arguments.kept.row_stats.stride()

        def results(output: Tensor, kept: Tensor) -> Results:
            return output, kept, kept.as_strided(size, strides).clone() if wants_lse else None

        fill = arguments.filling(call, tensors)
        return results(*arguments.made.values()), lambda *tensors: results(*fill(tensors))

    def backward(
        self, call: Call, given: Given, needed: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Again]:
        if _is_empty(call):
            return [call.new_gradient(name).zero_() for name in needed], None
        parts = parts_of(call, needed)
        into = _new_gradients(call, needed, parts)
        arguments = Arguments(call, parts, given, into)
        compute(ctypes.addressof(arguments.struct))
        present = [name for name in AXES if getattr(call, name) is not None]
        places = [(name, present.index(name)) for name in needed]

        def finished(tensors: Sequence[Tensor], filled: Sequence[Tensor]) -> list[Tensor]:
            pairs = zip(places, filled, strict=True)
            return [_finished(name, tensors[place], found) for (name, place), found in pairs]

        fill = arguments.filling(call, tensors)
        return finished(tensors, list(into.values())), lambda *tensors: finished(tensors, fill(tensors))


def _new_gradients(call: Call, needed: Sequence[str], parts: tuple[int, int]) -> dict[str, Tensor]:
    """Allocate what the kernel fills, by name."""
    batch_parts, row_parts = parts
    gradients = {}
    for name in needed:
        tensor: Tensor = getattr(call, name)
        size, dtype = tuple(tensor.shape), call.score_dtype
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
