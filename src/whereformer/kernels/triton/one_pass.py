"""When all gradients are computed in one pass, in which programs add to the queries' gradient atomically."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..problem import Problem

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
