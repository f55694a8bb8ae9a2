"""Attention dropout as a function of a seed and indices, so that all backends except "sdpa" drop the same weights.

A weight survives if a hash of the seed, its row and its column is at least ``dropout_p``, as a share of all hashes.
Survivors are divided by ``1 - dropout_p``. The "sdpa" backend has torch's dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MASK32 = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """Draw a 0-dimensional int64 seed from torch's generator, so that ``torch.manual_seed`` decides the mask."""
    return torch.randint(2**62, (), device=device)


def row_seeds(seed: Tensor, batch: int, heads: int, n_q: int) -> Tensor:
    """Return a 32-bit number (as int64) per row of scores, (batch, heads, n_q): splitmix64 of seed and row index."""
    rows = torch.arange(batch * heads * n_q, device=seed.device).view(batch, heads, n_q)
    mixed = seed + (rows + 1) * _GOLDEN
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) & _MASK32


def keep_mask(seeds: Tensor, columns: Tensor, dropout_p: float) -> Tensor:
    """Return which weights survive: bool (..., columns), from row seeds (...) and column indices (columns,).

    The mix is murmur3's 32-bit finalizer, computed in signed 32-bit integers. Their sums and products wrap to the same
    bits as unsigned ones, but a right shift has to drop the copies of the sign, and a comparison has to flip it.
    """
    mixed = seeds.to(torch.int32).unsqueeze(-1) + columns.to(torch.int32) * (0x9E3779B9 - 2**32)
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)).mul_(0x85EBCA6B - 2**32)
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)).mul_(0xC2B2AE35 - 2**32)
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)).bitwise_xor_(-(2**31))
    return mixed >= int(dropout_p * 2**32) - 2**31
