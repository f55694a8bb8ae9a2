"""What the functions of several kinds of layers share."""

from __future__ import annotations

from torch import Tensor


def split_heads(hidden: Tensor, heads: int) -> Tensor:
    """Divide (batch, n, heads * head_dim) into (batch, heads, n, head_dim)."""
    return hidden.unflatten(2, (heads, -1)).transpose(1, 2)
