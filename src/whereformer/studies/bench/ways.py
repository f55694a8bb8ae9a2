"""The ways to compute a case of the attention benchmark: our backends, and what other code does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import (
    DenseBias,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    Term,
    attention,
    attention_varlen,
)
from ...kernels.terms import TABLES
from .cases import DTYPES, KINDS, WINDOW, BenchProblem


@dataclass(frozen=True)
class Way:
    """A way to compute a case.

    Args:
        name: a short name.
        prepare: precomputes what doesn't depend on parameters, and returns a function that returns the output. Both may
            raise.
        kinds: the kinds of cases that it can compute; None for all.
        simplify: makes the problem that it computes instead of the case's, and is checked on.
    """

    name: str
    prepare: Callable[[BenchProblem], Callable[[], Tensor]]
    kinds: tuple[str, ...] | None = None
    simplify: Callable[[BenchProblem], BenchProblem] = lambda problem: problem

    def does(self, kind: str) -> bool:
        """Return whether it can compute such a case."""
        return self.kinds is None or kind in self.kinds


def backend(name: str) -> Way:
    """Return the way that calls :func:`whereformer.attention` with one of its backends."""

    def prepare(problem: BenchProblem) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            terms, options = problem.terms, problem.options
            if problem.cu_seqlens is None:
                found: Any = attention(problem.query, problem.key, problem.value, terms, **options, backend=name)
                return found[0] if "return_lse" in options else found
            query, key, value = (rows[0].transpose(0, 1) for rows in (problem.query, problem.key, problem.value))
            found = attention_varlen(query, key, value, terms, **options, cu_seqlens_q=problem.cu_seqlens, backend=name)
            return found.transpose(0, 1).unsqueeze(0)

        return compute

    return Way(name, prepare)


def _prepare_torch(problem: BenchProblem) -> Callable[[], Tensor]:
    if problem.cu_seqlens is not None:
        return _one_by_one(problem, problem.cu_seqlens.tolist())
    mask = None if problem.key_mask is None else problem.key_mask[:, None, None, :]
    return lambda: functional.scaled_dot_product_attention(
        problem.query,
        problem.key,
        problem.value,
        attn_mask=mask,
        is_causal=problem.causal,
        enable_gqa=problem.query.shape[1] != problem.key.shape[1],
    )


def _one_by_one(problem: BenchProblem, starts: list[int]) -> Callable[[], Tensor]:
    """Compute each of the sequences that lie one after another by itself."""
    lengths = [stop - start for start, stop in pairwise(starts)]

    def compute() -> Tensor:
        sequences = zip(*(rows.split(lengths, 2) for rows in (problem.query, problem.key, problem.value)), strict=True)
        return torch.cat([functional.scaled_dot_product_attention(*sequence) for sequence in sequences], 2)

    return compute


FLOOR = Way("sdpa", _prepare_torch, simplify=BenchProblem.plain)
"""Torch's attention over all keys, without positions, caps and sinks, which all other ways are compared with."""

CAUSAL = Way("sdpa:causal", _prepare_torch, ("causal",), BenchProblem.without_terms)
"""Torch's causal attention without positions."""


def gather(table: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``table[:, columns]`` in a dtype, (heads, n_q, n_k)."""
    if table.requires_grad and torch.is_grad_enabled():
        # The gradient sums over all pairs with the same offset, which would be wrong in bfloat16.
        return table[:, columns].to(dtype)
    return table.to(dtype)[:, columns]


def bias_maker(problem: BenchProblem) -> Callable[[], Tensor]:
    """Return a function that returns the terms as one bias in the case's dtype, with -inf for masked pairs.

    The index of every pair is computed only once, here, because a model could keep it.
    """
    dtype = problem.query.dtype
    offsets = problem.offsets()
    forbidden = None if problem.key_mask is None else ~problem.key_mask[:, None, None, :]
    if problem.causal:
        forbidden = offsets > 0 if forbidden is None else forbidden | (offsets > 0)
    if "window" in problem.options:
        mask = torch.zeros_like(offsets, dtype=dtype).masked_fill_(offsets.abs() > WINDOW, -math.inf)
        return lambda: mask
    with torch.no_grad():
        columns = [
            (offsets - term.first).clamp_(0, term.table.shape[1] - 1) if isinstance(term, TABLES) else None
            for term in problem.terms
        ]
    del offsets

    def added(term: Term, columns: Tensor | None) -> Tensor:
        match term:
            case OffsetBias():
                assert columns is not None
                return gather(term.table, columns, dtype).unsqueeze(0)
            case OffsetKeys() | OffsetQueries():
                assert columns is not None
                return _gather_vectors(problem, term, columns)
            case FactorPair():
                return (term.query_factors @ term.key_factors.transpose(-1, -2)).to(dtype)
            case DenseBias():
                return term.scores.to(dtype)
            case _:
                raise TypeError(f"{type(term).__name__} is not a number per pair")

    def bias() -> Tensor:
        first, *more = (added(*pair) for pair in zip(problem.terms, columns, strict=True))
        total = sum(more, first)
        return total if forbidden is None else total.masked_fill(forbidden, -math.inf)

    return bias


def _gather_vectors(problem: BenchProblem, term: OffsetKeys | OffsetQueries, columns: Tensor) -> Tensor:
    """Return what vectors over offsets add to each pair, (batch, heads, n_q, n_k), as models gather it."""
    of_queries = isinstance(term, OffsetQueries)
    rows = term.factors
    if rows is None:
        rows = (problem.key if of_queries else problem.query) * problem.query.shape[3] ** -0.5
    per_offset = rows @ term.table.to(rows.dtype).mT
    columns = (columns.T if of_queries else columns).expand(*per_offset.shape[:2], -1, -1)
    found = per_offset.gather(-1, columns)
    return found.mT if of_queries else found


def _prepare_dense(problem: BenchProblem) -> Callable[[], Tensor]:
    bias = bias_maker(problem)
    grouped = problem.query.shape[1] != problem.key.shape[1]
    return lambda: functional.scaled_dot_product_attention(
        problem.query, problem.key, problem.value, attn_mask=bias(), enable_gqa=grouped
    )


def all_but(*kinds: str) -> tuple[str, ...]:
    """Return all kinds but these."""
    return tuple(kind for kind in KINDS if kind not in kinds)


DENSE = Way("sdpa+bias", _prepare_dense, all_but("none", "shaw", "lse", "softcap", "sinks", "varlen"))
"""Torch's attention with the terms, or the window, as a dense bias, which is what most people do today."""


def make_step(way: Way, problem: BenchProblem) -> Callable[[], list[Tensor]]:
    """Return a function that computes the case once and returns its output and, in training, all gradients.

    The gradients are for one fixed random gradient of the output. A way without terms has only the gradients of query,
    key and value.
    """
    problem = way.simplify(problem)
    compute = way.prepare(problem)
    if not problem.case.training:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [compute()]

        return forward
    inputs = [tensor for tensor in problem.inputs if tensor.requires_grad]
    seed = torch.randn(problem.query.shape, generator=torch.Generator().manual_seed(1))
    seed = seed.to(DTYPES[problem.case.dtype]).to(problem.query)

    def train() -> list[Tensor]:
        out = compute()
        return [out.detach(), *torch.autograd.grad(out, inputs, seed)]

    return train
