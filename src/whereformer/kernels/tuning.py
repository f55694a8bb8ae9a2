"""Every size and threshold that was found by measuring, and which processor has which.

Nothing here changes what is computed: a threshold chooses between ways that differ in speed and memory alone.
``whereformer bench --tune``
measures other values on the machine it runs on.
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

# --- products by oneDNN; ``whereformer bench --tune`` measures whether it is the faster library at all

FEWEST_MULTIPLICATIONS = 2**21
"""Multiplications of two matrices in attention (rows * columns * what is summed over) from which oneDNN may do them. A
call of it for fewer costs more than it saves."""

NARROWEST_PRODUCT = 32
"""Numbers that each side of such a product has at least: rows, columns, and what is summed over."""

FEWEST_IN_LAYERS = 2**22
"""Multiplications of a linear layer (rows * inputs * outputs) from which oneDNN may do them."""

ALWAYS_REGULAR = 64
"""Size of a matrix, in rows, up to which every one counts as regular: oneDNN keeps memory for every shape that it has
seen, so it is given few."""

NEARLY_REGULAR = 2
"""Rows by which a matrix may be smaller than a regular one: n queries and n keys have 2 n - 1 offsets between them."""

# --- tiles of attention; ``python benchmarks/attention.py`` times them

REPEATED_ROWS = 64
"""Rows in which a table over offsets is repeated for attention's tiles to read: a part of a core's cache."""

MORE_GROUPS = 4
"""How many times as many items and heads go together where tables of vectors are long, and so fewer rows of each."""

MOST_STEP = 16
"""Keys by which a query may move on from the one before, in calls that read tables by strides; more would take memory
for the keys in between."""

GPU_TILE_SCORES = 2**24
"""Scores in a tile of "blockwise" on a GPU, where there is no cache to stay in and each operation costs a launch."""

ROW_TABLE_NUMBERS = 256
"""Numbers a query that the Triton kernels keep of its products with a table of vectors, on average. Queries of a longer
table go in parts of ``n_q * ROW_TABLE_NUMBERS`` numbers, so that memory grows with n alone."""

FEWEST_TABLE_ROWS = 128
"""Queries in such a part, at least, whatever the length of the table."""

KEPT_BYTES = 2**24
"""Bytes of attention's memory that wait for a thread's next call, at most."""


@dataclass(frozen=True)
class Tuning:
    """The values for one family of processors.

    Args:
        processor: the family's name.
        onednn: whether PyTorch's float32 products are slower than oneDNN's, see ``whereformer.kernels.cpu.onednn``.
        written_out_scores: scores a head up to which writing them all out is faster than going tile by tile.
        half_written_out_scores: the same where bfloat16 or float16 is trained, whose fused backward is slow in torch.
        kept_scores: scores a head up to which float32's training keeps the softmax's weights for the backward.
        kept_tile_scores: scores in a tile where the weights are kept.
        tile_scores: scores in a tile elsewhere, for each thread: few enough to stay in a core's cache, enough to make
            each operation worth its overhead.
        tile_rows: the fewest rows in a tile, unless there are fewer queries.
        fused_dtypes: dtypes in which torch's own fused attention computes the forward of a call whose only term is an
            ``OffsetBias``.
        fused_backward_dtypes: dtypes in which it computes the backward too, if the table is short or needs no gradient.
        unturned_scores: scores a head up to which torch's kernel is given a copy of the table for each query. Above it
            reads the table itself, for which the order of the queries has to be reversed.
        band_rows: queries for which a short table's gradient is computed at a time.
        band_share, half_band_share: how long a table may be to count as short: the largest share of n_k that its length
            and ``band_rows`` make together, in float32 and in bfloat16.
        onednn_scores: scores a head from which our tiles, with oneDNN's products, are faster than torch's own attention
            in a call without terms.
        onednn_rows: the fewest queries, and the fewest keys, for that: with fewer, other work outweighs the products.
        onednn_head_dim: the narrowest head for that: in narrower ones the products matter less.
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
    """The values for this machine's processor, or for the instructions that torch was told to use."""
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
    """The values that hold now."""
    return _current


@contextmanager
def use(**changes: Any) -> Iterator[Tuning]:
    """Other values while the context lasts, in all threads; for measurements and tests."""
    global _current
    before, _current = _current, replace(_current, **changes)
    try:
        yield _current
    finally:
        _current = before
