"""Terms and positions: the data types that position methods and attention backends share.

A *term* describes what position adds to attention, without an (n_q, n_k) matrix wherever a smaller description exists.
Throughout, ``offset = key position - query position``; a positive offset is a key to the right.

Numbers must be finite, except that a bias may be ``-inf``: then the query does not attend to the key. A row that may
not attend to anything gives zeros, with gradients of zero. A bias of ``+inf`` or NaN makes the rows that read it NaN.
This is not checked, because the check would cost as much as some of the work.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
from torch import Tensor

from .tracing import can_look

if TYPE_CHECKING:
    from jaxtyping import Float, Integer


def as_int(number: Any) -> int | None:
    """Convert a whole number, such as NumPy's, to Python's int; None for anything else, True and False included.

    Tensors give None too, because reading them may stall a GPU.
    """
    if isinstance(number, int | torch.SymInt) and not isinstance(number, bool):
        return number  # type: ignore[return-value]
    try:
        return None if isinstance(number, Tensor | bool) else operator.index(number)
    except TypeError:
        return None


@dataclass(frozen=True)
class Positions:
    """The affine positions ``start + stride * index`` for ``index`` in ``0 .. length - 1``.

    Queries after a key-value cache have ``start > 0``; a pooled (funnel) sequence has ``stride > 1``.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if ``length`` is negative or ``stride`` is not positive.
    """

    start: int
    stride: int
    length: int

    def __post_init__(self) -> None:
        for name in ("start", "stride", "length"):
            number = getattr(self, name)
            if type(number) is int:
                continue
            whole = as_int(number)
            if whole is None and torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
                raise TypeError("torch.jit.trace would fix the lengths; use torch.export.export or torch.onnx.export")
            if whole is None:
                raise TypeError(f"Positions: {name} must be an int, got {number!r}; others go in a tensor")
            object.__setattr__(self, name, whole)
        if self.length < 0:
            raise ValueError(f"Positions: length must be at least 0, got {self.length}")
        if self.stride < 1:
            raise ValueError(f"Positions: stride must be at least 1, got {self.stride}")

    @property
    def last(self) -> int:
        """The largest position; ``start - stride`` when the length is 0."""
        return self.start + self.stride * (self.length - 1)

    def values(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions as int64 of shape (length,)."""
        if self.stride == 1:
            return torch.arange(self.start, self.start + self.length, device=device)
        return torch.arange(self.length, device=device) * self.stride + self.start


@dataclass(frozen=True)
class GridPositions:
    """The places of an image's tokens: a grid, row by row, after ``prefix`` tokens that have no place on it.

    Args:
        rows, columns: the sides of the grid.
        prefix: the tokens before the grid, such as [CLS] and registers.
        start: the row and the column of the grid's first cell.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if a side is below 1, or ``prefix`` is negative.
    """

    rows: int
    columns: int
    prefix: int = 0
    start: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("columns", 1), ("prefix", 0)):
            number = as_int(getattr(self, name))
            if number is None:
                raise TypeError(f"GridPositions: {name} must be an int, got {getattr(self, name)!r}")
            if number < least:
                raise ValueError(f"GridPositions: {name} must be at least {least}, got {number}")
            object.__setattr__(self, name, number)
        object.__setattr__(self, "start", as_pair("GridPositions: start", self.start))

    @property
    def length(self) -> int:
        """The number of tokens, those of the prefix included."""
        return self.prefix + self.rows * self.columns

    def __str__(self) -> str:
        return f"a prefix of {self.prefix} and {self.rows} x {self.columns} cells, which are {self.length} tokens"


def as_pair(name: str, pair: Any) -> tuple[int, int]:
    """Return a row and a column as Python's ints.

    Raises:
        TypeError: if it is not two whole numbers.
    """
    given = pair if isinstance(pair, tuple | list) else ()
    numbers = [as_int(number) for number in given]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise TypeError(f"{name} must be a row and a column, two ints, got {pair!r}")
    return numbers[0], numbers[1]


