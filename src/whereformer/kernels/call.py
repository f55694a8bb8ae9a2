"""``Call``: a checked call with merged terms. It is all that a backend gets, and only this module names its fields.

The operators' schemas, the names of inputs with gradients, the selection of some queries and keys, and the order of the
compiled kernel's struct follow from these fields. Pair (i, j) of a query and a key at ``offset = key position - query
position`` has the score::

    score_ij = cap(scale * <query_i, key_j>) + bias[offset] + <scale * query_i, key_table[offset]>
               + <scale * key_j, query_table[offset]> + <query_factors_i, key_factors_j>
               - sum |query_levels_i - key_levels_j| + dense_ij

and row i has the output ``sum_j weight_ij * (value_j + value_table[offset])``. The weights are the softmax of the
scores of all allowed pairs. If a call has ``key_table_factors``, they replace ``scale * query`` next to ``key_table``;
``query_table_factors`` likewise replace ``scale * key`` next to ``query_table``.
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

With a bias of 1e9, one float32 could not hold how many keys share a row's attention. A row that may not attend to
anything has -inf and 0. Only the second entry has a gradient: the gradient of the log-sum-exp, the sum of both.
"""


class TensorSpec(NamedTuple):
    """The axes and the dtype of a tensor.

    A dtype is "value" for the value's dtype, "score" for the dtype of scores and sums, "float" for any floating-point
    dtype, "integer" for any integer dtype, "number" for either, or "bool".
    """

    axes: str  # their names; "items" is 1 or batch, and "table_heads" 1 or heads
    dtype: str
    gradient: bool = False  # whether the tensor has one


class ForwardState(NamedTuple):
    """The output of a forward, and all else that it saves for its backward."""

    output: Tensor  # (batch, heads, n_q, value_dim)
    buffer: Tensor  # one allocation for the other two, in the dtype of scores
    row_stats: Tensor  # (num_stats, batch, heads, n_q), the numbers that a backend saves of each row; a view of buffer
    rounding_error: Tensor | None
    """(batch, heads, n_q, value_dim), the difference that rounding to its dtype made in the output, in the same dtype.
    It is a view of ``buffer``. If None, it does not matter."""

    def select(self, rows: range) -> Self:
        """Return the state of some queries."""
        index, error = slice(rows.start, rows.stop), self.rounding_error
        return self._replace(
            output=self.output[:, :, index],
            row_stats=self.row_stats[..., index],
            rounding_error=None if error is None else error[:, :, index],
        )


