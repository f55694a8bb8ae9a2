"""The kinds of terms that benchmarks of attention time, and the random tensors of each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from whereformer.kernels import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
    Term,
    attention,
    attention_varlen,
)
from whereformer.positions.deberta import table_row
from whereformer.positions.t5 import buckets

T5_REACH = 91
"""From this distance on, every offset is in T5's last bucket, with 32 buckets up to a distance of 128."""

TISA_REACH = 30
TISA_KERNELS = 5
SHAW_CLIP = 16
INKLING_EXTENT = 512
INKLING_RANK = 16
DEBERTA_REACH = 512
DEBERTA_BUCKETS = 256
FACTOR_RANK = 66
WINDOW = 128
SOFTCAP = 50.0
MIN_LENGTH = 0.4
"""The length of the shortest of sequences that differ in length, as a share of the longest; others lie between."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Parameters = dict[str, Tensor]
Terms = tuple[Term, ...]


@dataclass(frozen=True)
class Case:
    """A case to compute: a kind of terms in :data:`KINDS`, ``n`` keys, sizes, a name in :data:`DTYPES`, a direction.

    "training" is forward and backward with all gradients, "forward" has no gradients.
    """

    terms: str
    n: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    direction: str


@dataclass(frozen=True)
class BenchProblem:
    """A case's tensors.

    Args:
        case: the case.
        query, key, value: each of shape (batch, heads, n, head_dim).
        parameters: other tensors whose gradients training needs. Tables are always float32, because their gradients
            are sums over very many pairs.
        make_terms: makes the terms from the parameters; a parameter "sinks" is an argument of attention itself.
        options: further arguments of :func:`whereformer.attention`.
    """

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    parameters: Parameters
    make_terms: Callable[[Parameters], Terms]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def terms(self) -> Terms:
        """The terms, made again from the parameters as a model does in each forward."""
        return self.make_terms(self.parameters)

    @property
    def inputs(self) -> list[Tensor]:
        """Query, key, value and all parameters."""
        return [self.query, self.key, self.value, *self.parameters.values()]

    def attend(self, backend: str) -> Tensor:
        """Compute attention with a backend of this library."""
        options = {"sinks": self.parameters.get("sinks"), **self.options, "backend": backend}
        out = attention(self.query, self.key, self.value, self.terms, **options)
        return out[0] if self.options.get("return_lse") else out

    def sdpa(self, bias: Tensor | None = None) -> Tensor:
        """Compute torch's attention, with a bias in place of the options about masks."""
        mask = self.options.get("key_mask")
        return functional.scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            attn_mask=bias if bias is not None or mask is None else mask[:, None, None, :],
            is_causal=bias is None and self.options.get("causal", False),
            enable_gqa=self.query.shape[1] != self.key.shape[1],
        )

    def offsets(self) -> Tensor:
        """Return all offsets, (n_q, n)."""
        keys = torch.arange(self.case.n, device=self.query.device)
        queries = self.options["query_positions"].values(keys.device) if "query_positions" in self.options else keys
        return keys - queries.unsqueeze(-1)

    def without_terms(self) -> Self:
        """Return the same content without terms; masks stay."""
        return replace(self, parameters={}, make_terms=KINDS["none"].terms)

    def plain(self) -> Self:
        """Return the same content without terms, causality and other options; padding stays."""
        padding = {name: value for name, value in self.options.items() if name == "key_mask"}
        return replace(self.without_terms(), options=padding)

    def exact(self) -> Self:
        """Return the same problem in float64."""

        def exact(tensor: Tensor) -> Tensor:
            return tensor.detach().double().requires_grad_(tensor.requires_grad)

        parameters = {name: exact(tensor) for name, tensor in self.parameters.items()}
        query, key, value = map(exact, (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, parameters=parameters)


@dataclass(frozen=True, kw_only=True)
class Packed(BenchProblem):
    """The sequences lie one after another in a batch of 1: ``starts`` has where each begins, and the end."""

    lengths: list[int]
    starts: Tensor

    def attend(self, backend: str) -> Tensor:
        query, key, value = (rows[0].transpose(0, 1) for rows in (self.query, self.key, self.value))
        out = attention_varlen(query, key, value, self.terms, cu_seqlens_q=self.starts, backend=backend)
        return out.transpose(0, 1).unsqueeze(0)

    def sdpa(self, bias: Tensor | None = None) -> Tensor:
        sequences = zip(*(rows.split(self.lengths, 2) for rows in (self.query, self.key, self.value)), strict=True)
        return torch.cat([functional.scaled_dot_product_attention(*sequence) for sequence in sequences], 2)


@dataclass(frozen=True)
class Kind:
    """A kind of terms.

    Args:
        draw: draws a case's random parameters.
        terms: makes the terms from such parameters.
        adapt: changes a problem, for options that are not terms.
    """

    draw: Callable[[Case], Parameters] = lambda case: {}
    terms: Callable[[Parameters], Terms] = lambda parameters: ()
    adapt: Callable[[BenchProblem], BenchProblem] = lambda problem: problem


@cache
def _t5_buckets(device: torch.device) -> Tensor:
    return torch.tensor(buckets(32, 128, True)[128 - T5_REACH : 128 + T5_REACH + 1], device=device)


def tisa_curve(parameters: Parameters, reach: int) -> Tensor:
    """Return the values of TISA's kernels at offsets -reach to reach, (heads, 2 * reach + 1)."""
    amplitude, sharpness, center = (parameters[name].unsqueeze(1) for name in ("amplitude", "sharpness", "center"))
    offsets = torch.arange(-reach, reach + 1, device=center.device, dtype=center.dtype).unsqueeze(-1)
    return (amplitude * torch.exp(-sharpness.abs() * (offsets - center) ** 2)).sum(-1)


def _draw_inkling(case: Case) -> Parameters:
    factors = torch.randn(case.batch, case.heads, case.n, INKLING_RANK) * INKLING_RANK**-0.5
    return {"profiles": torch.randn(1, INKLING_EXTENT, INKLING_RANK), "query_factors": factors.to(DTYPES[case.dtype])}


def _inkling(parameters: Parameters) -> Terms:
    # Keys to the right and farther keys get nothing.
    table = functional.pad(parameters["profiles"], (0, 0, 1, 1))
    return (OffsetKeys(table, -INKLING_EXTENT, query_factors=parameters["query_factors"]),)


def _deberta(parameters: Parameters) -> Terms:
    rows = _deberta_rows(parameters["keys"].device)
    # The gradient of an index would take longer than attention.
    keys, queries = (parameters[name].index_select(1, rows) for name in ("keys", "queries"))
    return OffsetKeys(keys, -DEBERTA_REACH), OffsetQueries(queries, -DEBERTA_REACH)


@cache
def _deberta_rows(device: torch.device) -> Tensor:
    offsets = range(-DEBERTA_REACH, DEBERTA_REACH + 1)
    return torch.tensor([table_row(offset, DEBERTA_BUCKETS, DEBERTA_REACH) for offset in offsets], device=device)


def _token_mask(problem: BenchProblem) -> Tensor:
    """Return the mask of sequences that differ in length, (batch, n)."""
    n, batch = problem.case.n, problem.case.batch
    shares = torch.linspace(1, MIN_LENGTH, batch) if batch > 1 else torch.tensor([(1 + MIN_LENGTH) / 2])
    return (torch.arange(n) < (shares * n).ceil().unsqueeze(-1)).to(problem.query.device)


def _pad(problem: BenchProblem) -> BenchProblem:
    return replace(problem, options={"key_mask": _token_mask(problem)})


def _pack(problem: BenchProblem) -> BenchProblem:
    mask = _token_mask(problem)
    packed = {
        name: getattr(problem, name).transpose(1, 2)[mask].transpose(0, 1)[None] for name in ("query", "key", "value")
    }
    starts = torch.tensor([0, *mask.sum(1).cumsum(0)], dtype=torch.int32, device=mask.device)
    return Packed(**{**vars(problem), **packed}, lengths=mask.sum(1).tolist(), starts=starts)


def _share_keys(problem: BenchProblem) -> BenchProblem:
    heads = problem.case.heads // (4 if problem.case.heads % 4 == 0 else 2 if problem.case.heads % 2 == 0 else 1)
    return replace(problem, key=problem.key[:, :heads].contiguous(), value=problem.value[:, :heads].contiguous())


def _pool(problem: BenchProblem) -> BenchProblem:
    query, n = problem.query[:, :, ::2].contiguous(), problem.case.n
    positions = {"query_positions": Positions(0, 2, query.shape[2]), "key_positions": Positions(0, 1, n)}
    return replace(problem, query=query, options=positions)


def _draw_dense(case: Case) -> dict[str, Tensor]:
    return {"scores": torch.randn(1, case.heads, case.n, case.n, dtype=DTYPES[case.dtype])}


FREE = Kind(
    lambda case: {"table": torch.randn(case.heads, 2 * case.n - 1)},
    lambda tensors: (OffsetBias(tensors["table"], -(tensors["table"].shape[1] // 2)),),
)
"""A number for each head and offset."""

KINDS = {
    "none": Kind(),
    "bias": FREE,
    "t5": Kind(
        lambda case: {"weight": torch.randn(case.heads, 32)},
        lambda tensors: (OffsetBias(tensors["weight"][:, _t5_buckets(tensors["weight"].device)], -T5_REACH),),
    ),
    "tisa": Kind(
        lambda case: {
            "amplitude": torch.randn(case.heads, TISA_KERNELS),
            "sharpness": 0.1 + torch.rand(case.heads, TISA_KERNELS),
            "center": 5 * torch.randn(case.heads, TISA_KERNELS).tanh(),
        },
        lambda tensors: (OffsetBias(tisa_curve(tensors, TISA_REACH), -TISA_REACH),),
    ),
    "shaw": Kind(
        lambda case: {name: torch.randn(1, 2 * SHAW_CLIP + 1, case.head_dim) for name in ("keys", "values")},
        lambda tensors: (OffsetKeys(tensors["keys"], -SHAW_CLIP), OffsetValues(tensors["values"], -SHAW_CLIP)),
    ),
    "factors": Kind(
        lambda case: {
            name: (FACTOR_RANK**-0.25 * torch.randn(1, case.heads, case.n, FACTOR_RANK)).to(DTYPES[case.dtype])
            for name in ("query_factors", "key_factors")
        },
        lambda tensors: (FactorPair(**tensors),),
    ),
    "padded": replace(FREE, adapt=_pad),
    "causal": Kind(
        lambda case: {"table": torch.randn(case.heads, case.n)},
        lambda tensors: (OffsetBias(tensors["table"], 1 - tensors["table"].shape[1]),),
        partial(replace, options={"causal": True}),
    ),
    "inkling": Kind(_draw_inkling, _inkling),
    "deberta": Kind(
        lambda case: {
            name: torch.randn(case.heads, 2 * DEBERTA_BUCKETS, case.head_dim) for name in ("keys", "queries")
        },
        _deberta,
    ),
    "dense": Kind(_draw_dense, lambda tensors: (DenseBias(tensors["scores"]),)),
    "funnel": replace(FREE, adapt=_pool),
    "mirror": Kind(
        lambda case: {"table": torch.randn(1, 2 * SHAW_CLIP + 1, case.head_dim)},
        lambda tensors: (OffsetQueries(tensors["table"], -SHAW_CLIP),),
    ),
    "decay": Kind(
        lambda case: {name: torch.randn(case.batch, case.heads, case.n) for name in ("query_levels", "key_levels")},
        lambda tensors: (DistanceDecay(*tensors.values()),),
    ),
    "window": Kind(adapt=partial(replace, options={"window": WINDOW})),
    "grouped": replace(FREE, adapt=_share_keys),
    "lse": replace(FREE, adapt=partial(replace, options={"return_lse": True})),
    "softcap": Kind(adapt=partial(replace, options={"softcap": SOFTCAP})),
    "sinks": Kind(lambda case: {"sinks": torch.randn(case.heads)}),
    "varlen": replace(FREE, adapt=_pack),
}
"""The kinds of terms by name: what positions add, and, from "window" on, what attention offers besides."""

POSITIONS = list(KINDS)[: list(KINDS).index("window")]
"""The kinds that are about positions."""


def make_problem(case: Case, device: torch.device | str = "cpu") -> BenchProblem:
    """Make the random tensors of a case, always the same ones."""
    kind = KINDS[case.terms]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = (case.batch, case.heads, case.n, case.head_dim)
        query, key, value = (torch.randn(size).to(device, DTYPES[case.dtype]) for _ in range(3))
        parameters = {name: tensor.to(device) for name, tensor in kind.draw(case).items()}
    problem = kind.adapt(BenchProblem(case, query, key, value, parameters, kind.terms))
    for tensor in problem.inputs:
        tensor.requires_grad_(case.direction == "training")
    return problem
