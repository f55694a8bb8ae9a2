"""``CallShape``: the sizes and kinds of a call, without tensors, from which a backend is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Shaped(Protocol):
    """What the choice of a backend depends on; ``Call`` and :class:`CallShape` provide it."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def has_terms(self) -> bool: ...
    @property
    def is_packed(self) -> bool: ...
    @property
    def is_ordinary(self) -> bool: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def decodes(self) -> bool: ...
    @property
    def factors(self) -> int: ...
    @property
    def offset_range(self) -> tuple[int, int] | None: ...
    @property
    def mixes_positions(self) -> bool: ...
    @property
    def query_offsets(self) -> int: ...


@dataclass(frozen=True)
class CallShape:
    """A call without its tensors, for asking :func:`whereformer.kernels.choose.choose` which backend would compute it.

    Args:
        device: the device that it would run on.
        dtype: the dtype of query, key and value.
        head_dim: width of query and key; None for attention without content scores.
        value_dim: width of a value.
        has_terms: whether there are any terms.
        is_packed: whether rows are packed.
        is_ordinary: whether there is neither a window, a soft cap nor sinks, and no log of sums is asked for.
        is_plain: whether it would run eagerly, on plain tensors and without autocast.
        decodes: whether a few queries attend to more keys, as in generation.
        factors: the total number of factors of the ``FactorPair`` terms.
        offset_range: the smallest and the largest offset; None for explicit positions.
        mixes_positions: whether tables between grids meet tables over one dimension, causality or a window.
        query_offsets: how many offsets the tables of ``OffsetQueries`` have together; 0 without any.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int | None
    value_dim: int
    has_terms: bool
    is_packed: bool = False
    is_ordinary: bool = True
    is_plain: bool = True
    decodes: bool = False
    factors: int = 0
    offset_range: tuple[int, int] | None = None
    mixes_positions: bool = False
    query_offsets: int = 0
