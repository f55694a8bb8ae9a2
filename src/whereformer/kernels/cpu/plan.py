"""``Plan``: how a piece is cut into blocks of items and heads, and each block into tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .. import tuning
from ..problem import Problem
from ..terms import Positions
from .block import TileBlock
from .groups import cut
from .pieces import Piece
from .tables import Grid, GridVectors, Tables
from .tiles import Span, chunks
from .windows import rows_per_tile, tile_scores, unroll
from .workspace import Workspace


class Plan:
    """How a piece is cut: into blocks of items and heads, and each block into tiles of some queries and their keys."""

    def __init__(self, problem: Problem, piece: Piece, tables: Tables) -> None:
        self.problem, self.piece, self.tables = problem, piece, tables
        n_q, n_k, sizes = len(piece.queries), len(piece.keys), tuning.current()
        scores = tile_scores(problem.value.device)
        reach, rows = tables.reach, n_q
        if reach is not None and len(reach) < n_k:
            # Many groups make up for few queries.
            rows = min(n_q, rows_per_tile(reach))
            n_k = max(1, min(n_k, len(reach) + tables.step * (rows - 1)))
        self.groups = max(1, scores // (rows * n_k))
        if any(isinstance(table, GridVectors) and len(table.window) > n_k for table in tables.vectors()):
            # A few rows of many heads read less of a long table than many rows of a few heads.
            self.groups *= tuning.MORE_GROUPS
        # A tile that is read by diagonals needs extra columns for each of its rows.
        most = math.isqrt(2 * scores // (self.groups * max(1, tables.step)))
        self.rows = min(rows, max(sizes.tile_rows, min(most, scores // (self.groups * n_k))))
        self.parts = list(cut(piece.items, problem.heads, self.groups, problem.heads // problem.value.shape[1]))
        self.spans = self._spans()

    def size(self) -> tuple[int, int, int]:
        """The groups, rows and columns of the largest tile."""
        groups = max(len(heads) * len(batch) for heads, batches in self.parts for batch in batches)
        rows, columns = (max(len(span.queries) for span in self.spans), max(len(span.keys) for span in self.spans))
        return groups, rows, columns

    def _spans(self) -> list[Span]:
        """Return the tiles of a block, without keys that no query of the tile may attend, and without empty tiles."""
        keys, layout, reach = range(len(self.piece.keys)), self.tables.layout, self.tables.reach
        spans = []
        for queries in chunks(range(len(self.piece.queries)), self.rows):
            if isinstance(layout, Grid) and reach is not None:
                keys = layout.keys_of(queries, reach)
            if keys:
                spans.append(Span(queries, keys))
        return spans

    def blocks(self, workspace: Workspace) -> Iterator[TileBlock]:
        """Yield the blocks. What a block takes from the workspace is free again when the next block begins."""
        for heads, batches in self.parts:
            with workspace.scope():
                biases = [
                    table.reader(heads, workspace, tile_rows=self.rows) for table in self.tables.biases().values()
                ]
                for batch in batches:
                    with workspace.scope():
                        yield TileBlock(self.problem, self.piece, self.tables, biases, workspace, batch, heads)


def plans_of(problem: Problem) -> list[Plan]:
    """Return a plan for each piece that has something to compute; pieces with the same offsets share their tables."""
    plans, known = [], dict[tuple[int, ...], Tables]()
    for piece in (part for whole in problem.pieces() for part in unroll(problem, whole)):
        if piece.batch and problem.heads and piece.queries and piece.keys:
            plan = Plan(problem, piece, _tables_of(problem, piece, known))
            if plan.spans:
                plans.append(plan)
    return plans


def _tables_of(problem: Problem, piece: Piece, known: dict[tuple[int, ...], Tables]) -> Tables:
    """Return the tables of a piece: those of an earlier one with the same offsets, if there is one."""
    query, key = piece.query_positions, piece.key_positions
    # A table between grids depends on where the piece is in them.
    if problem.grid_bias is not None or not (isinstance(query, Positions) and isinstance(key, Positions)):
        return Tables(problem, piece)
    offsets = key.start - query.start, query.stride, key.stride, query.length, key.length
    if offsets not in known:
        known[offsets] = Tables(problem, piece)
    return known[offsets]
