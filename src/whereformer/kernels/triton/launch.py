"""``backend="triton"``: all terms fused into flash attention on NVIDIA GPUs, forward and backward, in O(n) memory.

This module is the torch side: what can run, the two custom operators, and what is cheap to say as matrix products over
whole rows. The kernels are in ``triton_kernels.py``, which is imported when the first call needs it: Triton does not
come with every build of torch.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..call import Call
from ..precision import without_autocast
from ..problem import ARGUMENTS, GRADIENTS, LOG2E, Problem, register_gradients
from ..terms import FactorPair, offset_range, position_values

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NARROWEST, _WIDEST = 16, 256
_INSTALLED = importlib.util.find_spec("triton") is not None
_LARGEST_BLOCK = 128

# A row's products with a table of vectors are kept for as many rows at a time as make n_q x 256 numbers, whatever the
# length of the table, so that memory grows with n alone.
_ROW_TABLE = 256
_FEWEST_ROWS = 128


def unavailable(call: Call, device: torch.device) -> str | None:
    """Why this backend cannot take the call on that device, in a line that says what can; None if it can."""
    reason = _unavailable(call, device)
    return None if reason is None else f"backend 'triton' {reason}; use backend='blockwise'"


def _unavailable(call: Call, device: torch.device) -> str | None:
    if reason := _unavailable_on(device):
        return reason
    if call.value.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {str(call.value.dtype).removeprefix('torch.')}"
    widths = {"value's head_dim": call.value.shape[3]}
    if call.query is not None:
        widths["head_dim"] = call.query.shape[3]
    for name, width in widths.items():
        if not _NARROWEST <= width <= _WIDEST:
            return f"needs a {name} from {_NARROWEST} to {_WIDEST}, got {width}"
    rank = sum(term.query_factors.shape[3] for term in call.terms if isinstance(term, FactorPair))
    if rank > _WIDEST:
        return f"needs FactorPairs of at most {_WIDEST} factors, got {rank}"
    span = offset_range(call.query_positions, call.key_positions)
    if span is not None and max(-span[0], span[1]) >= 2**30:
        return f"needs offsets below 2**30, got {span[0]} to {span[1]}"
    return None


def _unavailable_on(device: torch.device) -> str | None:
    """Why this backend cannot run on the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        # A call that is to run elsewhere, and nothing is known against the GPU there.
        return None
    if not _INSTALLED:
        return "needs Triton, which is not installed"
    if device.type == "cpu" and _interpreted():
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, got one of AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return None


# What torch.compiler.assume_constant_result does, without importing the whole compiler for it.
_unavailable_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def attend(call: Call) -> Tensor:
    """The attention output, (batch, heads, n_q, value_dim) in the value's dtype."""
    with without_autocast(call.value.device):
        problem = Problem.of(call)
        changes: dict[str, Any] = {}
        if problem.query_positions is not None or problem.key_positions is not None:
            # The kernels take both as they are or both as numbers.
            matter = call.causal or any(table is not None for table in (problem.bias, problem.keys, problem.values))
            for name, positions in (("query", call.query_positions), ("key", call.key_positions)):
                changes[f"{name}_positions"] = position_values(positions, call.value.device) if matter else None
        if problem.query_factors is not None and problem.key_factors is not None:
            rank, dtype = problem.query_factors.shape[3], _factors_dtype(call)
            changes["query_factors"] = problem.query_factors.to(dtype) if rank else None
            changes["key_factors"] = problem.key_factors.to(dtype) if rank else None
        out, _ = torch.ops.whereformer.triton_forward(*replace(problem, **changes).arguments())
        return out


def _factors_dtype(call: Call) -> torch.dtype:
    """Of factors in kernels: the value's where all came in it, which changes nothing but the speed."""
    pairs = [term for term in call.terms if isinstance(term, FactorPair)]
    came = {factors.dtype for pair in pairs for factors in (pair.query_factors, pair.key_factors)}
    return call.value.dtype if came == {call.value.dtype} else torch.float32


# --- the operators