@dataclass(frozen=True)
class Call:
    """A checked call with at most one term of each kind, in the order of the operators' arguments.

    Args:
        query, key, value: as in :func:`whereformer.attention`.
        bias, key_table, query_table, value_table: the tables of an ``OffsetBias``, ``OffsetKeys``, ``OffsetQueries``
            and ``OffsetValues``. ``bias`` and ``dense`` are in natural units, not scaled.
        key_table_factors: the rows that ``key_table`` is multiplied with, not scaled. If None, the scaled query is.
        query_table_factors: the rows that ``query_table`` is multiplied with, not scaled. If None, the scaled key is.
        query_factors, key_factors: the factors of ``FactorPair`` terms, side by side.
        query_levels, key_levels: the levels of ``DistanceDecay`` terms, one column per term.
        dense: the scores of a ``DenseBias``.
        query_positions, key_positions: explicit positions, without the axis of items if all items share them. If None,
            positions are affine.
        seed: the seed of dropout; None without dropout, and for torch's own attention.
        first: the offsets of the first columns of ``bias``, ``key_table``, ``query_table`` and ``value_table``.
        affine: start and stride of the queries' positions, then of the keys'; unused for explicit positions.
        min_offset, max_offset: the offsets that causality and the window allow; None if no offset exceeds the limit.
        softcap: the cap on ``scale * <query, key>``; None without a cap.
        wants_lse: whether the caller needs ``LogSums``.
    """

    query: Annotated[Tensor | None, TensorSpec("batch heads n_q head_dim", "value", gradient=True)]
    key: Annotated[Tensor | None, TensorSpec("batch key_heads n_k head_dim", "value", gradient=True)]
    value: Annotated[Tensor, TensorSpec("batch key_heads n_k value_dim", "value", gradient=True)]
    bias: Annotated[Tensor | None, TensorSpec("heads T_bias", "float", gradient=True)]
    key_table: Annotated[Tensor | None, TensorSpec("table_heads T_key key_width", "float", gradient=True)]
    query_table: Annotated[Tensor | None, TensorSpec("table_heads T_query query_width", "float", gradient=True)]
    value_table: Annotated[Tensor | None, TensorSpec("table_heads T_value value_dim", "float", gradient=True)]
    key_table_factors: Annotated[Tensor | None, TensorSpec("items heads n_q key_width", "score", gradient=True)]
    query_table_factors: Annotated[Tensor | None, TensorSpec("items heads n_k query_width", "score", gradient=True)]
    query_factors: Annotated[Tensor | None, TensorSpec("items heads n_q rank", "float", gradient=True)]
    key_factors: Annotated[Tensor | None, TensorSpec("items heads n_k rank", "float", gradient=True)]
    query_levels: Annotated[Tensor | None, TensorSpec("items heads n_q levels", "score", gradient=True)]
    key_levels: Annotated[Tensor | None, TensorSpec("items heads n_k levels", "score", gradient=True)]
    dense: Annotated[Tensor | None, TensorSpec("items heads n_q n_k", "float", gradient=True)]
    key_mask: Annotated[Tensor | None, TensorSpec("batch n_k", "bool")]
    query_positions: Annotated[Tensor | None, TensorSpec("items n_q", "number")]
    key_positions: Annotated[Tensor | None, TensorSpec("items n_k", "number")]
    query_documents: Annotated[Tensor | None, TensorSpec("batch n_q", "integer")]
    key_documents: Annotated[Tensor | None, TensorSpec("batch n_k", "integer")]
    seed: Annotated[Tensor | None, TensorSpec("", "integer")]
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
        """The number of query heads. The number of key heads divides it."""
        return self.value.shape[1] if self.query is None else self.query.shape[1]

    @property
    def group_size(self) -> int:
        """The number of query heads that share one head of keys and values."""
        return 1 if self.query is None else self.query.shape[1] // max(self.value.shape[1], 1)

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return self.value.dtype if self.value.dtype.itemsize >= 4 else torch.float32

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
        offsets = offsets_between(*(position_values(positions, self.value.device) for positions in self.positions()))
        return offsets if offsets.dim() == 3 else offsets.unsqueeze(0)

    def allowed_pairs(self) -> Tensor | None:
        """Return which pairs may attend, bool and broadcastable to (batch, heads, n_q, n_k); None if all may."""
        masks = [] if self.key_mask is None else [self.key_mask[:, None, None, :]]
        if self.limits_offsets:
            offsets = self.offsets().unsqueeze(1)
            if self.min_offset is not None:
                masks.append(offsets >= self.min_offset)
            if self.max_offset is not None:
                masks.append(offsets <= self.max_offset)
        if self.query_documents is not None and self.key_documents is not None:
            masks.append(self.query_documents[:, None, :, None] == self.key_documents[:, None, None, :])
        return functools.reduce(operator.and_, masks) if masks else None

    def dropout_seeds(self) -> Tensor | None:
        """Return the dropout seed of every row of scores, (batch, heads, n_q)."""
        return None if self.seed is None else row_seeds(self.seed, self.value.shape[0], self.heads, self.n_q)

    def select(self, rows: range, keys: range | None = None) -> Self:
        """Return the call of some queries and some keys (None: all keys). Its seed is still the seed of all rows."""
        changes: dict[str, Any] = {"n_q": len(rows)}
        for name in AXES:
            if (tensor := getattr(self, name)) is not None:
                changes[name] = select_input(name, tensor, rows, keys)
        start, stride, key_start, key_stride = self.affine
        if keys is not None:
            key_start += keys.start * key_stride
        return replace(self, **changes, affine=[start + rows.start * stride, stride, key_start, key_stride])

    def widen(self, names: Sequence[str]) -> Self:
        """Return the call with these inputs in the dtype of scores."""
        inputs: dict[str, Any] = {name: getattr(self, name) for name in names}
        changes = {name: x.to(self.score_dtype) for name, x in inputs.items() if x is not None}
        return self if all(changes[name] is inputs[name] for name in changes) else replace(self, **changes)

    def new_output(self) -> Tensor:
        """Allocate the output in the layout that suits the projection after it. It is not a view, because autograd
        forbids to change a view that a function returned in place."""
        value, size = self.value, (self.value.shape[0], self.heads, self.n_q, self.value.shape[3])
        return torch.empty_permuted(size, (0, 2, 1, 3), dtype=value.dtype, device=value.device)

    def forward_state(self, num_stats: int, output: Tensor | None = None, buffer: Tensor | None = None) -> ForwardState:
        """Allocate a state with ``num_stats`` numbers per row, or find its parts in an output and a buffer."""
        value, sizes = self.value, (self.value.shape[0], self.heads, self.n_q)
        # The rounded output changes gradients of all weights of a row. A vector that many keys share sums these errors.
        rounds = (self.key_table is not None or self.query_table is not None) and value.dtype != self.score_dtype
        # Kernels are compiled for parts that begin at multiples of 16 bytes. torch.Size.numel would fix the sizes of
        # compiled programs.
        rows, width = math.prod(sizes), value.shape[3]
        spacing = (rows + 3) // 4 * 4
        output = self.new_output() if output is None else output
        if buffer is None:
            size = num_stats * spacing + (rows * width + 1) // 2 * rounds
            buffer = value.new_empty(size, dtype=self.score_dtype)
        buffer = buffer.contiguous()  # a hook on saved tensors may have brought it back with other strides
        row_stats = buffer.as_strided((num_stats, *sizes), (spacing, self.heads * self.n_q, self.n_q, 1))
        if not rounds:
            return ForwardState(output, buffer, row_stats, None)
        rounding_error = buffer[num_stats * spacing :].view(value.dtype)[: rows * width].view(*sizes, width)
        return ForwardState(output, buffer, row_stats, rounding_error)

    def new_lse(self) -> Tensor:
        """Allocate a ``LogSums``; it is empty if the caller does not need it."""
        size = (2, self.value.shape[0], self.heads, self.n_q) if self.wants_lse else (0,)
        return self.value.new_empty(size, dtype=self.score_dtype)

    def new_gradient(self, name: str) -> Tensor:
        """Allocate the gradient of an input. Compilers need layouts that follow only from sizes. The layout for
        queries, keys and values suits the projections before them."""
        tensor: Tensor = getattr(self, name)
        if name in ("query", "key", "value"):
            return torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=tensor.device)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)


