"""What the functions of several kinds of layers share."""

from __future__ import annotations

from torch import Tensor, nn


def split_heads(hidden: Tensor, heads: int) -> Tensor:
    """Divide (batch, n, heads * head_dim) into (batch, heads, n, head_dim)."""
    return hidden.unflatten(2, (heads, -1)).transpose(1, 2)


def project_heads(hidden: Tensor, heads: int, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Project (batch, n, hidden_size) several times, into (batch, heads, n, head_dim) each."""
    return tuple(split_heads(project(hidden), heads) for project in projections)
