"""The "native" backend: attention on the CPU by one compiled kernel, in O(n) memory.

The kernel, attention.cpp in this folder, computes the equation of kernels/call.py tile by tile, with a running maximum
and sum of exponentials for each row. build.py compiles it and library.py loads it. It gets a call as the struct
``Call`` of call.h, :class:`Struct` here. Every field has eight bytes.
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

from ..backend import Backend, BackwardInputs, ForwardOutputs, Operators, Replay
from ..call import AXES, TABLES, Call
from ..terms import Positions, position_values
from .library import compute, level_for
from .library import unsupported_reason as why_no_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""The dtypes that the kernel reads and writes, with their numbers in call.h."""

INPUTS = (
    *("query", "key", "value", "bias", "key_table", "query_table", "value_table", "key_table_factors"),
    *("query_table_factors", "query_factors", "key_factors", "query_levels", "key_levels", "dense"),
)
"""The inputs that the kernel knows, in their order in the struct."""

STRIDED = ("query", "key", "value", "dense")
"""The inputs whose gradients have strides in the struct. All other gradients are contiguous."""

_MAX_FIRST = 2**62 + 2**61
"""The bound of first offsets, so that sums with tables' lengths do not overflow. All offsets lie within 2**63."""

poisons = False
"""Whether the kernel's scratch memory begins as NaN; for tests."""


