"""Every size and threshold that was found by measuring, by family of processors.

Nothing here changes what is computed: a threshold only chooses between ways that differ in speed and memory.
``whereformer bench --tune`` measures other values on the machine it runs on.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .torch_private import has_amx, has_onednn_linear

# --- products by oneDNN; ``whereformer bench --tune`` measures whether oneDNN is faster on this machine

FEWEST_MULTIPLICATIONS = 2**21
"""The fewest multiplications (rows * columns * inner size) of a product in attention that oneDNN may compute. For
fewer, a call costs more than it saves."""

NARROWEST_PRODUCT = 32
"""The smallest size of each side of such a product: rows, columns and inner size."""

FEWEST_IN_LAYERS = 2**22
"""The fewest multiplications (rows * inputs * outputs) of a linear layer that oneDNN may compute."""

ALWAYS_REGULAR = 64
"""The number of rows up to which every size counts as regular. oneDNN keeps memory for every shape that it has seen, so
it gets only a few."""

NEARLY_REGULAR = 2
"""The number of rows that a regular size may lack: n queries and n keys have 2 n - 1 offsets between them."""

# --- tiles of attention; ``python benchmarks/attention.py`` times them

REPEATED_ROWS = 64
"""The number of rows in which a table over offsets is repeated for tiles to read: a part of a core's cache."""

MORE_GROUPS = 4
"""The factor by which more items and heads go together, with fewer rows of each, if tables of vectors are long."""

MOST_STEP = 16
"""The most keys by which a query may be ahead of the one before it, in calls that read tables by strides. More would
take memory for the keys in between."""

WINDOWS_PER_TILE = 4
"""In calls with a window, the keys that a query reaches are so many times the queries of a tile."""

GPU_TILE_SCORES = 2**24
"""Scores in a tile of "blockwise" on a GPU, where a tile need not fit a cache and each operation costs a launch."""

ROW_TABLE_NUMBERS = 256
"""The average number of products with a table of vectors that the Triton kernels keep per query. With a longer table,
the queries are split into parts of ``n_q * ROW_TABLE_NUMBERS`` numbers, so that memory grows only with n."""

FEWEST_TABLE_ROWS = 128
"""The fewest queries in such a part, whatever the length of the table."""

KEPT_BYTES = 2**24
"""The most bytes of attention's memory that are kept for a thread's next call."""


@dataclass(frozen=True)
class Tuning:
    """The values for one family of processors.

    Args:
        processor: the family's name.
        onednn: whether PyTorch's float32 products are slower than oneDNN's, see ``whereformer.kernels.cpu.onednn``.
        written_out_scores: scores per head up to which writing them all out is faster than going tile by tile.
        half_written_out_scores: the same for training in bfloat16 or float16, where torch's fused backward is slow.
        kept_scores: scores per head up to which training in float32 keeps the softmax weights for the backward.
        kept_tile_scores: scores in a tile if the weights are kept.
        tile_scores: scores per thread in other tiles: few enough to stay in a core's cache, and enough to make each
            operation worth its overhead.
        tile_rows: the fewest rows in a tile, unless there are fewer queries.
        fused_dtypes: the dtypes in which torch's own fused attention computes the forward of a call whose only term is
            an ``OffsetBias``.
        fused_backward_dtypes: dtypes in which it computes the backward too, if the table is short or needs no gradient.
        unturned_scores: scores per head up to which torch's kernel gets a copy of the table for each query. Above, it
            reads the table itself, and the order of the queries has to be reversed.
        band_rows: the number of queries whose part of a short table's gradient is computed at a time.
        band_share, half_band_share: a table counts as short if its length and ``band_rows`` together are at most this
            share of n_k, in float32 and in bfloat16.
        onednn_scores: scores per head from which our tiles, with oneDNN's products, are faster than torch's own
            attention in a call without terms.
        onednn_rows: the fewest queries, and the fewest keys, for that; with fewer, other work outweighs the products.
        onednn_head_dim: the narrowest head for that; in narrower ones the products matter less.
    """

    processor: str
    onednn: bool = False
    written_out_scores: int = 2**13
    kept_scores: int = 2**16
    kept_tile_scores: int = 2**18
    tile_scores: int = 2**18
    tile_rows: int = 64
    half_written_out_scores: int = 2**13
    fused_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.float64})
    fused_backward_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.float64})
    unturned_scores: int = 2**16
    band_rows: int = 128
    band_share: float = 0.0
    half_band_share: float = 0.0
    onednn_scores: int = 2**18
    onednn_rows: int = 256
    onednn_head_dim: int = 64


_INTEL_AMX = Tuning(
    "Intel with AMX",
    half_written_out_scores=2**15,
    tile_scores=2**19,
    band_share=0.12,
    half_band_share=0.25,
    fused_dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16}),
    fused_backward_dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16}),
)
_AMD_AVX512 = Tuning("AMD with AVX-512", onednn=True, half_written_out_scores=2**14)
_OTHER = Tuning("other processors")


def _measured() -> Tuning:
    """Return the values for this machine's processor, or for the instruction set that torch was configured to use."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return _OTHER
    try:
        vendor = Path("/proc/cpuinfo").read_text()
    except OSError:
        vendor = platform.processor()
    if "AuthenticAMD" in vendor and has_onednn_linear():
        return _AMD_AVX512
    if "GenuineIntel" in vendor and has_amx():
        return _INTEL_AMX
    return _OTHER


_current = _measured()


def current() -> Tuning:
    """Return the current values."""
    return _current


@contextmanager
def use(**changes: Any) -> Iterator[Tuning]:
    """Use other values inside the context, in all threads; for measurements and tests."""
    global _current
    before, _current = _current, replace(_current, **changes)
    try:
        yield _current
    finally:
        _current = before