PositionsLike: TypeAlias = Positions | Tensor
"""Affine positions, or explicit ones as a tensor of shape (n,) or (batch, n).

Whole positions must lie between -(2 ** 62) and 2 ** 62, so that every offset is an int64; beyond, offsets wrap around.
This is not checked, because the check would cost as much as some of the work. Methods that compute with numbers, such
as angles or kernels, do so in float32, which tells whole numbers apart up to 2 ** 24.
"""


def position_values(positions: PositionsLike, device: torch.device | str | None = None) -> Tensor:
    """Return positions as a tensor of shape (n,) or (batch, n) on ``device``; whole ones as int64.

    Narrower integers could overflow in differences, and torch does not take them as indices.
    """
    if isinstance(positions, Positions):
        return positions.values(device)
    return positions.to(device) if positions.is_floating_point() else positions.to(device, torch.int64)


def offset_range(query_positions: PositionsLike, key_positions: PositionsLike) -> tuple[int, int] | None:
    """Return the smallest and the largest offset between affine positions; None if only the data can tell.

    If there are no pairs, this is (0, 0).
    """
    if not (isinstance(query_positions, Positions) and isinstance(key_positions, Positions)):
        return None
    if query_positions.length == 0 or key_positions.length == 0:
        return 0, 0
    return key_positions.start - query_positions.last, key_positions.last - query_positions.start


def offset_step(query_positions: Positions, key_positions: Positions) -> int:
    """Return the largest number that divides all offsets between affine positions; 0 if the only offset is 0."""
    steps = [positions.stride for positions in (query_positions, key_positions) if positions.length > 1]
    return math.gcd(key_positions.start - query_positions.start, *steps)