def num_parts(call: Call, grad_names: Sequence[str] | None = None) -> tuple[int, int]:
    """Return into how many parts batch and queries are divided. Each part is a task for a thread.

    In the backward, for the gradients ``grad_names``, each part has separate sums for inputs that its items share. The
    number of parts does not depend on the number of threads, so the sums do not either.
    """
    batch, key_heads = call.value.shape[:2]
    parts, num_tasks = batch, _NUM_TASKS
    if grad_names is not None:
        # Each part of the queries sums the gradients of all keys in separate memory.
        num_tasks = _NUM_TASKS // 2
        if any(name in grad_names for name in TABLES):
            parts = min(batch, -(-_NUM_TASKS // key_heads))
        if "dense" in grad_names and call.dense is not None and len(call.dense) < batch:
            # Items that share a matrix are in one part.
            parts = 1
    return parts, max(1, min(-(-num_tasks // (parts * key_heads)), call.n_q // _MIN_ROWS))


_NUM_TASKS = 8
"""Enough tasks for the cores of most processors. Each task of the forward packs the keys and values that it reads."""

_MIN_ROWS = 512
"""The smallest number of queries in a part, because each part packs all keys."""


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
        *_words("dtype table_dtype batch_parts row_parts"),
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
        *[(f"d_{name}", _Tensor if name in STRIDED else ctypes.c_int64) for name in INPUTS],
    )


def _index(field: str) -> int:
    """Return the index of a field's first word."""
    return int(getattr(Struct, field).offset) // 8


class CallStruct:
    """A call in the kernel's layout.

    Args:
        parts: see :func:`num_parts`.
        inputs: the tensors that the backward gets besides the call; None in the forward.
        gradient_buffers: the memory for gradients, by name, with the axes of :func:`_new_gradient_buffers`.

    Attributes:
        struct: the struct that the kernel reads; valid while the tensors behind its addresses live.
        state: the forward's state.
        outputs: the tensors that the kernel fills, by name: the output and the state's buffer, or the gradients.
        addresses: for each address in the struct its index, the tensor into which it points, and its distance in bytes
            from the tensor's beginning.
        copies: for each tensor that had to be converted the copy, the tensor, and the conversion.
    """

    def __init__(
        self,
        call: Call,
        parts: tuple[int, int],
        inputs: BackwardInputs | None = None,
        gradient_buffers: dict[str, Tensor] | None = None,
    ) -> None:
        self.addresses: list[tuple[int, Tensor, int]] = []
        self.copies: list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]] = []
        # A hook on saved tensors may have brought them back with other strides.
        saved = (None, None) if inputs is None else (inputs.output, self._convert(inputs.buffer, Tensor.contiguous))
        self.state = state = call.forward_state(2, *saved)
        results = {"output": state.output, "buffer": state.buffer}
        self.outputs = results if gradient_buffers is None else gradient_buffers
        self.struct = struct = Struct(bytes=ctypes.sizeof(Struct), level=level_for(state.output.dtype))
        struct.threads, struct.backward, struct.poison = torch.get_num_threads(), inputs is not None, poisons
        struct.batch, struct.key_heads, struct.n_k, struct.value_dim = call.value.shape
        struct.heads, struct.n_q = state.row_stats.shape[2], call.n_q
        struct.head_dim = 0 if call.query is None else call.query.shape[3]
        ranks = ("rank", "query_factors"), ("levels", "query_levels")
        for field, name in (*ranks, ("key_rank", "key_table_factors"), ("query_rank", "query_table_factors")):
            if (factors := getattr(call, name)) is not None:
                setattr(struct, field, factors.shape[3])
        struct.dtype, (struct.batch_parts, struct.row_parts) = DTYPES[call.value.dtype], parts
        table_dtypes = [table.dtype for table in call.tables[1:] if table is not None]
        struct.table_dtype = DTYPES[table_dtypes[0] if table_dtypes else call.score_dtype]
        self._set_positions(call)
        struct.has_least, struct.least = call.min_offset is not None, call.min_offset or 0
        struct.has_most, struct.most = call.max_offset is not None, call.max_offset or 0
        if call.key_mask is not None:
            self._set_address("key_mask", call.key_mask)
            struct.key_mask_strides[:] = call.key_mask.stride()
        for name in ("query_documents", "key_documents"):
            if (documents := getattr(call, name)) is not None:
                self._set_address(name, self._convert(documents, partial(_as_contiguous, None)))
        struct.scale, struct.softcap, struct.dropout_p = call.scale, call.softcap or 0.0, call.dropout_p
        struct.seed = 0 if call.seed is None else int(call.seed)
        for name, first in zip(TABLES, call.first, strict=True):
            if (table := getattr(call, name)) is not None:
                self._set_table(name, table, first)
        for name in INPUTS:
            if name not in TABLES and (tensor := getattr(call, name)) is not None:
                is_factors = name in ("query_factors", "key_factors")
                dtype = call.score_dtype if is_factors or tensor.dtype not in DTYPES else tensor.dtype
                self._set_tensor(name, self._convert(tensor, partial(Tensor.to, dtype=dtype)))
        self._set_tensor("output", state.output)
        self._set_address("log_sums", state.row_stats, state.buffer)
        if state.rounding_error is not None:
            self._set_address("rounded_off", state.rounding_error, state.buffer)
        if inputs is not None:
            self._set_tensor("d_output", inputs.d_output)
            if inputs.d_lse is not None:
                d_lse = self._convert(inputs.d_lse, partial(Tensor.to, dtype=call.score_dtype))
                self._set_address("d_log_sums", self._convert(d_lse, Tensor.contiguous))
        for name, gradient in (gradient_buffers or {}).items():
            if name not in STRIDED:
                self._set_address(f"d_{name}", gradient)
            else:  # the first axis of keys' and values' gradients is row parts times batch
                self._set_tensor(f"d_{name}", gradient.flatten(0, -4), gradient)

    def make_replay(self, call: Call, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function that computes the call for other tensors in place of ``tensors``, which are the call's
        and, in the backward, those of its inputs. It returns new tensors like ``outputs``."""
        names, outputs = list(self.outputs), list(self.outputs.values())
        known = [*tensors, *outputs, *(copy for copy, _, _ in self.copies)]
        indices = {id(tensor): index for index, tensor in enumerate(known)}
        addresses = [(word, indices[id(base)], start) for word, base, start in self.addresses]
        copies = [(indices[id(tensor)], convert) for _, tensor, convert in self.copies]
        value, seed = indices[id(call.value)], None if call.seed is None else indices[id(call.seed)]
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in outputs]
        threads_word, seed_word = _index("threads"), _index("seed")
        template, dense = array("q", bytes(self.struct)), names.index("dense") if "dense" in names else None

        def replay(tensors: Sequence[Tensor]) -> list[Tensor]:
            allocate, words = tensors[value].new_empty_strided, array("q", template)
            outputs = [allocate(size, strides, dtype=dtype) for size, strides, dtype in layouts]
            if dense is not None:
                outputs[dense].zero_()
            known = [*tensors, *outputs]
            for index, convert in copies:
                known.append(convert(known[index]))
            for word, index, start in addresses:
                words[word] = known[index].data_ptr() + start
            words[threads_word] = torch.get_num_threads()
            if seed is not None:
                words[seed_word] = int(tensors[seed])
            compute(words.buffer_info()[0])
            return outputs

        return replay

    def _convert(self, tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tensor that the kernel reads instead of another, which may be the same."""
        result = convert(tensor)
        if result is not tensor:
            self.copies.append((result, tensor, convert))
        return result

    def _set_address(self, field: str, tensor: Tensor, base: Tensor | None = None) -> None:
        """Set a field to the address of a tensor, which may be a view of ``base``."""
        index, start = _index(field), 0 if base is None else tensor.data_ptr() - base.data_ptr()
        self.addresses.append((index, tensor if base is None else base, start))
        ctypes.c_int64.from_buffer(self.struct, 8 * index).value = tensor.data_ptr()

    def _set_tensor(self, field: str, tensor: Tensor, base: Tensor | None = None) -> None:
        """Set a field to a tensor of four axes. If the first has size 1, all items of the batch read its item."""
        self._set_address(field, tensor, base)
        described, strides = getattr(self.struct, field), tensor.stride()
        described.dtype = DTYPES[tensor.dtype]
        described.stride[:] = 0 if tensor.shape[0] == 1 else strides[0], *strides[1:]

    def _set_table(self, field: str, table: Tensor, first: int) -> None:
        """Set a field to a table over offsets: its length, its first offset, and its stride."""
        # The entries of one head have to be contiguous; heads may lie apart, as in a longer table.
        if table.stride()[1:] != ((1,) if table.dim() == 2 else (table.shape[2], 1)):
            table = self._convert(table, Tensor.contiguous)
        self._set_address(field, table)
        described = getattr(self.struct, field)
        described.length, described.first = table.shape[1], max(-_MAX_FIRST, min(first, _MAX_FIRST))
        described.stride = 0 if len(table) == 1 else table.stride(0)

    def _set_positions(self, call: Call) -> None:
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
                listed = self._convert(call.value, partial(_as_contiguous, positions))
            else:
                listed = self._convert(positions, partial(_as_contiguous, None))
            self._set_address(name, listed)
            setattr(struct, f"{name}_stride", listed.shape[-1] if listed.dim() == 2 and len(listed) > 1 else 0)


def _as_contiguous(positions: Positions | None, tensor: Tensor) -> Tensor:
    """Return affine positions, or else a tensor of positions or ids, as a contiguous tensor; integers as int64."""
    return position_values(tensor if positions is None else positions, "cpu").contiguous()


def _is_empty(call: Call) -> bool:
    return 0 in (*call.value.shape[:3], call.n_q)


class Native(Backend):
    """The compiled kernel. It saves the ``LogSums`` of each row for the backward."""

    name, supported_inputs = "native", INPUTS

    def unsupported_reason(self, call: Call, device: torch.device) -> str | None:
        if (reason := why_no_library()) is not None:
            return reason
        if device.type != "cpu":
            return f"needs tensors on the CPU, got {device.type}"
        if call.value.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"needs {names}, got {str(call.value.dtype).removeprefix('torch.')}"
        explicit = call.query_positions, call.key_positions
        is_fractional = any(positions is not None and positions.is_floating_point() for positions in explicit)
        if is_fractional and call.limits_offsets:
            return "needs integer positions for causality and windows, got fractional ones"
        return None

    def adapt(self, call: Call) -> Call:
        # Products of vectors in bfloat16 take half the time where the processor has instructions for them.
        vectors = (call.value, *call.tables[1:], call.key_table_factors, call.query_table_factors)
        is_narrow = {rows.dtype for rows in vectors if rows is not None} == {torch.bfloat16}
        has_products = level_for(torch.bfloat16) != level_for(torch.float32)
        return call.widen(("bias",) if is_narrow and has_products else TABLES)

    def new_buffer(self, call: Call) -> Tensor:
        return call.forward_state(2).buffer

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> tuple[ForwardOutputs, Replay | None]:
        if _is_empty(call):
            state = call.forward_state(2)
            state.buffer.zero_()
            state.row_stats[0] = -math.inf
            return (state.output.zero_(), state.buffer, state.row_stats.clone() if call.wants_lse else None), None
        struct, wants_lse = CallStruct(call, num_parts(call)), call.wants_lse
        compute(ctypes.addressof(struct.struct))
        size, strides = struct.state.row_stats.shape, struct.state.row_stats.stride()

        def add_lse(output: Tensor, buffer: Tensor) -> ForwardOutputs:
            return output, buffer, buffer.as_strided(size, strides).clone() if wants_lse else None

        replay = struct.make_replay(call, tensors)
        return add_lse(*struct.outputs.values()), lambda *tensors: add_lse(*replay(tensors))

    def backward(
        self, call: Call, inputs: BackwardInputs, grad_names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Replay | None]:
        if _is_empty(call):
            return [call.new_gradient(name).zero_() for name in grad_names], None
        parts = num_parts(call, grad_names)
        buffers = _new_gradient_buffers(call, grad_names, parts)
        struct = CallStruct(call, parts, inputs, buffers)
        compute(ctypes.addressof(struct.struct))
        present = [name for name in AXES if getattr(call, name) is not None]
        indices = [present.index(name) for name in grad_names]

        def finish(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
            return list(map(_finish_gradient, grad_names, [tensors[index] for index in indices], buffers))

        replay = struct.make_replay(call, tensors)
        return finish(tensors, list(buffers.values())), lambda *tensors: finish(tensors, replay(tensors))


def _new_gradient_buffers(call: Call, grad_names: Sequence[str], parts: tuple[int, int]) -> dict[str, Tensor]:
    """Allocate the memory that the kernel fills, by name; call.h describes it."""
    batch_parts, row_parts = parts
    buffers = {}
    for name in grad_names:
        tensor: Tensor = getattr(call, name)
        size, dtype = tuple(tensor.shape), call.score_dtype
        if name == "query":
            buffers[name] = call.new_gradient(name)
        elif name == "dense":
            buffers[name] = tensor.new_zeros(size, dtype=dtype)
        elif name in ("key", "value"):
            batch, heads, n_k, width = size
            dtype = dtype if row_parts > 1 else tensor.dtype
            buffers[name] = tensor.new_empty((row_parts, batch, n_k, heads, width), dtype=dtype).transpose(2, 3)
        elif name in TABLES:
            buffers[name] = tensor.new_empty((batch_parts, row_parts, call.heads, *size[1:]), dtype=dtype)
        else:
            rows = (call.value.shape[0], *size[1:])
            part_axis = (row_parts,) if AXES[name][2] == "n_k" else ()
            buffers[name] = tensor.new_empty((*part_axis, *rows), dtype=dtype)
    return buffers


def _finish_gradient(name: str, tensor: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of an input in its shape and dtype, from the parts that the kernel filled."""
    if name in TABLES:
        gradient = _sum_parts(gradient.flatten(0, 1))
    elif AXES[name][2] == "n_k":
        gradient = _sum_parts(gradient)
    if len(tensor) < len(gradient):
        gradient = _sum_parts(gradient).unsqueeze(0)
    return gradient.to(tensor.dtype)


def _sum_parts(parts: Tensor) -> Tensor:
    """Sum over the first axis, one after another: any number of threads gives the same bits."""
    total = parts[0]
    for index in range(1, len(parts)):
        total = total + parts[index] if index == 1 else total.add_(parts[index])
    return total


backend = Native()
operators = Operators(backend)
