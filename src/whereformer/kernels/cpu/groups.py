"""``Groups``: batch items and heads that are computed together, and their products with tables of vectors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .matmul import add_product, product
from .tables import Vectors
from .tiles import chunks
from .workspace import Workspace


class Groups:
    """Some heads of one item, or all heads of several. Tensors are (groups, rows, dim), a group per item and head."""

    def __init__(self, batch: range, heads: range, workspace: Workspace) -> None:
        self.batch, self.heads, self.workspace = batch, heads, workspace
        self.groups = len(batch) * len(heads)
        self._items, self._heads = slice(batch.start, batch.stop), slice(heads.start, heads.stop)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return these items and heads of (1 or batch, heads, ...), as a view."""
        return tensor[self._items if tensor.shape[0] > 1 else slice(None), self._heads]

    def by_head(self, tensor: Tensor) -> Tensor:
        """View (groups, ...) as (batch, heads, ...)."""
        return tensor.unflatten(0, (len(self.batch), len(self.heads)))

    def per_offset(self, rows: Tensor, table: Vectors) -> Tensor:
        """Multiply (groups, rows, dim) with a table's vectors: (groups, rows, T)."""
        return self._times(rows, self.vectors_of(table.vectors).mT)

    def from_offsets(self, per_offset: Tensor, table: Vectors) -> Tensor:
        """Sum a table's vectors with the weights (groups, rows, T): (groups, rows, dim)."""
        return self._times(per_offset, self.vectors_of(table.vectors))

    def _times(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Multiply (groups, rows, a) by (heads or 1, a, b); vectors that heads share take one product."""
        if len(vectors) == 1:
            return product(rows.flatten(0, 1), vectors[0]).unflatten(0, rows.shape[:2])
        return product(self.by_head(rows), vectors).flatten(0, 1)

    def collect_vectors(self, table: Vectors, per_offset: Tensor, rows: Tensor) -> None:
        """Add the products of (groups, rows, T) and (groups, rows, dim) to the table's gradient."""
        sums = self.vectors_of(table.sums)
        if len(table.sums) == 1:
            add_product(sums, per_offset.flatten(0, 1).mT.unsqueeze(0), rows.flatten(0, 1).unsqueeze(0), self.workspace)
        else:
            for factors in zip(self.by_head(per_offset).mT, self.by_head(rows), strict=True):
                add_product(sums, *factors, self.workspace)

    def vectors_of(self, vectors: Tensor) -> Tensor:
        """Return these heads of (heads or 1, T, dim)."""
        return vectors if len(vectors) == 1 else vectors[self.heads.start : self.heads.stop]


def cut(batch: range, heads: int, groups: int, sharing: int = 1) -> Iterator[tuple[range, list[range]]]:
    """Yield items and heads with at most ``groups`` pairs of them at a time; short sequences take many at once.

    If ``sharing`` heads use the keys of one, heads that go together and are not all of them have the same keys.
    """
    parts = [range(heads)] if groups >= heads or sharing == 1 else chunks(range(heads), sharing)
    for part in parts:
        for some in chunks(part, max(1, groups)):
            yield some, chunks(batch, max(1, groups // max(1, heads)))
