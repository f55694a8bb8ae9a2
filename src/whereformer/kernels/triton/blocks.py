"""The sizes of the kernels' tiles.

They are fixed instead of tuned at run time: sums depend on the size of tiles, and results must not depend on which size
was faster. Measured tiles were the fastest on an H100. By the counts of ``benchmarks/gpu_static.py``, the other tiles
need few instructions for each score and fit into registers; most leave room for two programs. All tiles except measured
ones and tiles of 64 rows fit into the 99 KiB of shared memory of the smallest GPUs of compute capability 8. Anything
more than a bias or a mask takes many registers for indices, so "rich" calls have smaller tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..call import Call
from . import available
from .available import MAX_BLOCK as MAX_BLOCK

_MAX_TENSOR_CORE_WIDTH = 64
"""The widest heads whose products of float32 are computed on tensor cores."""


@dataclass(frozen=True)
class Blocks:
    """The size of a kernel's tiles, and its launch options."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def launch_options(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


# By kind of call and kernel, for heads of a padded width up to 64, 128 and 256.
_TILES = {
    ("plain", "forward"): (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 8, 2)),
    ("plain", "query"): (Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    ("plain", "key"): (Blocks(32, 64, 4, 3), Blocks(32, 64, 4, 2), Blocks(32, 32, 8, 1)),
    ("plain", "square"): (Blocks(64, 64, 4, 1), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 1)),
    ("rich", "forward"): (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 8, 1)),
    ("rich", "query"): (Blocks(64, 16, 4, 2), Blocks(32, 16, 4, 1), Blocks(32, 16, 4, 1)),
    ("rich", "key"): (Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    ("rich", "square"): (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
    # With tables of vectors only: their offsets are known when the kernels are compiled.
    ("vectors", "forward"): (Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 1), Blocks(64, 32, 8, 1)),
    ("vectors", "query"): (Blocks(64, 16, 4, 2), Blocks(32, 32, 4, 1), Blocks(64, 32, 8, 1)),
    ("vectors", "key"): (Blocks(32, 64, 4, 1), Blocks(64, 64, 8, 1), Blocks(16, 64, 8, 1)),
    # GPUs of compute capability 9 and 10 multiply 64 rows at once.
    ("plain of 64 rows", "forward"): (Blocks(128, 64, 4, 2), Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2)),
    ("plain of 64 rows", "query"): (Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 1)),
    ("plain of 64 rows", "key"): (Blocks(64, 128, 8, 3), Blocks(32, 128, 8, 2), Blocks(32, 64, 8, 1)),
    ("plain of 64 rows", "square"): (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1)),
    # The same on compute capability 9, with and without a bias.
    ("measured", "forward"): (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3), Blocks(128, 32, 8, 2)),
    ("measured", "query"): (Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 1)),
    ("measured", "key"): (Blocks(64, 64, 4, 3), Blocks(64, 128, 8, 3), Blocks(32, 64, 8, 1)),
    ("measured", "square"): (Blocks(64, 64, 4, 3), Blocks(64, 64, 8, 3), Blocks(64, 64, 8, 1)),
    ("rich of 64 rows", "forward"): (Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 1)),
    ("rich of 64 rows", "query"): (Blocks(64, 16, 4, 2), Blocks(64, 16, 4, 1), Blocks(64, 16, 8, 1)),
    ("rich of 64 rows", "key"): (Blocks(32, 64, 4, 2), Blocks(32, 64, 8, 1), Blocks(16, 64, 8, 1)),
    ("vectors of 64 rows", "forward"): (Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 1), Blocks(64, 32, 8, 1)),
    ("vectors of 64 rows", "query"): (Blocks(64, 64, 4, 1), Blocks(64, 32, 4, 1), Blocks(64, 32, 8, 1)),
    ("vectors of 64 rows", "key"): (Blocks(32, 64, 4, 2), Blocks(32, 64, 8, 1), Blocks(32, 64, 8, 1)),
    # Products of float32 on tensor cores keep both parts of their rows in registers, others of float32 whole rows.
    ("float", "forward"): (Blocks(64, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1)),
    ("float", "query"): (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1)),
    ("float", "key"): (Blocks(16, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1)),
    ("rich float", "forward"): (Blocks(32, 16, 4, 1), Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    ("rich float", "query"): (Blocks(32, 16, 4, 1), Blocks(32, 16, 8, 1), Blocks(16, 16, 8, 1)),
    ("rich float", "key"): (Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
    ("rich float", "square"): (Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(16, 16, 4, 1)),
    # On compute capability 9, for heads up to _MAX_TENSOR_CORE_WIDTH only.
    ("float of 64 rows", "forward"): (Blocks(128, 32, 8, 1),),
    ("float of 64 rows", "query"): (Blocks(128, 32, 8, 1),),
    ("float of 64 rows", "key"): (Blocks(32, 128, 8, 1),),
    ("rich float of 64 rows", "forward"): (Blocks(128, 16, 8, 1),),
    ("rich float of 64 rows", "query"): (Blocks(64, 16, 4, 1),),
    ("rich float of 64 rows", "key"): (Blocks(16, 128, 8, 1),),
    ("rich float of 64 rows", "square"): (Blocks(64, 64, 8, 1),),
    # With other sums by key than keys' and values'. A table of queries spills in all tiles that use Hopper's matrix
    # instructions; this tile needs the fewest instructions for each score.
    ("float by key", "key"): (Blocks(32, 128, 8, 1),),
}
# The interpreter's tiles are small, so that small tests have several, with different shapes.
_INTERPRETED = {
    "forward": Blocks(32, 16, 4, 1),
    "query": Blocks(16, 32, 4, 1),
    "key": Blocks(16, 32, 4, 1),
    "square": Blocks(16, 16, 4, 1),
}


def choose_blocks(kernel: str, call: Call) -> Blocks:
    """Return the tile sizes of a call in the kernel "forward", "query", "key" or "square".

    Tiles of the gradients of a bias and of dense scores are square.
    """
    if available.is_interpreted():
        return _INTERPRETED[kernel]
    tables = (call.key_table, call.query_table, call.value_table, call.query_levels)
    has_vectors = any(tensor is not None for tensor in tables)
    is_float = torch.float32 in [tensor.dtype for tensor in (call.value, call.query_factors) if tensor is not None]
    is_rich = any(tensor is not None for tensor in (call.query_factors, call.dense, call.query_positions))
    is_rich = is_rich or (kernel == "square" and (has_vectors or is_float))
    capability, _ = torch.cuda.get_device_capability(call.value.device)
    # Tiles of the first of these kinds that has them
    if is_float:
        kind = "rich float" if is_rich or has_vectors else "float"
        sums_by_key = call.query_table is not None or call.key_levels is not None
        kinds = ["float by key"] * sums_by_key + [f"{kind} of 64 rows"] if capability == 9 else []
        kinds.append(kind)
    elif capability in (9, 10):
        # Where a window or documents leave few keys to a query, the forward is faster with fewer warps.
        few_keys = kernel == "forward" and (call.min_offset is not None or call.query_documents is not None)
        plain = "measured" if capability == 9 and not few_keys else "plain of 64 rows"
        kinds = ["rich of 64 rows", "rich"] if is_rich else ["vectors of 64 rows"] if has_vectors else [plain]
    else:
        kinds = ["rich"] if is_rich else ["vectors"] if has_vectors else ["plain"]
    width = _find_widest(call)
    index = 0 if width <= 64 else 1 if width <= 128 else 2
    return next(tiles[index] for kind in kinds if len(tiles := _TILES.get((kind, kernel), ())) > index)


def choose_precision(call: Call) -> str:
    """Return how products of float32 are computed, by Triton's name.

    Three products of TF32 numbers on tensor cores are as close to exact products as float32 is, but hold each number
    twice. For wider heads that does not fit into registers.
    """
    return "tf32x3" if _find_widest(call) <= _MAX_TENSOR_CORE_WIDTH else "ieee"


def _find_widest(call: Call) -> int:
    """Return the padded width of the widest rows."""
    rows = (call.value, call.query, call.query_factors)
    return max(pad_width(tensor.shape[3]) for tensor in rows if tensor is not None)


def pad_width(width: int) -> int:
    """Round up to a power of two that a kernel's matrix product accepts as a dimension."""
    return max(16, 1 << (width - 1).bit_length())


def cdiv(number: int, divisor: int) -> int:
    """Divide and round up: the number of parts of a size, where the last one may be smaller."""
    return -(-number // divisor)
