"""Cuts a piece with a window into blocks of queries that reach equally many keys, so that a tile has many of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import tuning
from ..problem import Problem
from .pieces import Piece, part_of_piece
from .tables import Grid, layout


def rows_per_tile(reach: range) -> int:
    """Return the number of queries that go together if each reaches ``len(reach)`` keys: together they reach more keys
    than each of them, so few are best."""
    return max(tuning.current().tile_rows, len(reach) // tuning.WINDOWS_PER_TILE)


def tile_scores(device: torch.device) -> int:
    """Return the number of scores that a tile on a device should have."""
    on_cpu = device.type == "cpu"
    return tuning.current().tile_scores * torch.get_num_threads() if on_cpu else tuning.GPU_TILE_SCORES


def unroll(problem: Problem, piece: Piece) -> list[Piece]:
    """Return a piece with a window as its first queries, its last ones, and for each batch item the blocks between
    them (see ``Piece.repeats``); return the piece alone where that would not help or is not possible.

    A tile of several blocks is worth the overhead of its operations, also with few heads. Copies of its keys in another
    dtype stay in the cache, which those of the whole sequence would not.
    """
    per_pair = problem.dense, problem.query_factors, problem.grid_bias, problem.seed
    masks = piece.key_mask, piece.query_documents
    if not problem.limits_offsets or any(tensor is not None for tensor in (*per_pair, *masks)):
        return [piece]
    grid = layout(piece.query_positions, piece.key_positions, problem.value.device)
    if not isinstance(grid, Grid) or grid.step != 1:
        return [piece]
    reach = grid.reach(problem.min_offset, problem.max_offset)
    rows = rows_per_tile(reach)
    columns = len(reach) + rows - 1
    first, stop = max(0, -reach.start), min(grid.n_q, grid.n_k - reach.stop + 1)
    repeats = (stop - first) // rows
    if not reach or repeats < 2 or 2 * rows * columns > tile_scores(problem.value.device):
        return [piece]
    last = first + repeats * rows
    ends = [
        part_of_piece(piece, queries, keys)
        for queries in (range(first), range(last, grid.n_q))
        if queries and (keys := grid.keys_of(queries, reach))
    ]
    start = first + reach.start
    block = part_of_piece(piece, range(first, first + rows), range(start, start + columns))
    blocks = [replace(block, batch=piece.batch[item : item + 1], repeats=repeats) for item in range(len(piece.batch))]
    return [replace(each, overlaps=True) for each in (*ends, *blocks)]
