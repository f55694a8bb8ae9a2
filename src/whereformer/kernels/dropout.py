"""Attention dropout as a function of a seed and of indices, so that our own backends drop the same weights.

Calls that torch's fused attention runs drop as torch does.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MASK32 = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A 0-dimensional int64 seed from torch's own generator: ``torch.manual_seed`` decides the mask."""
    return torch.randint(2**62, (), device=device)


def row_seeds(seed: Tensor, batch: int, heads: int, n_q: int) -> Tensor:
    """One 32-bit number (held in int64) per row of scores, (batch, heads, n_q): splitmix64 of seed and row index."""
    rows = torch.arange(batch * heads * n_q, device=seed.device).view(batch, heads, n_q)
    mixed = seed + (rows + 1) * _GOLDEN
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) & _MASK32


def keep_mask(seeds: Tensor, columns: Tensor, dropout_p: float) -> Tensor:
    """Which weights survive: bool (..., columns), from row seeds (...) and column indices (columns,).

    The mix is murmur3's 32-bit finaliser. It is done in signed 32-bit integers, whose sums and products wrap to the
    same bits as unsigned ones; a right shift has to drop the copies of the sign, and a comparison to flip it.
    """
    mixed = seeds.to(torch.int32).unsqueeze(-1) + columns.to(torch.int32) * _signed(0x9E3779B9)
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)).mul_(_signed(0x85EBCA6B))
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)).mul_(_signed(0xC2B2AE35))
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)).bitwise_xor_(_signed(0x80000000))
    return mixed >= int(dropout_p * 2**32) - 2**31


def _signed(bits: int) -> int:
    """32 bits read as a signed number."""
    return bits - 2**32 if bits >= 2**31 else bits
