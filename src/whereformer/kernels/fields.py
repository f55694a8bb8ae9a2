"""``Call``: a checked call with merged terms, which is all that a backend gets. Its fields are named here alone.

The operators' schemas, the names of inputs with gradients, the parts of a call that some of its queries and keys need,
and the order of the compiled kernel's struct follow from these fields.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple, Self, TypeAlias, get_type_hints

import torch
from torch import Tensor

from .dropout import row_seeds
from .terms import Positions, PositionsLike, offsets_between, position_values

LogSums: TypeAlias = Tensor
"""(2, ...): the largest score of each row, and the log of its sum of exponentials after that is subtracted.

Beside a bias of 1e9, one float32 could not tell how many keys share a row's attention. A row that may not attend to
anything has -inf and 0. Only the second number has a gradient, which is that of both together.
"""


class Axes(NamedTuple):
    """What a tensor is.

    Args:
        axes: the names of its axes; "items" is 1 or batch, and "table_heads" 1 or heads.
        dtype: "value" for the value's, "wide" for that of scores and sums, "float" for these or another, or "number",
            "whole" or "bool".
        gradient: whether it has a gradient.
    """

    axes: str
    dtype: str
    gradient: bool = False


class Kept(NamedTuple):
    """What a forward returns and keeps for its backward.

    Args:
        output: (batch, heads, n_q, value_dim).
        whole: all that is kept besides the output, in the dtype of scores.
        sums: the part with what the backend keeps of each row, (numbers, batch, heads, n_q).
        rounded_off: the part with what rounding took from the output, (batch, heads, n_q, value_dim) in its dtype; None
            where it does not matter.
    """

    output: Tensor
    whole: Tensor
    sums: Tensor
    rounded_off: Tensor | None

    def part(self, rows: range) -> Self:
        """Return the part of some queries."""
        some, off = slice(rows.start, rows.stop), self.rounded_off
        return self._replace(
            output=self.output[:, :, some],
            sums=self.sums[..., some],
            rounded_off=None if off is None else off[:, :, some],
        )


@dataclass(frozen=True)
class Call:
    """A checked call with at most one term of each kind, in the order of the operators' arguments.

    Args:
        query, key, value: as in :func:`whereformer.attention`.
        bias, key_table, query_table, value_table: the tables of an ``OffsetBias``, ``OffsetKeys``, ``OffsetQueries``
            and ``OffsetValues``. ``bias`` and ``dense`` are in natural units, not scaled.
        key_table_factors: what ``key_table`` meets, not scaled; None for the query, scaled.
        query_table_factors: what ``query_table`` meets, not scaled; None for the key, scaled.
        query_factors, key_factors: those of ``FactorPair`` terms.
        query_levels, key_levels: those of ``DistanceDecay`` terms, of which each has a column.
        dense: the scores of a ``DenseBias``.
        query_positions, key_positions: explicit positions, without the axis of items if all have the same; None for
            affine ones.
        seed: that of dropout; None without dropout, and for torch's own attention.
        first: the offsets of the first columns of ``bias``, ``key_table``, ``query_table`` and ``value_table``.
        affine: start and stride of the queries' positions, then of the keys'; unused for explicit positions.
        min_offset, max_offset: the offsets that causality and the window allow; None without a limit that matters.
        softcap: None without a cap.
        wants_lse: whether ``LogSums`` are asked for.
    """

    query: Annotated[Tensor | None, Axes("batch heads n_q head_dim", "value", gradient=True)]
    key: Annotated[Tensor | None, Axes("batch key_heads n_k head_dim", "value", gradient=True)]
    value: Annotated[Tensor, Axes("batch key_heads n_k value_dim", "value", gradient=True)]
    bias: Annotated[Tensor | None, Axes("heads T_bias", "wide", gradient=True)]
    key_table: Annotated[Tensor | None, Axes("table_heads T_key key_width", "wide", gradient=True)]
    query_table: Annotated[Tensor | None, Axes("table_heads T_query query_width", "wide", gradient=True)]
    value_table: Annotated[Tensor | None, Axes("table_heads T_value value_dim", "wide", gradient=True)]
    key_table_factors: Annotated[Tensor | None, Axes("items heads n_q key_width", "wide", gradient=True)]
    query_table_factors: Annotated[Tensor | None, Axes("items heads n_k query_width", "wide", gradient=True)]
    query_factors: Annotated[Tensor | None, Axes("items heads n_q rank", "float", gradient=True)]
    key_factors: Annotated[Tensor | None, Axes("items heads n_k rank", "float", gradient=True)]
    query_levels: Annotated[Tensor | None, Axes("items heads n_q levels", "wide", gradient=True)]
    key_levels: Annotated[Tensor | None, Axes("items heads n_k levels", "wide", gradient=True)]
    dense: Annotated[Tensor | None, Axes("items heads n_q n_k", "float", gradient=True)]
    key_mask: Annotated[Tensor | None, Axes("batch n_k", "bool")]
    query_positions: Annotated[Tensor | None, Axes("items n_q", "number")]
    key_positions: Annotated[Tensor | None, Axes("items n_k", "number")]
    query_documents: Annotated[Tensor | None, Axes("batch n_q", "whole")]
    key_documents: Annotated[Tensor | None, Axes("batch n_k", "whole")]
    seed: Annotated[Tensor | None, Axes("", "whole")]
    n_q: int
    first: Sequence[int]
    affine: Sequence[int]
    min_offset: int | None
    max_offset: int | None
    scale: float
    softcap: float | None
    dropout_p: float
    wants_lse: bool

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in their order."""
        return tuple([getattr(self, name) for name in _NAMES])

    @property
    def n_k(self) -> int:
        return self.value.shape[2]

    @property
    def heads(self) -> int:
        """The number of query heads; those of keys and values may be fewer, but divide it."""
        return self.value.shape[1] if self.query is None else self.query.shape[1]

    @property
    def shared(self) -> int:
        """The number of query heads for each head of keys and values."""
        return 1 if self.query is None else self.query.shape[1] // max(self.value.shape[1], 1)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return torch.promote_types(self.value.dtype, torch.float32)

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """The tables over offsets, in the order of ``first``."""
        return tuple([getattr(self, name) for name in TABLES])

    @property
    def limits_offsets(self) -> bool:
        """Whether causality or the window may forbid a pair."""
        return self.min_offset is not None or self.max_offset is not None

    def positions(self) -> tuple[PositionsLike, PositionsLike]:
        """Return the positions of queries and of keys."""
        query_start, query_stride, key_start, key_stride = self.affine
        query, key = self.query_positions, self.key_positions
        return (
            Positions(query_start, query_stride, self.n_q) if query is None else query,
            Positions(key_start, key_stride, self.n_k) if key is None else key,
        )

    def offsets(self) -> Tensor:
        """Return the offsets of all pairs, (1 or batch, n_q, n_k)."""
        offsets = offsets_between(*(position_values(each, self.value.device) for each in self.positions()))
        return offsets if offsets.dim() == 3 else offsets.unsqueeze(0)

    def allowed(self) -> Tensor | None:
        """Return which pairs may attend, bool and broadcastable to (batch, heads, n_q, n_k); None if all may."""
        parts = [] if self.key_mask is None else [self.key_mask[:, None, None, :]]
        if self.limits_offsets:
            offsets = self.offsets().unsqueeze(1)
            if self.min_offset is not None:
                parts.append(offsets >= self.min_offset)
            if self.max_offset is not None:
                parts.append(offsets <= self.max_offset)
        if self.query_documents is not None and self.key_documents is not None:
            parts.append(self.query_documents[:, None, :, None] == self.key_documents[:, None, None, :])
        return functools.reduce(operator.and_, parts) if parts else None

    def dropout_seeds(self) -> Tensor | None:
        """Return the dropout seed of every row of scores, (batch, heads, n_q)."""
        return None if self.seed is None else row_seeds(self.seed, self.value.shape[0], self.heads, self.n_q)

    def part(self, rows: range, keys: range | None = None) -> Self:
        """Return the call of some queries and some keys; of all keys if None. The seed stays that of all rows."""
        changes: dict[str, Any] = {"n_q": len(rows)}
        for name in AXES:
            if (tensor := getattr(self, name)) is not None:
                changes[name] = part_of(name, tensor, rows, keys)
        start, stride, key_start, key_stride = self.affine
        if keys is not None:
            key_start += keys.start * key_stride
        return replace(self, **changes, affine=[start + rows.start * stride, stride, key_start, key_stride])

    def new_output(self) -> Tensor:
        """Allocate the output in the layout that suits the projection after it, and not as a view: autograd lets nobody
        change those of a function in place."""
        value, size = self.value, (self.value.shape[0], self.heads, self.n_q, self.value.shape[3])
        return torch.empty_permuted(size, (0, 2, 1, 3), dtype=value.dtype, device=value.device)

    def kept(self, numbers: int, output: Tensor | None = None, whole: Tensor | None = None) -> Kept:
        """Allocate the output and what is kept with so many numbers of each row; or find the parts of both."""
        value, sizes = self.value, (self.value.shape[0], self.heads, self.n_q)
        # All keys beyond a table's end share a vector, whose gradient sums what is wrong with all of their weights.
        rounds = (self.key_table is not None or self.query_table is not None) and value.dtype != self.wide
        # Kernels are compiled for parts that begin at multiples of 16 bytes. torch.Size.numel would fix the sizes of
        # compiled programs.
        rows, width = math.prod(sizes), value.shape[3]
        apart = (rows + 3) // 4 * 4
        output = self.new_output() if output is None else output
        if whole is None:
            whole = value.new_empty(numbers * apart + (rows * width + 1) // 2 * rounds, dtype=self.wide)
        whole = whole.contiguous()  # a hook on saved tensors may have brought it back with other strides
        sums = whole.as_strided((numbers, *sizes), (apart, self.heads * self.n_q, self.n_q, 1))
        if not rounds:
            return Kept(output, whole, sums, None)
        rounded_off = whole[numbers * apart :].view(value.dtype)[: rows * width].view(*sizes, width)
        return Kept(output, whole, sums, rounded_off)

    def new_lse(self) -> Tensor:
        """Allocate a ``LogSums``; it is empty if not asked for."""
        size = (2, self.value.shape[0], self.heads, self.n_q) if self.wants_lse else (0,)
        return self.value.new_empty(size, dtype=self.wide)

    def new_gradient(self, name: str) -> Tensor:
        """Allocate the gradient of an input. Compilers count on layouts that follow from sizes alone; that of queries,
        keys and values suits the projections before them."""
        tensor: Tensor = getattr(self, name)
        if name in ("query", "key", "value"):
            return torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=tensor.device)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)


