"""Splits a batch into rectangles of queries and keys without masks and with regular positions, where possible.

A padded row becomes a rectangle of its real keys, and a packed row one rectangle per document. This leaves less to
compute, and every rectangle is as fast as a whole unpadded row. Finding the rectangles reads masks and ids, so it
happens only on the CPU, where reading does not synchronize. Elsewhere masks are applied as masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..terms import Positions, PositionsLike


@dataclass(frozen=True)
class Piece:
    """Queries and keys of some batch items, and the masks that remain among them.

    Args:
        batch, queries, keys: the index ranges that it covers. A query is in at most one piece.
        query_positions, key_positions: the positions of the piece's own rows; a tensor has shape (n,).
        key_mask: (batch items, keys), True = may be attended; None: all may.
        query_documents, key_documents: (batch items, queries) and (batch items, keys) ids that have to agree.
        repeats: the number of such pieces of one batch item that are computed together. Each has its queries and keys
            ``len(queries)`` after those of the one before.
        overlaps: whether other pieces have some of its keys too.
    """

    batch: range
    queries: range
    keys: range
    query_positions: PositionsLike
    key_positions: PositionsLike
    key_mask: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    repeats: int = 1
    overlaps: bool = False

    @property
    def items(self) -> range:
        """What its groups are counted by: its batch items, or its repetitions."""
        return self.batch if self.repeats == 1 else range(self.repeats)


def split(
    batch: int,
    query_positions: PositionsLike,
    key_positions: PositionsLike,
    key_mask: Tensor | None,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
) -> list[Piece]:
    """Return the pieces of a batch; pairs in no piece may not attend."""
    n_q, n_k = _length(query_positions), _length(key_positions)
    whole = Piece(range(batch), range(n_q), range(n_k), query_positions, key_positions)
    explicit = isinstance(query_positions, Tensor) or isinstance(key_positions, Tensor)
    if key_mask is not None and key_mask.device.type == "cpu" and bool(key_mask.all()):
        key_mask = None
    if not explicit and key_mask is None and query_documents is None:
        return [whole]
    if not explicit and next(m for m in (key_mask, query_documents) if m is not None).device.type != "cpu":
        return [
            replace(whole, key_mask=key_mask, query_documents=query_documents, key_documents=key_documents),
        ]
    pieces: list[Piece] = []
    for item in range(batch):
        row = replace(
            whole,
            batch=range(item, item + 1),
            query_positions=_of_item(query_positions, item),
            key_positions=_of_item(key_positions, item),
        )
        documents = [row]
        if query_documents is not None and key_documents is not None:
            documents = _split_documents(row, query_documents[item : item + 1], key_documents[item : item + 1])
        for piece in documents:
            if key_mask is not None:
                piece = _trim_keys(piece, key_mask[item : item + 1, piece.keys.start : piece.keys.stop])
            _append(pieces, _with_regular_positions(piece))
    return pieces


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or merge it into the last one if both are the same rectangle of neighboring items."""
    if not piece.queries or not piece.keys:
        return
    if pieces and _is_plain(piece) and _is_plain(pieces[-1]):
        last = pieces[-1]
        # An item between the two may have no piece.
        neighbors = last.batch.stop == piece.batch.start
        if neighbors and replace(last, batch=piece.batch) == piece:
            piece = replace(piece, batch=range(last.batch.start, piece.batch.stop))
            pieces.pop()
    pieces.append(piece)


def _is_plain(piece: Piece) -> bool:
    """Whether the piece holds no tensor."""
    regular = isinstance(piece.query_positions, Positions) and isinstance(piece.key_positions, Positions)
    return regular and piece.key_mask is None and piece.query_documents is None


def _split_documents(row: Piece, query_documents: Tensor, key_documents: Tensor) -> list[Piece]:
    """Return one piece per document if every document is one run; else the row with its ids."""
    query_runs, key_runs = _runs(query_documents[0]), _runs(key_documents[0])
    if query_runs is None or key_runs is None:
        return [replace(row, query_documents=query_documents, key_documents=key_documents)]
    return [
        part_of_piece(row, queries, key_runs[document])
        for document, queries in query_runs.items()
        if document in key_runs
    ]


def part_of_piece(piece: Piece, queries: range, keys: range) -> Piece:
    """Return some queries and keys, as indices into the piece, of a piece without masks."""
    return replace(
        piece,
        queries=piece.queries[queries.start : queries.stop],
        keys=piece.keys[keys.start : keys.stop],
        query_positions=_part(piece.query_positions, queries),
        key_positions=_part(piece.key_positions, keys),
    )


def _runs(ids: Tensor) -> dict[int | float, range] | None:
    """Return the range of each id; None if an id has several runs, or the ids are not on the CPU."""
    if ids.device.type != "cpu":
        return None
    values, lengths = torch.unique_consecutive(ids, return_counts=True)
    names = values.tolist()
    if not names:
        return {}
    if len(set(names)) < len(names):
        return None
    ends = lengths.cumsum(0).tolist()
    return {name: range(start, end) for name, start, end in zip(names, [0, *ends[:-1]], ends, strict=True)}


def _trim_keys(piece: Piece, mask: Tensor) -> Piece:
    """Cut the piece to its first .. last key that may be attended; it keeps a mask if there are gaps in between."""
    if mask.device.type != "cpu":
        return replace(piece, key_mask=mask)
    real = mask[0].nonzero()[:, 0]
    if len(real) == 0:
        return replace(piece, keys=range(0))
    kept = range(int(real[0]), int(real[-1]) + 1)
    return replace(
        piece,
        keys=piece.keys[kept.start : kept.stop],
        key_positions=_part(piece.key_positions, kept),
        key_mask=None if len(real) == len(kept) else mask[:, kept.start : kept.stop],
        key_documents=None if piece.key_documents is None else piece.key_documents[:, kept.start : kept.stop],
    )


def _with_regular_positions(piece: Piece) -> Piece:
    return replace(piece, query_positions=_regular(piece.query_positions), key_positions=_regular(piece.key_positions))


def _regular(positions: PositionsLike) -> PositionsLike:
    """Turn explicit positions into affine ones if they are affine."""
    if isinstance(positions, Positions) or positions.device.type != "cpu" or positions.is_floating_point():
        return positions
    if len(positions) == 0:
        return Positions(0, 1, 0)
    start = int(positions[0])
    stride = int(positions[1]) - start if len(positions) > 1 else 1
    affine = Positions(start, stride, len(positions)) if stride > 0 else None
    return affine if affine is not None and torch.equal(affine.values(), positions) else positions


def _part(positions: PositionsLike, part: range) -> PositionsLike:
    if isinstance(positions, Positions):
        return Positions(positions.start + positions.stride * part.start, positions.stride, len(part))
    return positions[part.start : part.stop]


def _of_item(positions: PositionsLike, item: int) -> PositionsLike:
    if isinstance(positions, Positions) or positions.dim() == 1:
        return positions
    return positions[item if positions.shape[0] > 1 else 0]


def _length(positions: PositionsLike) -> int:
    return positions.length if isinstance(positions, Positions) else positions.shape[-1]
