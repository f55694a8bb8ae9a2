"""More kinds of terms for the benchmarks of attention, which importing this adds to those of ``whereformer bench``.

Two add what positions seldom do. The others are what attention offers besides positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whereformer.kernels import DenseBias, Positions, attention, attention_varlen
from whereformer.studies.bench.cases import DTYPES, FREE, KINDS, BenchProblem, Case, Kind, lengths
from whereformer.studies.bench.ways import DENSE, Way

WINDOW = 128
SOFTCAP = 50.0
POSITIONS = ",".join((*KINDS, "dense", "funnel"))
"""All kinds that are about positions."""


@dataclass(frozen=True)
class WithLse(BenchProblem):
    """The log of each row's sum of exponentials is returned, too."""

    def attend(self, backend: str) -> Tensor:
        found, _ = attention(
            self.query, self.key, self.value, self.terms, **self.options, return_lse=True, backend=backend
        )
        return found


@dataclass(frozen=True)
class WithSinks(BenchProblem):
    """The parameters are arguments of attention."""

    def attend(self, backend: str) -> Tensor:
        return attention(self.query, self.key, self.value, **self.parameters, backend=backend)


@dataclass(frozen=True, kw_only=True)
class Packed(BenchProblem):
    """The sequences lie one after another in a batch of 1: ``starts`` has where each begins, and the end."""

    lengths: list[int]
    starts: Tensor

    def attend(self, backend: str) -> Tensor:
        content = (rows[0].transpose(0, 1) for rows in (self.query, self.key, self.value))
        found = attention_varlen(*content, self.terms, cu_seqlens_q=self.starts, backend=backend)
        return found.transpose(0, 1).unsqueeze(0)

    def sdpa(self, bias: Tensor | None = None) -> Tensor:
        sequences = zip(*(rows.split(self.lengths, 2) for rows in (self.query, self.key, self.value)), strict=True)
        return torch.cat([functional.scaled_dot_product_attention(*sequence) for sequence in sequences], 2)


def _with(kind: type[BenchProblem], problem: BenchProblem, **more: Any) -> BenchProblem:
    return kind(**{**vars(problem), **more})


def _pack(problem: BenchProblem) -> BenchProblem:
    found = lengths(problem.case)
    packed = {
        name: torch.cat([rows[:, :length] for rows, length in zip(getattr(problem, name), found, strict=True)], 1)
        for name in ("query", "key", "value")
    }
    packed = {name: rows.unsqueeze(0) for name, rows in packed.items()}
    starts = torch.tensor([0, *found.cumsum(0)], dtype=torch.int32, device=problem.query.device)
    return _with(Packed, problem, **packed, lengths=found.tolist(), starts=starts)


def _share_keys(problem: BenchProblem) -> BenchProblem:
    heads = problem.case.heads // (4 if problem.case.heads % 4 == 0 else 2 if problem.case.heads % 2 == 0 else 1)
    return replace(problem, key=problem.key[:, :heads].contiguous(), value=problem.value[:, :heads].contiguous())


def _pool(problem: BenchProblem) -> BenchProblem:
    query, n = problem.query[:, :, ::2].contiguous(), problem.case.n
    positions = {"query_positions": Positions(0, 2, query.shape[2]), "key_positions": Positions(0, 1, n)}
    return replace(problem, query=query, options=positions)


def _draw_dense(case: Case) -> dict[str, Tensor]:
    return {"scores": torch.randn(1, case.heads, case.n, case.n, dtype=DTYPES[case.dtype])}


KINDS |= {
    "dense": Kind(_draw_dense, lambda given: (DenseBias(given["scores"]),)),
    "funnel": replace(FREE, adapt=_pool),
    "window": Kind(adapt=partial(replace, options={"window": WINDOW})),
    "grouped": replace(FREE, adapt=_share_keys),
    "lse": replace(FREE, adapt=partial(_with, WithLse)),
    "softcap": Kind(adapt=partial(replace, options={"softcap": SOFTCAP})),
    "sinks": Kind(lambda case: {"sinks": torch.randn(case.heads)}, adapt=partial(_with, WithSinks)),
    "varlen": replace(FREE, adapt=_pack),
}


def _window_bias(problem: BenchProblem) -> Callable[[], Tensor]:
    far = problem.offsets().abs() > WINDOW
    bias = torch.zeros_like(far, dtype=problem.query.dtype).masked_fill_(far, -torch.inf)
    return lambda: problem.sdpa(bias)


MORE_WAYS = (
    replace(DENSE, kinds=("funnel", "grouped")),
    Way(DENSE.name, lambda problem: lambda: problem.sdpa(problem.parameters["scores"]), ("dense",)),
    Way(DENSE.name, _window_bias, ("window",)),
)
"""Torch's attention with these terms, or the window, as a dense bias."""
