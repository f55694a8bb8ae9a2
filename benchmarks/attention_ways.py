"""The ways to compute a case, this library's and torch's, the check of each by the float64 reference, and its times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial

import torch
from attention_kinds import DTYPES, WINDOW, BenchProblem, Case, make_problem
from torch import Tensor

from whereformer.kernels import FactorPair, OffsetBias, OffsetKeys, OffsetQueries, Term
from whereformer.kernels.terms import TABLES

CHECKED_LENGTH = 160
"""Number of keys in a check, beyond the reach of the shorter tables."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""The largest norm of an error, relative to the norm of the correct tensor."""


@dataclass(frozen=True)
class Way:
    """A way to compute a case.

    Args:
        name: a short name.
        prepare: precomputes what doesn't depend on parameters, and returns a function that returns the output. Both may
            raise.
        kinds: the kinds of terms that it can compute; None for all.
        simplify: makes the problem that it computes, and is checked on, from the case's problem.
    """

    name: str
    prepare: Callable[[BenchProblem], Callable[[], Tensor]]
    kinds: Collection[str] | None = None
    simplify: Callable[[BenchProblem], BenchProblem] = lambda problem: problem

    def does(self, kind: str) -> bool:
        """Return whether it can compute such a case."""
        return self.kinds is None or kind in self.kinds


def backend(name: str) -> Way:
    """Return the way that calls :func:`whereformer.attention` with one of its backends."""
    return Way(name, lambda problem: partial(problem.attend, name))


def gather(table: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``table[:, columns]`` in a dtype, (heads, n_q, n_k)."""
    if table.requires_grad and torch.is_grad_enabled():
        # The gradient sums over all pairs with the same offset, which would be wrong in bfloat16.
        return table[:, columns].to(dtype)
    return table.to(dtype)[:, columns]


def _prepare_dense(problem: BenchProblem) -> Callable[[], Tensor]:
    """Make the terms one bias in the case's dtype, with -inf for masked pairs.

    The index of every pair is computed only once, here, because a model could keep it.
    """
    offsets = problem.offsets()
    mask = problem.options.get("key_mask")
    forbidden = None if mask is None else ~mask[:, None, None, :]
    if problem.options.get("causal"):
        forbidden = offsets > 0
    with torch.no_grad():
        columns = [
            (offsets - term.first).clamp_(0, term.table.shape[1] - 1) if isinstance(term, TABLES) else offsets
            for term in problem.terms
        ]
    del offsets

    def bias() -> Tensor:
        first, *rest = (_added(problem, *pair) for pair in zip(problem.terms, columns, strict=True))
        total = sum(rest, first)
        return total if forbidden is None else total.masked_fill(forbidden, -math.inf)

    return lambda: problem.sdpa(bias())


def _added(problem: BenchProblem, term: Term, columns: Tensor) -> Tensor:
    """Return a term's part of the scores, (batch or 1, heads, n_q, n), from each pair's column in its table."""
    dtype = problem.query.dtype
    match term:
        case OffsetBias():
            return gather(term.table, columns, dtype).unsqueeze(0)
        case OffsetKeys() | OffsetQueries():
            of_queries = isinstance(term, OffsetQueries)
            rows = term.key_factors if isinstance(term, OffsetQueries) else term.query_factors
            if rows is None:
                rows = (problem.key if of_queries else problem.query) * problem.query.shape[3] ** -0.5
            per_offset = rows @ term.table.to(rows.dtype).mT
            columns = (columns.T if of_queries else columns).expand(*per_offset.shape[:2], -1, -1)
            added = per_offset.gather(-1, columns)
            return added.mT if of_queries else added
        case FactorPair():
            return (term.query_factors @ term.key_factors.transpose(-1, -2)).to(dtype)
        case _:
            raise TypeError(f"{type(term).__name__} is not a number per pair")


FLOOR = Way("sdpa", lambda problem: problem.sdpa, simplify=BenchProblem.plain)
"""Torch's attention over all keys, without positions, the unit of all times."""


def _window_bias(problem: BenchProblem) -> Callable[[], Tensor]:
    far = problem.offsets().abs() > WINDOW
    bias = torch.zeros_like(far, dtype=problem.query.dtype).masked_fill_(far, -torch.inf)
    return lambda: problem.sdpa(bias)


SCORES = ("bias", "t5", "tisa", "factors", "padded", "causal", "inkling", "deberta", "funnel", "grouped")
DENSE = Way("sdpa+bias", _prepare_dense, SCORES)
"""Torch's attention with the terms as a dense bias, as in most code today."""

TORCH = (
    DENSE,
    Way(DENSE.name, lambda problem: lambda: problem.sdpa(problem.parameters["scores"]), ("dense",)),
    Way(DENSE.name, _window_bias, ("window",)),
    Way("sdpa:causal", lambda problem: problem.sdpa, ("causal",), BenchProblem.without_terms),
)
"""Torch's attention with a dense bias, and its causal attention without positions."""


def make_step(way: Way, problem: BenchProblem) -> Callable[[], list[Tensor]]:
    """Return a function that computes the case once and returns its output and, in training, all gradients.

    The gradients are for one fixed random gradient of the output. A way without terms has only the gradients of query,
    key and value.
    """
    problem = way.simplify(problem)
    compute = way.prepare(problem)
    if problem.case.direction == "forward":

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [compute()]

        return forward
    seed = torch.randn(problem.query.shape, generator=torch.Generator().manual_seed(1))
    seed = seed.to(DTYPES[problem.case.dtype]).to(problem.query)

    def train() -> list[Tensor]:
        out = compute()
        return [out.detach(), *torch.autograd.grad(out, problem.inputs, seed)]

    return train


@cache
def check(way: Way, kind: str, head_dim: int, dtype: str, direction: str) -> float | str:
    """Return the largest relative error of a way's output and gradients for short rows, or why it can't be timed."""
    case = Case(kind, CHECKED_LENGTH, 2, 2, head_dim, dtype, direction)
    problem = way.simplify(make_problem(case))
    try:
        tensors = make_step(way, problem)()
    except Exception as error:  # another library's failure is also a result
        return in_a_line(error)
    exact = make_step(backend("reference"), problem.exact())()
    worst = 0.0
    names = ("output", "query", "key", "value", *problem.parameters)
    for name, actual, expected in zip(names, tensors, exact, strict=False):
        if actual.shape != expected.shape:
            return f"wrong: {name} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        size, difference = float(expected.norm()), float((actual.to(expected) - expected).norm())
        share = difference / size if size else difference
        if not share <= TOLERANCE[dtype]:
            return f"wrong: {'' if name == 'output' else 'gradient of '}{name} is off by {share:.1e} of its size"
        worst = max(worst, share)
    return worst


def in_a_line(error: Exception) -> str:
    """Format an exception as one line, for a table's note."""
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


MIN_MEASUREMENT = 0.02
"""Seconds. Calls that take less time are repeated within a measurement."""


def mean_seconds(step: Callable[[], object]) -> float:
    """Return the CPU seconds of a call: the mean over enough calls in a row for a good measurement."""
    calls = 1
    while True:
        started = time.process_time()
        for _ in range(calls):
            step()
        elapsed = time.process_time() - started
        if elapsed >= MIN_MEASUREMENT:
            return elapsed / calls
        calls = math.ceil(calls * min(1000.0, 1.2 * MIN_MEASUREMENT / max(elapsed, 1e-9)))