def offsets_between(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return the offsets of all pairs, (n_q, n_k) or (batch, n_q, n_k), from position values (n,) or (batch, n)."""
    return key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class _OffsetTable:
    """The common part of terms with a table over offsets."""

    table: Float[Tensor, "#heads _offsets *_width"]
    first: int
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("first", "step"):
            number = getattr(self, name)
            # ``attention`` refuses other types, together with everything else that is wrong.
            if type(number) is not int and (whole := as_int(number)) is not None:
                object.__setattr__(self, name, whole)

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        """Raise a TypeError or ValueError unless the term fits a call of these sizes."""
        name = type(self).__name__
        check_shape(f"{name}.table", self.table, self._wanted(heads, head_dim))
        if self.table.shape[1] == 0:
            raise ValueError(f"{name}.table: needs at least one offset, got none")
        if isinstance(self.first, bool) or not isinstance(self.first, int | torch.SymInt):
            raise TypeError(f"{name}.first: expected an int, got {type(self.first).__name__}")
        if isinstance(self.step, bool) or not isinstance(self.step, int | torch.SymInt) or self.step < 1:
            raise ValueError(f"{name}.step: expected an int of at least 1, got {self.step!r}")

    def _wanted(self, heads: int, head_dim: int) -> _Wanted:
        """Return the shape that the table must have."""
        return (("heads", (1, heads)), ("T", None), ("head_dim", (head_dim,)))


@dataclass(frozen=True, eq=False)
class OffsetBias(_OffsetTable):
    """``score_ij += table[h, clamp(offset, first, first + T - 1) - first]``.

    Args:
        table: (heads, T), one number per head and offset. With ``-inf``, queries do not attend to keys at the offset.
            Offsets beyond the ends read the end values.
        first: the offset of the table's first column.
        step: the offset from one column to the next. It can exceed 1 if only multiples of it occur, as between pooled
            sequences.
    """

    def _wanted(self, heads: int, head_dim: int) -> _Wanted:
        return (("heads", (heads,)), ("T", None))


@dataclass(frozen=True, eq=False)
class OffsetBias2d:
    """``score_ij += table[h, row offset, column offset]`` between the cells of two grids.

    Each offset is the key's row or column minus the query's. Offsets beyond the table's ends read the end values. The
    call's own positions play no part in this.

    Args:
        table: (heads, row offsets, column offsets). With ``-inf``, queries do not attend to keys at these offsets.
        first: the row offset and the column offset of ``table[:, 0, 0]``.
        queries: where the queries are; its length is n_q.
        keys: where the keys are; its length is n_k.
        prefix: (heads, 3), what is added to pairs of a prefix's query and a cell's key, of a cell's query and a
            prefix's key, and of a prefix's query and a prefix's key; None adds nothing.
    """

    table: Float[Tensor, "heads _rows _columns"]
    first: tuple[int, int]
    queries: GridPositions
    keys: GridPositions
    prefix: Float[Tensor, "heads 3"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", as_pair("OffsetBias2d: first", self.first))

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        """Raise a TypeError or ValueError unless the term fits a call of these sizes."""
        axes = (("heads", (heads,)), ("row offsets", None), ("column offsets", None))
        check_shape("OffsetBias2d.table", self.table, axes)
        if self.table.shape[1] == 0 or self.table.shape[2] == 0:
            raise ValueError(f"OffsetBias2d.table: needs at least one offset, got {tuple(self.table.shape)}")
        if self.prefix is not None:
            check_shape("OffsetBias2d.prefix", self.prefix, (("heads", (heads,)), ("kinds of pairs", (3,))))
        for name, grid, length in (("queries", self.queries, n_q), ("keys", self.keys, n_k)):
            if not isinstance(grid, GridPositions):
                raise TypeError(f"OffsetBias2d.{name}: expected GridPositions, got {type(grid).__name__}")
            if grid.length != length:
                raise ValueError(f"OffsetBias2d.{name}: expected {length} tokens, got {grid}")


@dataclass(frozen=True, eq=False)
class OffsetKeys(_OffsetTable):
    """``score_ij += scale * <query_i, table[h, clamped offset]>`` (Shaw et al. 2018, eq. 4: the a^K).

    With factors it is ``score_ij += <query_factors_i, table[h, clamped offset]>``, which is not scaled and needs no
    query. Factors of one number are a gate: a number per query times a number per offset.

    Args:
        table: (heads or 1, T, head_dim), a vector per offset; (heads or 1, T, r) beside factors.
        first: the offset of the table's first row.
        step: the offset from one row to the next. It is more than 1 where only multiples of it occur, as between
            pooled sequences.
        query_factors: (1 or batch, heads, n_q, r) with any r of at least 1; None takes the queries.
    """

    query_factors: Float[Tensor, "#batch heads n_q _width"] | None = None

    @property
    def factors(self) -> Tensor | None:
        """The rows that the table's vectors are multiplied with, if they are not the queries."""
        return self.query_factors

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        name = "OffsetKeys.query_factors"
        width = _width_of(name, self.query_factors, batch, heads, ("n_q", n_q), head_dim)
        super().check(batch, heads, n_q, n_k, width)

    def _wanted(self, heads: int, head_dim: int) -> _Wanted:
        return _vectors(heads, head_dim, self.query_factors)


@dataclass(frozen=True, eq=False)
class OffsetQueries(_OffsetTable):
    """``score_ij += scale * <key_j, table[h, clamped offset]>``, the mirror of :class:`OffsetKeys`.

    This is the position-to-content term of DeBERTa (He et al. 2021, eq. 4). With factors it is ``score_ij +=
    <key_factors_j, table[h, clamped offset]>``, which is not scaled and needs no key.

    Args:
        table: (heads or 1, T, head_dim), a vector per offset; (heads or 1, T, r) beside factors. Heads are those of
            queries, also where several share the keys of one.
        first: the offset of the table's first row; as everywhere, offsets are key - query.
        step: the offset from one row to the next. It is more than 1 where only multiples of it occur, as between
            pooled sequences.
        key_factors: (1 or batch, heads, n_k, r) with any r of at least 1, and as many heads as queries have; None takes
            the keys.
    """

    key_factors: Float[Tensor, "#batch heads n_k _width"] | None = None

    @property
    def factors(self) -> Tensor | None:
        """The rows that the table's vectors are multiplied with, if they are not the keys."""
        return self.key_factors

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        name = "OffsetQueries.key_factors"
        width = _width_of(name, self.key_factors, batch, heads, ("n_k", n_k), head_dim)
        super().check(batch, heads, n_q, n_k, width)

    def _wanted(self, heads: int, head_dim: int) -> _Wanted:
        return _vectors(heads, head_dim, self.key_factors)


def _width_of(name: str, factors: Any, batch: int, heads: int, axis: tuple[str, int], head_dim: int) -> int:
    """Return the width of vectors that meet factors, after checking these; without factors that of a head."""
    if factors is None:
        return head_dim
    axes = (("batch", (1, batch)), ("heads", (heads,)), (axis[0], (axis[1],)), ("r", None))
    check_shape(name, factors, axes)
    if factors.shape[3] == 0:
        raise ValueError(f"{name}: needs at least one number, got shape {tuple(factors.shape)}")
    width: int = factors.shape[3]
    return width


def _vectors(heads: int, width: int, factors: Tensor | None) -> _Wanted:
    return (("heads", (1, heads)), ("T", None), ("head_dim" if factors is None else "r", (width,)))


@dataclass(frozen=True, eq=False)
class OffsetValues(_OffsetTable):
    """``out_i += sum_j weight_ij * table[h, clamped offset]`` (Shaw et al. 2018, eq. 3: the a^V).

    Args:
        table: (heads or 1, T, value's head_dim), a vector per offset.
        first: the offset of the table's first row.
        step: the offset from one row to the next. It is more than 1 where only multiples of it occur, as between
            pooled sequences.
    """


@dataclass(frozen=True, eq=False)
class FactorPair:
    """``score_ij += <query_factors_i, key_factors_j>``, for low-rank positional scores; not scaled.

    Args:
        query_factors: (1 or batch, heads, n_q, r).
        key_factors: (1 or batch, heads, n_k, r).
    """

    query_factors: Float[Tensor, "#batch heads n_q _rank"]
    key_factors: Float[Tensor, "#batch heads n_k _rank"]

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        rows = (("batch", (1, batch)), ("heads", (heads,)))
        check_shape("FactorPair.query_factors", self.query_factors, (*rows, ("n_q", (n_q,)), ("r", None)))
        rank = self.query_factors.shape[3]
        check_shape("FactorPair.key_factors", self.key_factors, (*rows, ("n_k", (n_k,)), ("r", (rank,))))


@dataclass(frozen=True, eq=False)
class DistanceDecay:
    """``score_ij -= |query_levels_i - key_levels_j|``: scores fall with the distance between two numbers.

    Levels are sums of what the tokens before say, such as the forget gates of the Forgetting Transformer (Lin et al.
    2025, arXiv 2503.02130): ``c_i = sum of log sigmoid(f_t) for t <= i``. There it is ``c_i - c_j`` for earlier keys,
    which is the same. With levels of ``slope * i`` it is ALiBi. Levels are numbers like any others: the call's
    positions play no part in this.

    Args:
        query_levels: (1 or batch, heads, n_q), not scaled. Differences are computed in float32 or wider.
        key_levels: (1 or batch, heads, n_k), with as many heads as queries have.
    """

    query_levels: Float[Tensor, "#batch heads n_q"]
    key_levels: Float[Tensor, "#batch heads n_k"]

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        """Raise a TypeError or ValueError unless the term fits a call of these sizes."""
        rows = (("batch", (1, batch)), ("heads", (heads,)))
        check_shape("DistanceDecay.query_levels", self.query_levels, (*rows, ("n_q", (n_q,))))
        check_shape("DistanceDecay.key_levels", self.key_levels, (*rows, ("n_k", (n_k,))))


@dataclass(frozen=True, eq=False)
class DenseBias:
    """``score_ij += scores[b, h, i, j]``, for scores that really have one number per query and key.

    Args:
        scores: (1 or batch, 1 or heads, n_q, n_k), numbers; ``-inf`` means that the query does not attend to the key.
            The first axis may also divide the batch: then so many neighboring items share a matrix, without a copy for
            each. This is how the rows of an alignment share the bias of its pairs (Evoformer).
    """

    scores: Float[Tensor, "_batch #heads n_q n_k"]

    def check(self, batch: int, heads: int, n_q: int, n_k: int, head_dim: int) -> None:
        items = self.scores.shape[0] if isinstance(self.scores, Tensor) and self.scores.dim() == 4 else 0
        shared = items != 0 and batch % items == 0
        first = ("batch", (items,)) if shared else ("batch or a divisor of it,", (1, batch))
        wanted = (first, ("heads", (1, heads)), ("n_q", (n_q,)), ("n_k", (n_k,)))
        check_shape("DenseBias.scores", self.scores, wanted)


def index_bias(
    table: Float[Tensor, "heads _kinds"], index: Integer[Tensor, "n_q n_k"] | Integer[Tensor, "batch n_q n_k"]
) -> DenseBias:
    """``score_ij += table[h, index_ij]``: a number for every kind of pair, where no offset tells the kind.

    The kinds may be distances in a graph (Graphormer), places of words on a page (LayoutLMv3), or cells of a volume.
    For offsets, an :class:`OffsetBias` needs no index of all pairs.

    Args:
        table: (heads, T), a number per head and kind of pair.
        index: (n_q, n_k) or (batch, n_q, n_k), whole numbers from 0 to T - 1.

    Raises:
        TypeError, ValueError: for other tensors. Indices are checked on the CPU only; elsewhere, torch reports wrong
            ones.
    """
    check_shape("index_bias: table", table, (("heads", None), ("T", None)))
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
        got = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index_bias: index: expected a tensor of whole numbers, got {got}")
    if index.dim() not in (2, 3):
        raise ValueError(f"index_bias: index: expected (n_q, n_k) or (batch, n_q, n_k), got {tuple(index.shape)}")
    if can_look(index) and index.numel() and (int(index.min()) < 0 or int(index.max()) >= table.shape[1]):
        raise ValueError(
            f"index_bias: index: expected numbers from 0 to {table.shape[1] - 1}, "
            f"got {int(index.min())} to {int(index.max())}"
        )
    # Indexing by ``table[:, index]`` computes the same, with a gradient that takes many times as long.
    scores = table.index_select(1, index.flatten().long()).unflatten(1, index.shape)
    return DenseBias(scores.unsqueeze(0) if index.dim() == 2 else scores.transpose(0, 1))


Term: TypeAlias = (
    OffsetBias | OffsetBias2d | OffsetKeys | OffsetQueries | OffsetValues | FactorPair | DistanceDecay | DenseBias
)

TABLES = (OffsetBias, OffsetKeys, OffsetQueries, OffsetValues)
"""The terms with a table over offsets between the call's own positions."""

# This lets ``torch.load`` with its default ``weights_only=True`` read files that contain them.
torch.serialization.add_safe_globals([Positions, GridPositions, *get_args(Term)])


_Wanted: TypeAlias = tuple[tuple[str, tuple[int, ...] | None], ...]
"""The axes of a tensor, and the sizes that each may have."""


def check_shape(name: str, tensor: Tensor, wanted: _Wanted) -> None:
    """Raise unless ``tensor`` is floating point and each axis has one of the wanted sizes (None: any)."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {got}")
    # "size in sizes" would not compile with symbolic sizes; there are one or two of them.
    fits = tensor.dim() == len(wanted) and all(
        sizes is None or size == sizes[0] or size == sizes[-1]
        for size, (_, sizes) in zip(tensor.shape, wanted, strict=True)
    )
    if not fits:
        text = ", ".join(
            axis if sizes is None else f"{axis} {' or '.join(str(size) for size in dict.fromkeys(sizes))}"
            for axis, sizes in wanted
        )
        raise ValueError(f"{name}: expected shape ({text}), got {tuple(tensor.shape)}")