@torch.library.custom_op("whereformer::triton_forward", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output and its norm, (1 or 2, batch, heads, n_q): the fields of the kernels' ``Norm``."""
    problem = Problem(*arguments)
    out, norm = _empty_output(problem)
    if out.numel() == 0 or problem.n_k == 0:
        return out.zero_(), norm.fill_(math.inf)
    with torch.no_grad(), without_autocast(out.device), _on(out.device):
        dropout_keys = _dropout_keys(problem)
        for part, rows in _parts(problem):
            keys_of_part = None if dropout_keys is None else dropout_keys[:, :, rows].contiguous()
            _run_forward(part, keys_of_part, out[:, :, rows], norm[..., rows])
    return out, norm


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_output(Problem(*arguments))


def _empty_output(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output in the layout that the next projection wants, and its norm."""
    value = problem.value
    batch, heads, _, value_dim = value.shape
    out = value.new_empty(batch, problem.n_q, heads, value_dim).transpose(1, 2)
    may_be_large = any(term is not None for term in (problem.bias, problem.query_factors, problem.dense))
    return out, value.new_empty(2 if may_be_large else 1, batch, heads, problem.n_q, dtype=torch.float32)


@torch.library.custom_op(
    "whereformer::triton_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor out, Tensor norm, bool[] needed, {ARGUMENTS}) -> Tensor[]",
)
def _backward(d_out: Tensor, out: Tensor, norm: Tensor, needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    problem = Problem(*arguments)
    gradients = _empty_gradients(problem, needed)
    if out.numel() == 0 or problem.n_k == 0:
        return [gradient.zero_() for gradient in gradients]
    with torch.no_grad(), without_autocast(out.device), _on(out.device):
        _Backward(problem, d_out, out, norm, gradients, needed).run()
    return gradients


@_backward.register_fake
def _(d_out: Tensor, out: Tensor, norm: Tensor, needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    return _empty_gradients(Problem(*arguments), needed)


def _empty_gradients(problem: Problem, needed: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients that are needed, in the layout of their inputs."""
    inputs = [getattr(problem, name) for name in GRADIENTS]
    return [torch.empty_like(tensor) for tensor, wanted in zip(inputs, needed, strict=True) if wanted]


register_gradients(_forward, _backward)


# --- from a problem to kernels


@cache
def _kernels() -> ModuleType:
    """The kernels; importing them needs Triton."""
    from . import kernels as triton_kernels

    return triton_kernels


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class _Blocks:
    """The size of a kernel's tiles, and how a GPU is to run it."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


# By kernel and by the padded width of a head: up to 64, 128, 256. Fixed, not tuned at run time, because sums depend on
# the size of tiles, and results must not depend on which size was faster. All fit into the 99 KiB of shared memory of
# the smallest GPUs of compute capability 8, and into registers: what is more than a bias or a mask takes many of those
# for indices, so _RICH calls have smaller tiles.
_PLAIN = {
    "forward": (_Blocks(128, 64, 8, 3), _Blocks(128, 64, 8, 2), _Blocks(64, 32, 8, 2)),
    "query": (_Blocks(128, 32, 8, 3), _Blocks(64, 32, 4, 3), _Blocks(32, 32, 4, 2)),
    "key": (_Blocks(32, 128, 8, 3), _Blocks(32, 64, 4, 3), _Blocks(32, 32, 4, 2)),
    "tile": (_Blocks(64, 64, 4, 2), _Blocks(64, 64, 8, 1), _Blocks(32, 32, 4, 1)),
}
_RICH = {
    "forward": (_Blocks(64, 32, 4, 2), _Blocks(64, 32, 4, 2), _Blocks(32, 32, 4, 1)),
    "query": (_Blocks(64, 32, 4, 2), _Blocks(32, 32, 4, 1), _Blocks(32, 16, 4, 1)),
    "key": (_Blocks(32, 64, 4, 2), _Blocks(32, 32, 4, 1), _Blocks(16, 32, 4, 1)),
    "tile": (_Blocks(32, 32, 4, 1), _Blocks(32, 32, 4, 1), _Blocks(32, 32, 4, 1)),
}
_FLOAT = {
    "forward": (_Blocks(32, 32, 4, 2), _Blocks(32, 32, 4, 1), _Blocks(16, 16, 4, 1)),
    "query": (_Blocks(32, 32, 4, 1), _Blocks(32, 16, 4, 1), _Blocks(16, 16, 4, 1)),
    "key": (_Blocks(32, 32, 4, 1), _Blocks(16, 32, 4, 1), _Blocks(16, 16, 4, 1)),
    "tile": (_Blocks(32, 32, 4, 1), _Blocks(32, 32, 4, 1), _Blocks(16, 16, 4, 1)),
}
# The interpreter's tiles are small, so that small tests have several, and of different shapes.
_INTERPRETED = {
    "forward": _Blocks(32, 16, 4, 1),
    "query": _Blocks(16, 32, 4, 1),
    "key": _Blocks(32, 16, 4, 1),
    "tile": _Blocks(16, 16, 4, 1),
}


def _blocks(kernel: str, problem: Problem) -> _Blocks:
    if _interpreted():
        return _INTERPRETED[kernel]
    widths = [_padded(problem.value.shape[3])]
    if problem.query is not None:
        widths.append(_padded(problem.query.shape[3]))
    if problem.query_factors is not None:
        widths.append(_padded(problem.query_factors.shape[3]))
    rich = (
        *(problem.keys, problem.values, problem.query_factors, problem.dense),
        *(problem.query_positions, problem.query_documents),
    )
    if torch.float32 in [tensor.dtype for tensor in (problem.value, problem.query_factors) if tensor is not None]:
        sizes = _FLOAT
    else:
        sizes = _PLAIN if all(tensor is None for tensor in rich) else _RICH
    return sizes[kernel][0 if max(widths) <= 64 else 1 if max(widths) <= 128 else 2]


def _padded(width: int) -> int:
    """The next power of two that a matrix product in a kernel can have as a dimension."""
    return max(16, 1 << (width - 1).bit_length())


def _widths(problem: Problem) -> dict[str, int]:
    """The compile-time sizes that all kernels but one have."""
    head_dim = 16 if problem.query is None else problem.query.shape[3]
    value_dim = problem.value.shape[3]
    rank = 16 if problem.query_factors is None else problem.query_factors.shape[3]
    return {
        "HEAD_DIM": head_dim,
        "D": _padded(head_dim),
        "VALUE_DIM": value_dim,
        "DV": _padded(value_dim),
        "RANK": rank,
        "R": _padded(rank),
    }


def _rows(tensor: Tensor | None, batch: int = 0) -> Any:
    """A tensor as the kernels take it; where it has one row for the whole ``batch``, all read that."""
    if tensor is None:
        return _kernels().Rows(None, 0, 0, 0)
    if tensor.stride(3) != 1 and tensor.shape[3] != 1:
        tensor = tensor.contiguous()
    across = 0 if tensor.shape[0] == 1 and batch > 1 else tensor.stride(0)
    return _kernels().Rows(tensor, across, tensor.stride(1), tensor.stride(2))


def _dense(tensor: Tensor | None, batch: int) -> Any:
    if tensor is None:
        return _kernels().Dense(None, 0, 0, 0, 0)
    across = 0 if tensor.shape[0] == 1 and batch > 1 else tensor.stride(0)
    return _kernels().Dense(tensor, across, *tensor.stride()[1:])


def _norm(norm: Tensor) -> Any:
    """A contiguous (1 or 2, batch, heads, n_q) tensor as the kernels take it."""
    return _kernels().Norm(norm[0], norm[1] if len(norm) > 1 else None)


def _constant(number: int) -> Any:
    """A number that the kernels are compiled for."""
    import triton.language as tl

    return tl.constexpr(number)


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _dropout_keys(problem: Problem) -> Tensor | None:
    keys = problem.dropout_keys
    if keys is None:
        return None
    return torch.where(keys >= 2**31, keys - 2**32, keys).to(torch.int32)  # the same 32 bits


def _parts(problem: Problem) -> Iterator[tuple[Problem, slice]]:
    """The problem in runs of queries few enough for their products with tables of vectors; mostly one run."""
    lengths = [table.shape[1] for table in (problem.keys, problem.values) if table is not None]
    if problem.query_positions is not None and problem.bias is not None:
        lengths.append(problem.bias.shape[1])  # its gradient is then summed by rows, too
    longest, n_q = max(lengths, default=1), problem.n_q
    size = n_q if longest <= _ROW_TABLE else max(_FEWEST_ROWS, n_q * _ROW_TABLE // longest)
    if size >= n_q:
        yield problem, slice(0, n_q)
        return
    for first in range(0, n_q, size):
        rows = slice(first, min(first + size, n_q))
        start, stride, *of_keys = problem.affine
        yield (
            replace(
                problem,
                query=None if problem.query is None else problem.query[:, :, rows],
                query_factors=None if problem.query_factors is None else problem.query_factors[:, :, rows],
                dense=None if problem.dense is None else problem.dense[:, :, rows],
                query_positions=None if problem.query_positions is None else problem.query_positions[..., rows],
                query_documents=None if problem.query_documents is None else problem.query_documents[:, rows],
                affine=(start + first * stride, stride, *of_keys),
                n_q=rows.stop - first,
            ),
            rows,
        )


def _pairs(problem: Problem, dropout_keys: Tensor | None) -> Any:
    """Which queries meet which keys, as the kernels take it; ``dropout_keys`` are of the problem's rows."""
    n_q, n_k = problem.n_q, problem.value.shape[2]
    key_mask = problem.key_mask
    key_end = ranks = query_documents = key_documents = None
    query_positions, key_positions = problem.query_positions, problem.key_positions
    if key_mask is not None:
        numbers = torch.arange(1, n_k + 1, dtype=torch.int32, device=key_mask.device)
        key_end = (key_mask * numbers).amax(1)
        key_mask = key_mask.contiguous().view(torch.uint8)
    if problem.query_documents is not None and problem.key_documents is not None:
        query_documents, key_documents = _same_dtype(problem.query_documents, problem.key_documents)
    across = [0, 0]
    if query_positions is not None and key_positions is not None:
        query_positions, key_positions = _same_dtype(query_positions, key_positions)
        across = [
            positions.shape[-1] if positions.dim() == 2 and positions.shape[0] > 1 else 0
            for positions in (query_positions, key_positions)
        ]
        ranks = _ranks(key_positions)
    query_start, query_stride, key_start, key_stride = problem.affine
    return _kernels().Pairs(
        n_q=n_q,
        n_k=n_k,
        heads=problem.value.shape[1],
        start=key_start - query_start,
        query_stride=_constant(query_stride),
        key_stride=_constant(key_stride),
        query_positions=query_positions,
        query_positions_batch=across[0],
        key_positions=key_positions,
        key_positions_batch=across[1],
        key_ranks=ranks,
        key_mask=key_mask,
        key_end=key_end,
        query_documents=query_documents,
        key_documents=key_documents,
        dropout_keys=dropout_keys,
        dropout_threshold=int(problem.dropout_p * 2**32),
        dropout_scale=1.0 / (1.0 - problem.dropout_p),
    )


def _same_dtype(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of ids or positions in one type that kernels can load and compare."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    elif not dtype.is_floating_point:
        dtype = torch.int64
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


def _ranks(positions: Tensor) -> Tensor:
    """How many earlier keys of the same block of keys have the same position, int32 in the shape of ``positions``."""
    length = positions.shape[-1]
    short = functional.pad(positions, (0, -length % _LARGEST_BLOCK)).unflatten(-1, (-1, _LARGEST_BLOCK))
    same = short.unsqueeze(-1) == short.unsqueeze(-2)
    return same.tril(-1).sum(-1, dtype=torch.int32).flatten(-2)[..., :length].contiguous()


def _terms(problem: Problem, d_out: Tensor | None = None) -> Any:
    """The offset tables as the kernels take them, scores in units of log2; with ``d_out`` for the backward kernels."""
    tables = (problem.bias, problem.keys, problem.values)
    lengths = [None if table is None else table.shape[1] for table in tables]
    spans = [(first, first + n - 1) for first, n in zip(problem.first, lengths, strict=True) if n is not None]
    first = last = None
    if spans:
        first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    bias, bias_shift = problem.bias, problem.first[0]
    if bias is not None:
        # The lowest of numbers, which masks often hold, is to stay finite: -inf alone forbids a pair.
        lowest = torch.finfo(bias.dtype).min / 4
        bias = torch.where(bias.isneginf(), bias, bias.clamp(lowest, -lowest)) * LOG2E
        if first is not None and last is not None and problem.query_positions is None:
            # A tile that is not wholly beyond the ends of all tables reads at most its own extent beyond them.
            extent = _LARGEST_BLOCK * (problem.affine[1] + problem.affine[3])
            before = problem.first[0] - first + extent
            after = last - (problem.first[0] + bias.shape[1] - 1) + extent
            bias = functional.pad(bias, (before, after), mode="replicate")
            bias_shift -= before
        bias = bias.contiguous()
    keys = values = None
    if problem.keys is not None and problem.query is not None:
        keys = (problem.query.float() @ (problem.keys * (problem.scale * LOG2E)).mT).contiguous()
    if problem.values is not None and d_out is not None:
        values = (d_out.float() @ problem.values.mT).contiguous()
    return _kernels().Terms(
        first=first,
        last=last,
        bias=bias,
        bias_row=None if bias is None else bias.shape[1],
        bias_shift=None if bias is None else bias_shift,
        bias_first=None if bias is None else problem.first[0],
        bias_length=lengths[0],
        key_products=keys,
        keys_first=None if problem.keys is None else problem.first[1],
        keys_length=lengths[1],
        value_products=values,
        values_first=None if problem.values is None else problem.first[2],
        values_length=lengths[2],
    )


# --- forward


def _run_forward(problem: Problem, dropout_keys: Tensor | None, out: Tensor, norm: Tensor) -> None:
    """Fill ``out`` and ``norm``, (..., batch, heads, n_q, ...) with any strides."""
    batch, heads = problem.value.shape[:2]
    blocks = _blocks("forward", problem)
    at_offset = values_table = None
    if problem.values is not None:
        at_offset = out.new_zeros(batch, heads, problem.n_q, problem.values.shape[1], dtype=torch.float32)
        values_table = problem.values.unsqueeze(0).expand(batch, heads, -1, -1)
    rows_norm = torch.empty_like(norm, memory_format=torch.contiguous_format)
    _kernels().forward[(batch * heads * _cdiv(problem.n_q, blocks.rows),)](
        _rows(problem.query),
        _rows(problem.key),
        _rows(problem.value),
        _rows(out),
        _norm(rows_norm),
        _rows(problem.query_factors, batch),
        _rows(problem.key_factors, batch),
        _rows(values_table),
        at_offset,
        _dense(problem.dense, batch),
        _terms(problem),
        _pairs(problem, dropout_keys),
        problem.scale * LOG2E,
        CAUSAL=problem.causal,
        BLOCK_T=16,
        **_widths(problem),
        **blocks.launch,
    )
    norm.copy_(rows_norm)


# --- backward


class _Backward:
    """One backward pass: fills the needed ``gradients``, in the order of ``GRADIENTS``."""

    def __init__(
        self,
        problem: Problem,
        d_out: Tensor,
        out: Tensor,
        norm: Tensor,
        gradients: list[Tensor],
        needed: Sequence[bool],
    ) -> None:
        self.problem = problem
        self.batch, self.heads = problem.value.shape[:2]
        self.wanted = dict(zip(GRADIENTS, needed, strict=True))
        names = [name for name, wanted in self.wanted.items() if wanted]
        self.gradients = dict(zip(names, gradients, strict=True))
        self.d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        self.norm = norm
        self.dropout_keys = _dropout_keys(problem)
        self.delta = self._row_products(out)
        self.parts = list(_parts(problem))
        self.sums = {name: self._place(name) for name in GRADIENTS if name != "dense"}

    def _place(self, name: str) -> Tensor | None:
        """Where a gradient is summed up: in itself, or in float32 where more is to be added to it."""
        tensor: Tensor | None = getattr(self.problem, name)
        if tensor is None:
            return None
        if name in ("bias", "keys", "values"):
            return torch.zeros_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)
        of_keys = name in ("key", "value", "key_factors")
        in_float = name.endswith("factors") or (name == "query" and self.problem.keys is not None)
        if in_float or (of_keys and len(self.parts) > 1):
            return tensor.new_zeros(self.batch, self.heads, *tensor.shape[2:], dtype=torch.float32)
        gradient = self.gradients.get(name)
        return (
            gradient
            if gradient is not None and gradient.stride(3) == 1
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )

    def run(self) -> None:
        wanted = self.wanted
        for part, rows in self.parts:
            lines = (
                _norm(self.norm[..., rows].contiguous()),
                self.delta[:, :, rows].contiguous(),
            )
            d_out = self.d_out[:, :, rows]
            terms = _terms(part, d_out)
            pairs = _pairs(part, None if self.dropout_keys is None else self.dropout_keys[:, :, rows].contiguous())
            if any(wanted[name] for name in ("query", "query_factors", "bias", "keys", "values")):
                self._query_gradients(part, rows, d_out, lines, terms, pairs)
            if any(wanted[name] for name in ("key", "value", "key_factors")):
                self._key_gradients(part, d_out, lines, terms, pairs)
            if wanted["bias"] and part.query_positions is None:
                self._diagonal_gradients(part, d_out, lines, terms, pairs)
            if wanted["dense"]:
                self._dense_gradients(part, rows, d_out, lines, terms, pairs)
        for name, found in self.sums.items():
            gradient = self.gradients.get(name)
            if gradient is not None and found is not None and found is not gradient:
                shared = found.shape[0] != gradient.shape[0]  # by all rows of the batch
                gradient.copy_(found.sum(0, keepdim=True) if shared else found)

    def _row_products(self, out: Tensor) -> Tensor:
        delta = torch.empty_like(self.norm[0], memory_format=torch.contiguous_format)
        size = 64
        _kernels().row_products[(self.batch * self.heads * _cdiv(self.problem.n_q, size),)](
            _rows(out),
            _rows(self.d_out),
            delta,
            _pairs(replace(self.problem, key_mask=None, query_positions=None, query_documents=None), None),
            BLOCK_M=size,
            VALUE_DIM=out.shape[3],
            DV=_padded(out.shape[3]),
        )
        return delta

    def _common(self, part: Problem, d_out: Tensor, lines: tuple[Any, Tensor]) -> tuple[Any, ...]:
        """The arguments that all kernels of gradients begin with."""
        return (
            _rows(part.query),
            _rows(part.key),
            _rows(part.value),
            _rows(d_out),
            *lines,
            _rows(part.query_factors, self.batch),
            _rows(part.key_factors, self.batch),
        )

    def _query_gradients(
        self, part: Problem, rows: slice, d_out: Tensor, lines: tuple[Any, Tensor], terms: Any, pairs: Any
    ) -> None:
        """All gradients that are sums over keys, and what follows from them."""
        blocks = _blocks("query", part)
        of_rows = (self.batch, self.heads, part.n_q)

        def by_row(table: Tensor | None) -> Tensor | None:
            return None if table is None else d_out.new_zeros(*of_rows, table.shape[1], dtype=torch.float32)

        explicit = part.query_positions is not None
        d_bias_ends = d_out.new_empty(2, *of_rows, dtype=torch.float32) if self.wanted["bias"] else None
        d_bias_rows = by_row(part.bias) if explicit and self.wanted["bias"] else None
        d_keys_rows = by_row(part.keys) if self.wanted["keys"] or self.wanted["query"] else None
        at_offset = by_row(part.values) if self.wanted["values"] else None
        d_query, d_factors = self.sums["query"], self.sums["query_factors"]
        _kernels().query_gradients[(self.batch * self.heads * _cdiv(part.n_q, blocks.rows),)](
            *self._common(part, d_out, lines),
            _rows(None if d_query is None else d_query[:, :, rows]),
            _rows(None if d_factors is None else d_factors[:, :, rows]),
            d_bias_ends,
            d_bias_rows,
            d_keys_rows,
            at_offset,
            _dense(part.dense, self.batch),
            terms,
            pairs,
            part.scale * LOG2E,
            part.scale,
            CAUSAL=part.causal,
            **_widths(part),
            **blocks.launch,
        )
        d_bias, d_keys, d_values = self.sums["bias"], self.sums["keys"], self.sums["values"]
        if d_bias is not None and d_bias_ends is not None:
            if d_bias_rows is not None:
                d_bias += d_bias_rows.sum((0, 2))
            ends = d_bias_ends.sum((1, 3))
            d_bias[:, 0] += ends[0]
            d_bias[:, -1] += ends[1]
        if d_keys_rows is not None and d_keys is not None and part.keys is not None and part.query is not None:
            if d_query is not None:
                d_query[:, :, rows] += d_keys_rows @ (part.keys * part.scale)
            d_keys += _fold(d_keys_rows.mT @ (part.query.float() * part.scale), d_keys)
        if at_offset is not None and d_values is not None:
            d_values += _fold(at_offset.mT @ d_out.float(), d_values)

    def _key_gradients(self, part: Problem, d_out: Tensor, lines: tuple[Any, Tensor], terms: Any, pairs: Any) -> None:
        """All gradients that are sums over queries."""
        blocks = _blocks("key", part)
        _kernels().key_gradients[(self.batch * self.heads * _cdiv(part.value.shape[2], blocks.keys),)](
            *self._common(part, d_out, lines),
            _rows(self.sums["key"]),
            _rows(self.sums["value"]),
            _rows(self.sums["key_factors"]),
            _dense(part.dense, self.batch),
            terms,
            pairs,
            part.scale * LOG2E,
            part.scale,
            ADD=len(self.parts) > 1,
            CAUSAL=part.causal,
            **_widths(part),
            **blocks.launch,
        )

    def _diagonal_gradients(
        self, part: Problem, d_out: Tensor, lines: tuple[Any, Tensor], terms: Any, pairs: Any
    ) -> None:
        """The bias's gradient between its ends, for affine positions."""
        d_bias = self.sums["bias"]
        assert d_bias is not None
        blocks = _blocks("tile", part)
        size, length, first = blocks.rows, d_bias.shape[1], part.first[0]
        query_start, query_stride, key_start, key_stride = part.affine
        start = key_start - query_start
        divisor = math.gcd(query_stride, key_stride)
        row_blocks, key_blocks = _cdiv(part.n_q, size), _cdiv(part.value.shape[2], size)
        # Diagonals of tiles that read a column between the first and the last, out of those that there are.
        low, high = first + 1 - start, first + length - 2 - start
        if part.causal:
            high = min(high, -start)
        step = size * divisor
        first_diagonal = max(_cdiv(low - key_stride * (size - 1), step), -(query_stride // divisor) * (row_blocks - 1))
        last_diagonal = min((high + query_stride * (size - 1)) // step, key_stride // divisor * (key_blocks - 1))
        diagonals = last_diagonal - first_diagonal + 1
        if low > high or diagonals < 1:
            return
        splits = _splits(d_out.device, self.heads * diagonals, self.batch * min(row_blocks, key_blocks))
        sums = d_out.new_empty(self.heads, diagonals, splits, size, size, dtype=torch.float32)
        _kernels().diagonal_gradients[(self.heads * diagonals * splits,)](
            *self._common(part, d_out, lines),
            sums,
            _dense(part.dense, self.batch),
            terms,
            pairs,
            self.batch,
            first_diagonal,
            diagonals,
            splits,
            part.scale * LOG2E,
            CAUSAL=part.causal,
            ROW_STEP=key_stride // divisor,
            KEY_STEP=query_stride // divisor,
            BLOCK=size,
            **_widths(part),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        between = torch.zeros_like(d_bias)
        columns = 32
        _kernels().sum_diagonals[(self.heads * _cdiv(length, columns),)](
            sums,
            between,
            first,
            length,
            start + first_diagonal * step,
            step,
            diagonals,
            splits,
            pairs.query_stride,
            pairs.key_stride,
            BLOCK=size,
            BLOCK_T=columns,
        )
        d_bias += between

    def _dense_gradients(
        self, part: Problem, rows: slice, d_out: Tensor, lines: tuple[Any, Tensor], terms: Any, pairs: Any
    ) -> None:
        blocks = _blocks("tile", part)
        size = blocks.rows
        gradient = self.gradients["dense"][:, :, rows]
        tiles = _cdiv(part.n_q, size) * _cdiv(part.value.shape[2], size)
        _kernels().dense_gradients[(gradient.shape[0] * self.heads * tiles,)](
            *self._common(part, d_out, lines),
            _dense(gradient, gradient.shape[0]),
            _dense(part.dense, self.batch),
            terms,
            pairs,
            self.batch // gradient.shape[0],
            part.scale * LOG2E,
            CAUSAL=part.causal,
            BLOCK=size,
            **_widths(part),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def _fold(found: Tensor, table: Tensor) -> Tensor:
    """A gradient for every row of the batch and head, summed to the shape of ``table``."""
    return found.sum(0) if table.shape[0] == found.shape[1] else found.sum((0, 1)).unsqueeze(0)


def _splits(device: torch.device, programs: int, steps: int) -> int:
    """Into how many shares of ``steps`` to divide each of few programs, so that a GPU is busy."""
    if device.type != "cuda":
        return min(2, steps)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(_cdiv(4 * processors, programs), _cdiv(steps, 4)))
