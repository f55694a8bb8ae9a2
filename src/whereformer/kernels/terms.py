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
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .tracing import are_static, is_known_true

if TYPE_CHECKING:
    from jaxtyping import Float


def as_int(number: Any) -> int | None:
    """Convert an integer, such as NumPy's, to Python's int; return None for anything else, also for True and False.

    Tensors give None too, because reading them may stall a GPU.
    """
    if isinstance(number, int | torch.SymInt) and not isinstance(number, bool):
        return number  # type: ignore[return-value]
    try:
        return None if isinstance(number, Tensor | bool) else operator.index(number)
    except TypeError:
        return None


def _make_ints(record: object, *names: str) -> None:
    """Convert fields of a frozen dataclass to Python's int."""
    for name in names:
        if type(number := getattr(record, name)) is not int:
            if (integer := as_int(number)) is None:
                raise TypeError(f"{type(record).__name__}.{name}: expected an int, got {number!r}")
            object.__setattr__(record, name, integer)


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
        _make_ints(self, "start", "stride", "length")
        if self.length < 0:
            raise ValueError(f"Positions.length: must be at least 0, got {self.length}")
        if self.stride < 1:
            raise ValueError(f"Positions.stride: must be at least 1, got {self.stride}")

    @property
    def last(self) -> int:
        """The largest position; ``start - stride`` when the length is 0."""
        return self.start + self.stride * (self.length - 1)

    def values(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions as int64 of shape (length,)."""
        if self.stride == 1:
            return torch.arange(self.start, self.start + self.length, device=device)
        return torch.arange(self.length, device=device) * self.stride + self.start


PositionsLike: TypeAlias = Positions | Tensor
"""Affine positions, or explicit ones as a tensor of shape (n,) or (batch, n).

Integer positions must lie between -(2 ** 62) and 2 ** 62, so that every offset is an int64; beyond, offsets wrap
around. This is not checked, because the check would cost as much as some of the work. Methods that compute with
numbers, such as angles or kernels, do so in float32, which represents integers exactly up to 2 ** 24.
"""


def position_values(positions: PositionsLike, device: torch.device | str | None = None) -> Tensor:
    """Return positions as a tensor of shape (n,) or (batch, n) on ``device``; integers as int64.

    Narrower integers could overflow in differences, and torch does not take them as indices.
    """
    if isinstance(positions, Positions):
        return positions.values(device)
    return positions.to(device) if positions.is_floating_point() else positions.to(device, torch.int64)


def default_positions(n_q: int, n_k: int) -> tuple[Positions, Positions]:
    """Return the default positions of queries and keys: the last query has the position of the last key."""
    return Positions(n_k - n_q, 1, n_q), Positions(0, 1, n_k)


def offset_range(queries: PositionsLike, keys: PositionsLike) -> tuple[int, int] | None:
    """Return the smallest and the largest offset between affine positions; None for explicit ones."""
    if not (isinstance(queries, Positions) and isinstance(keys, Positions)):
        return None
    if queries.length == 0 or keys.length == 0:
        return 0, 0  # without pairs
    return keys.start - queries.last, keys.last - queries.start


def allowed_span(
    queries: PositionsLike, keys: PositionsLike, low: int | None, high: int | None
) -> tuple[int, int] | None:
    """Return the smallest and the largest offset that occurs and is allowed; None if explicit positions decide it."""
    span = offset_range(queries, keys)
    if span is None or not are_static(*span):
        # A program that is exported for any length does not shorten its tables.
        return None
    return span[0] if low is None else max(span[0], low), span[1] if high is None else min(span[1], high)


def offset_step(query_positions: Positions, key_positions: Positions) -> int:
    """Return the largest number that divides all offsets between affine positions; 0 if the only offset is 0."""
    steps = [positions.stride for positions in (query_positions, key_positions) if positions.length > 1]
    return math.gcd(key_positions.start - query_positions.start, *steps)


def causal_diagonal(queries: PositionsLike, keys: PositionsLike) -> int | None:
    """Return the d such that causality allows query i exactly the keys j <= i + d; None if no number does."""
    if not (isinstance(queries, Positions) and isinstance(keys, Positions)):
        return None
    stride = keys.stride
    if queries.stride != stride:
        if is_known_true(keys.length == 1):
            stride = queries.stride
        elif not is_known_true(queries.length == 1):
            return None
    return (queries.start - keys.start) // stride


def offsets_between(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return the offsets of all pairs, (n_q, n_k) or (batch, n_q, n_k), from position values (n,) or (batch, n)."""
    return key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class _OffsetTable:
    """The common part of terms with a table over offsets; its arguments are explained in :class:`OffsetBias`.

    As in all terms, ``axes`` are the axes of each tensor: "items" is 1 or batch, "any_heads" is 1 or heads, "width" is
    the factors' r, or head_dim without factors, and all others have one size.
    """

    axes: ClassVar = {"table": "any_heads T width"}

    table: Float[Tensor, "#heads _offsets *_width"]
    first: int
    step: int = 1

    def __post_init__(self) -> None:
        _make_ints(self, "first", "step")
        if self.step < 1:
            raise ValueError(f"{type(self).__name__}.step: expected an int of at least 1, got {self.step}")


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

    axes: ClassVar = {"table": "heads T"}


@dataclass(frozen=True, eq=False)
class OffsetKeys(_OffsetTable):
    """``score_ij += scale * <query_i, table[h, clamped offset]>`` (Shaw et al. 2018, eq. 4: the a^K).

    With factors it is ``score_ij += <query_factors_i, table[h, clamped offset]>``, which is not scaled and needs no
    query. Factors of one number are a gate: a number per query times a number per offset.

    Args:
        table: (heads or 1, T, head_dim), a vector per offset; with factors (heads or 1, T, r).
        first, step: as in :class:`OffsetBias`, of the table's rows.
        query_factors: (1 or batch, heads, n_q, r) with any r of at least 1. If None, the queries.
    """

    axes: ClassVar = {"query_factors": "items heads n_q r", **_OffsetTable.axes}

    query_factors: Float[Tensor, "#batch heads n_q _width"] | None = None


@dataclass(frozen=True, eq=False)
class OffsetQueries(_OffsetTable):
    """``score_ij += scale * <key_j, table[h, clamped offset]>``, the mirror of :class:`OffsetKeys`.

    This is the position-to-content term of DeBERTa (He et al. 2021, eq. 4). With factors it is ``score_ij +=
    <key_factors_j, table[h, clamped offset]>``, which is not scaled and needs no key.

    Args:
        table: (heads or 1, T, head_dim), a vector per offset; with factors (heads or 1, T, r). There is one per query
            head, also where several query heads share the keys of one.
        first, step: as in :class:`OffsetBias`, of the table's rows.
        key_factors: (1 or batch, heads, n_k, r) with any r of at least 1, and one per query head. If None, the keys.
    """

    axes: ClassVar = {"key_factors": "items heads n_k r", **_OffsetTable.axes}

    key_factors: Float[Tensor, "#batch heads n_k _width"] | None = None


@dataclass(frozen=True, eq=False)
class OffsetValues(_OffsetTable):
    """``out_i += sum_j weight_ij * table[h, clamped offset]`` (Shaw et al. 2018, eq. 3: the a^V).

    Args:
        table: (heads or 1, T, value's head_dim), a vector per offset.
        first, step: as in :class:`OffsetBias`, of the table's rows.
    """


@dataclass(frozen=True, eq=False)
class FactorPair:
    """``score_ij += <query_factors_i, key_factors_j>``, for low-rank positional scores; not scaled.

    Args:
        query_factors: (1 or batch, heads, n_q, r) with any r of at least 1.
        key_factors: (1 or batch, heads, n_k, r).
    """

    axes: ClassVar = {"query_factors": "items heads n_q r", "key_factors": "items heads n_k r"}

    query_factors: Float[Tensor, "#batch heads n_q _rank"]
    key_factors: Float[Tensor, "#batch heads n_k _rank"]


@dataclass(frozen=True, eq=False)
class DistanceDecay:
    """``score_ij -= |query_levels_i - key_levels_j|``: scores fall with the distance between two numbers.

    A level can be a sum over earlier tokens, such as the sum of forget gates in the Forgetting Transformer (Lin et al.
    2025, arXiv 2503.02130): ``c_i = sum of log sigmoid(f_t) for t <= i``. The paper has ``c_i - c_j`` for earlier keys,
    which is the same number. With levels of ``slope * i`` this is ALiBi. The call's positions do not affect levels.

    Args:
        query_levels: (1 or batch, heads, n_q), not scaled. Differences are computed in float32 or wider.
        key_levels: (1 or batch, heads, n_k), one row per query head.
    """

    axes: ClassVar = {"query_levels": "items heads n_q", "key_levels": "items heads n_k"}

    query_levels: Float[Tensor, "#batch heads n_q"]
    key_levels: Float[Tensor, "#batch heads n_k"]


@dataclass(frozen=True, eq=False)
class DenseBias:
    """``score_ij += scores[b, h, i, j]``, for scores without a smaller description than one number per pair.

    Args:
        scores: (1 or batch, 1 or heads, n_q, n_k), numbers; ``-inf`` means that the query does not attend to the key.
    """

    axes: ClassVar = {"scores": "items any_heads n_q n_k"}

    scores: Float[Tensor, "#batch #heads n_q n_k"]


Term: TypeAlias = OffsetBias | OffsetKeys | OffsetQueries | OffsetValues | FactorPair | DistanceDecay | DenseBias

TABLES = (OffsetBias, OffsetKeys, OffsetQueries, OffsetValues)
"""The terms with a table over offsets."""