TENSORS: dict[str, Axes] = {
    name: each.__metadata__[0] for name, each in Call.__annotations__.items() if hasattr(each, "__metadata__")
}
"""What each tensor is."""

_NAMES = tuple(field.name for field in fields(Call))

AXES = {name: tuple(tensor.axes.split()) for name, tensor in TENSORS.items()}
"""The tensors with the names of their axes."""

GRADIENTS = tuple(name for name, tensor in TENSORS.items() if tensor.gradient)
"""The names of the inputs that have gradients: the first fields."""

TABLES = tuple(name for name, axes in AXES.items() if any(axis.startswith("T_") for axis in axes))
"""The names of the inputs that are tables over offsets."""

TERMS = tuple(name for name in GRADIENTS if name not in ("query", "key", "value"))
"""The names of the inputs that terms are merged into."""

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    Sequence[int]: "SymInt[]",
    float: "float",
    float | None: "float?",
    bool: "bool",
}

ARGUMENTS = ", ".join(f"{_TYPES[each]} {name}" for name, each in get_type_hints(Call).items())
"""The fields as the arguments of an operator, in torch's schema language."""


class Outline:
    """All of a call but its tensors; subclasses compute calls that differ in these alone.

    Attributes:
        names: the names of its tensors, in their order.
    """

    def __init__(self, call: Call) -> None:
        self.names = [name for name in AXES if getattr(call, name) is not None]
        nothing: dict[str, Any] = dict.fromkeys(self.names)
        self.template = replace(call, **nothing)

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """Return the call that has these tensors."""
        changes: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        return replace(self.template, **changes)

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, LogSums | None]:
        """Compute the output, and ``LogSums`` if the call wants them, with gradients."""
        raise NotImplementedError


def part_of(name: str, tensor: Tensor, rows: range, keys: range | None = None) -> Tensor:
    """Return the part of an input, or of its gradient, for some queries and some keys; for all keys if None."""
    axes = AXES[name]
    for axis, some in (("n_q", rows), ("n_k", keys)):
        if some is not None and axis in axes:
            tensor = tensor.narrow(axes.index(axis) - len(axes), some.start, len(some))
    return tensor
