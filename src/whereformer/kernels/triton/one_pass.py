"""When all gradients are computed in one pass with atomic additions, and what torch does around that kernel."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..problem import Problem
from .blocks import LARGEST_BLOCK

WIDEST = 128
"""The widest head, of queries or of values."""


def takes(problem: Problem, needed: Collection[str]) -> bool:
    """Whether the one-pass kernel may compute the ``needed`` gradients, and can.

    It may if neither the call nor torch's switch asks for deterministic gradients. It can if the only term is a bias
    whose offsets are those of the tiles' diagonals: other terms have gradients with more sums than fit into registers
    beside those of keys and values. It is not worth it for one product fewer, and for heads so wide that their sums
    do not fit into registers either.
    """
    if problem.deterministic or torch.are_deterministic_algorithms_enabled():
        return False
    if "query" not in needed or not {"key", "value"} & set(needed):
        return False
    if problem.query is None or max(problem.query.shape[3], problem.value.shape[3]) > WIDEST:
        return False
    tables = (problem.key_table, problem.query_table, problem.value_table)
    if any(term is not None for term in (*tables, problem.query_factors, problem.query_levels, problem.dense)):
        return False
    _, query_stride, _, key_stride = problem.affine
    return problem.bias is None or (problem.query_positions is None and query_stride == key_stride)


def shared_sums(problem: Problem, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Allocate what all programs add to: the queries' gradient before its scale, and the sums of diagonals."""
    assert problem.query is not None
    d_query = problem.query.new_zeros(problem.query.shape, dtype=torch.float32)
    if not with_bias:
        return d_query, None
    batch, heads, n_q, _ = problem.query.shape
    return d_query, d_query.new_zeros(batch, heads, n_q + problem.n_k - 1 + 2 * LARGEST_BLOCK)


def by_offset(problem: Problem, diagonals: Tensor) -> Tensor:
    """Return the gradient of the bias from the sums of diagonals; see ``DiagonalSums``."""
    bias = problem.bias
    assert bias is not None
    query_start, _, key_start, stride = problem.affine
    length = bias.shape[1]
    diagonal = torch.arange(1 - problem.n_q, problem.n_k, device=bias.device)
    column = key_start - query_start + diagonal * stride - problem.first[0]
    d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    return d_bias.index_add_(1, column.clamp(0, length - 1), diagonals.sum(0)[:, LARGEST_BLOCK:-LARGEST_BLOCK])
