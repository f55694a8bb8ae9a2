"""The sizes of the kernels' tiles.

They are fixed instead of tuned at run time: sums depend on the size of tiles, and results must not depend on which size
was faster. ``benchmarks/gpu_static.py`` counts what they compile to: these need few instructions for each score, fit
into registers and, where possible, leave room for two programs. _PLAIN, _RICH and _FLOAT fit into the 99 KiB of shared memory of the
smallest GPUs of compute capability 8. Anything beyond a bias or a mask takes many registers for indices, so _RICH calls
have smaller tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import Problem
from . import available

LARGEST_BLOCK = 128
"""The most queries or keys in a tile."""


@dataclass(frozen=True)
class Blocks:
    """The size of a kernel's tiles, and its launch options."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


# By kernel and by the padded width of a head: up to 64, 128, 256.
# GPUs of compute capability 9 and 10 multiply 64 rows at once, and have more shared memory than others.
_PLAIN = {
    "forward": (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 8, 2)),
    "query": (Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    "key": (Blocks(32, 64, 4, 3), Blocks(32, 64, 4, 2), Blocks(32, 32, 8, 1)),
    "tile": (Blocks(64, 64, 4, 2), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
}
_RICH = {
    "forward": (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    "query": (Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1)),
    "key": (Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    "tile": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
}
_PLAIN_64_ROWS = {
    "forward": (Blocks(128, 64, 4, 2), Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2)),
    "query": (Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 1)),
    "key": (Blocks(64, 128, 8, 2), Blocks(32, 128, 8, 2), Blocks(32, 64, 8, 1)),
    "tile": (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 1), Blocks(64, 64, 8, 1)),
}
_RICH_64_ROWS = {
    "forward": (Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    "query": (Blocks(64, 16, 4, 2), Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1)),
    "key": (Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    "tile": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
}
_FLOAT = {
    "forward": (Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 1), Blocks(16, 16, 4, 1)),
    "query": (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1)),
    "key": (Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1)),
    "tile": (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(16, 16, 4, 1)),
}
# The interpreter's tiles are small, so that small tests have several, with different shapes.
_INTERPRETED = {
    "forward": Blocks(32, 16, 4, 1),
    "query": Blocks(16, 32, 4, 1),
    "key": Blocks(32, 16, 4, 1),
    "tile": Blocks(16, 16, 4, 1),
}


def blocks_of(kernel: str, problem: Problem) -> Blocks:
    """Return the tile sizes of a problem in the kernel "forward", "query", "key" or "tile"."""
    if available.interpreted():
        return _INTERPRETED[kernel]
    widths = [padded(problem.value.shape[3])]
    if problem.query is not None:
        widths.append(padded(problem.query.shape[3]))
    if problem.query_factors is not None:
        widths.append(padded(problem.query_factors.shape[3]))
    rich = (
        *(problem.key_table, problem.value_table, problem.query_factors, problem.dense),
        *(problem.query_positions, problem.query_documents),
    )
    of_64_rows = available.capability(problem.value.device)[0] in (9, 10)
    if torch.float32 in [tensor.dtype for tensor in (problem.value, problem.query_factors) if tensor is not None]:
        sizes = _FLOAT
    elif all(tensor is None for tensor in rich):
        sizes = _PLAIN_64_ROWS if of_64_rows else _PLAIN
    else:
        sizes = _RICH_64_ROWS if of_64_rows else _RICH
    return sizes[kernel][0 if max(widths) <= 64 else 1 if max(widths) <= 128 else 2]


def padded(width: int) -> int:
    """Round up to a power of two that a kernel's matrix product accepts as a dimension."""
    return max(16, 1 << (width - 1).bit_length())


def cdiv(number: int, divisor: int) -> int:
    """Divide and round up: the number of parts of a size, where the last one may be smaller."""
    return -(-number // divisor)