TENSOR_SPECS: dict[str, TensorSpec] = {
    name: kind.__metadata__[0] for name, kind in Call.__annotations__.items() if hasattr(kind, "__metadata__")
}
"""The tensors with their axes and dtypes."""

_NAMES = tuple(field.name for field in fields(Call))

AXES = {name: tuple(tensor.axes.split()) for name, tensor in TENSOR_SPECS.items()}
"""The tensors with the names of their axes."""

GRADIENTS = tuple(name for name, tensor in TENSOR_SPECS.items() if tensor.gradient)
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

ARGUMENTS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Call).items())
"""The fields as the arguments of an operator, in torch's schema language."""


class CallTemplate:
    """A call without its tensors. Subclasses compute calls that differ only in their tensors.

    Attributes:
        names: the names of the call's tensors, in their order.
    """

    def __init__(self, call: Call) -> None:
        self.names = [name for name in AXES if getattr(call, name) is not None]
        no_tensors: dict[str, Any] = dict.fromkeys(self.names)
        self.template = replace(call, **no_tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """Return the call that has these tensors."""
        changes: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        return replace(self.template, **changes)

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, LogSums | None]:
        """Compute the output, and ``LogSums`` if the call wants them, with gradients."""
        raise NotImplementedError


def select_input(name: str, tensor: Tensor, rows: range, keys: range | None = None) -> Tensor:
    """Return the rows of an input, or of its gradient, for some queries and some keys (None: all keys)."""
    axes = AXES[name]
    for axis, indices in (("n_q", rows), ("n_k", keys)):
        if indices is not None and axis in axes:
            tensor = tensor.narrow(axes.index(axis) - len(axes), indices.start, len(indices))
    return tensor
