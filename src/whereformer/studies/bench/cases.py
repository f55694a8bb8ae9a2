"""The cases of the attention benchmark: each is a kind of term at some size, with its random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Positions, Term
from ...positions.deberta import table_row
from ...positions.t5 import buckets

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
SHORTEST = 0.4
"""The length of the shortest of sequences that differ in length, as a share of the longest; others lie between."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A case to compute: a kind in :data:`KINDS`, ``n`` keys, sizes, a name in :data:`DTYPES`, and the direction."""

    kind: str
    n: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    training: bool

    @property
    def direction(self) -> str:
        """ "training" is forward and backward with all gradients, "forward" has no gradients."""
        return "training" if self.training else "forward"


@dataclass(frozen=True)
class Kind:
    """What a case adds to attention.

    Args:
        about: a short description for people.
        draw: draws a case's random parameters, whose gradients training needs. Tables are always float32, because
            their gradients are sums over very many pairs.
        terms: makes the terms for :func:`whereformer.attention` from such parameters and a number of keys.
        causal, padded: whether queries see only earlier keys, and whether sequences differ in length.
        stride: the stride of query positions; keys have stride 1.
        shares_keys: whether up to four neighboring heads share their keys and values.
        packed: whether sequences differ in length and lie one after another.
        options: makes more keyword arguments of :func:`whereformer.attention` from the parameters.
    """

    about: str
    draw: Callable[[Case], Parameters]
    terms: Callable[[Parameters, int], tuple[Term, ...]]
    causal: bool = False
    padded: bool = False
    stride: int = 1
    shares_keys: bool = False
    packed: bool = False
    options: Callable[[Parameters], dict[str, Any]] = lambda _: {}


def _draw_nothing(case: Case) -> Parameters:
    return {}


def _nothing(parameters: Parameters, n: int) -> tuple[Term, ...]:
    return ()


def _draw_table(case: Case, columns: Callable[[int], int]) -> Parameters:
    return {"table": torch.randn(case.heads, columns(case.n))}


def _free(parameters: Parameters, n: int) -> tuple[Term, ...]:
    return (OffsetBias(parameters["table"], 1 - n),)


_FREE = partial(_draw_table, columns=lambda n: 2 * n - 1)


def _draw_t5(case: Case) -> Parameters:
    return {"weight": torch.randn(case.heads, 32)}


def _t5(parameters: Parameters, n: int) -> tuple[Term, ...]:
    weight = parameters["weight"]
    return (OffsetBias(weight[:, _t5_buckets(weight.device)], -T5_REACH),)


@cache
def _t5_buckets(device: torch.device) -> Tensor:
    return torch.tensor(buckets(32, 128, True)[128 - T5_REACH : 128 + T5_REACH + 1], device=device)


def _draw_tisa(case: Case) -> Parameters:
    size = (case.heads, TISA_KERNELS)
    return {"amplitude": torch.randn(size), "sharpness": 0.1 + torch.rand(size), "center": 5 * torch.randn(size).tanh()}


def tisa_curve(parameters: Parameters, reach: int) -> Tensor:
    """Return the values of TISA's kernels at offsets -reach to reach, (heads, 2 * reach + 1)."""
    amplitude, sharpness, center = (parameters[name].unsqueeze(1) for name in ("amplitude", "sharpness", "center"))
    offsets = torch.arange(-reach, reach + 1, device=center.device, dtype=center.dtype).unsqueeze(-1)
    return (amplitude * torch.exp(-sharpness.abs() * (offsets - center) ** 2)).sum(-1)


def _tisa(parameters: Parameters, n: int) -> tuple[Term, ...]:
    return (OffsetBias(tisa_curve(parameters, TISA_REACH), -TISA_REACH),)


def _draw_shaw(case: Case) -> Parameters:
    size = (1, 2 * SHAW_CLIP + 1, case.head_dim)
    return {"keys": torch.randn(size), "values": torch.randn(size)}


def _shaw(parameters: Parameters, n: int) -> tuple[Term, ...]:
    return OffsetKeys(parameters["keys"], -SHAW_CLIP), OffsetValues(parameters["values"], -SHAW_CLIP)


def _draw_inkling(case: Case) -> Parameters:
    factors = torch.randn(case.batch, case.heads, case.n, INKLING_RANK) * INKLING_RANK**-0.5
    return {"profiles": torch.randn(1, INKLING_EXTENT, INKLING_RANK), "query_factors": factors.to(DTYPES[case.dtype])}


def _inkling(parameters: Parameters, n: int) -> tuple[Term, ...]:
    # Keys to the right and those that are farther get nothing.
    table = functional.pad(parameters["profiles"], (0, 0, 1, 1))
    return (OffsetKeys(table, -INKLING_EXTENT, query_factors=parameters["query_factors"]),)


def _draw_deberta(case: Case) -> Parameters:
    size = (case.heads, 2 * DEBERTA_BUCKETS, case.head_dim)
    return {name: torch.randn(size) for name in ("keys", "queries")}


def _deberta(parameters: Parameters, n: int) -> tuple[Term, ...]:
    rows = _deberta_rows(parameters["keys"].device)
    # The gradient of an index would take longer than attention.
    keys, queries = (parameters[name].index_select(1, rows) for name in ("keys", "queries"))
    return OffsetKeys(keys, -DEBERTA_REACH), OffsetQueries(queries, -DEBERTA_REACH)


@cache
def _deberta_rows(device: torch.device) -> Tensor:
    offsets = range(-DEBERTA_REACH, DEBERTA_REACH + 1)
    return torch.tensor([table_row(offset, DEBERTA_BUCKETS, DEBERTA_REACH) for offset in offsets], device=device)


def _draw_factors(case: Case) -> Parameters:
    size = (1, case.heads, case.n, FACTOR_RANK)
    scale = FACTOR_RANK**-0.25
    dtype = DTYPES[case.dtype]
    return {name: (scale * torch.randn(size)).to(dtype) for name in ("query_factors", "key_factors")}


def _factors(parameters: Parameters, n: int) -> tuple[Term, ...]:
    return (FactorPair(parameters["query_factors"], parameters["key_factors"]),)


def _draw_dense(case: Case) -> Parameters:
    return {"scores": torch.randn(1, case.heads, case.n, case.n, dtype=DTYPES[case.dtype])}


def _dense(parameters: Parameters, n: int) -> tuple[Term, ...]:
    return (DenseBias(parameters["scores"]),)


def _draw_sinks(case: Case) -> Parameters:
    return {"sinks": torch.randn(case.heads)}


POSITIONS = {
    "none": Kind("no terms", _draw_nothing, _nothing),
    "bias": Kind("a number per head and offset", _FREE, _free),
    "t5": Kind("T5's 32 buckets, which reach 91 tokens", _draw_t5, _t5),
    "tisa": Kind("TISA's 5 kernels, which reach 30 tokens", _draw_tisa, _tisa),
    "shaw": Kind("Shaw's vectors for keys and values, clipped at 16 tokens", _draw_shaw, _shaw),
    "factors": Kind("a product of rank 66, as in TUPE", _draw_factors, _factors),
    "dense": Kind("a number per head, query and key", _draw_dense, _dense),
    "funnel": Kind("bias, with only every second query, as in Funnel-Transformer", _FREE, _free, stride=2),
    "padded": Kind("bias, in a batch of lengths from 100% down to 40%", _FREE, _free, padded=True),
    "causal": Kind(
        "bias, where each query sees only earlier keys", partial(_draw_table, columns=lambda n: n), _free, causal=True
    ),
    "inkling": Kind(
        f"Inkling's bias: {INKLING_RANK} numbers of each query meet profiles over {INKLING_EXTENT} tokens before it",
        _draw_inkling,
        _inkling,
    ),
    "deberta": Kind(
        f"DeBERTa's two terms, with {DEBERTA_BUCKETS} buckets on each side, which reach {DEBERTA_REACH} tokens",
        _draw_deberta,
        _deberta,
    ),
}
"""What positions add."""

FEATURES = {
    "window": Kind(
        f"no terms, in a window of {WINDOW} tokens before and after",
        _draw_nothing,
        _nothing,
        options=lambda _: {"window": WINDOW},
    ),
    "grouped": Kind("bias, where up to four heads share their keys and values", _FREE, _free, shares_keys=True),
    "lse": Kind(
        "bias, and the log of each row's sum of exponentials is returned too",
        _FREE,
        _free,
        options=lambda _: {"return_lse": True},
    ),
    "softcap": Kind(
        f"no terms, with scores capped at {SOFTCAP:g}", _draw_nothing, _nothing, options=lambda _: {"softcap": SOFTCAP}
    ),
    "sinks": Kind("no terms, with a learned sink per head", _draw_sinks, _nothing, options=lambda given: dict(given)),
    "varlen": Kind("bias, in sequences of lengths from 100% down to 40% without padding", _FREE, _free, packed=True),
}
"""What attention offers besides positions."""

KINDS = POSITIONS | FEATURES


@dataclass(frozen=True)
class BenchProblem:
    """A case's tensors. The query is (batch, heads, n_q, head_dim), key and value are (batch, key heads, n, head_dim).

    If sequences lie one after another, ``cu_seqlens`` tells where they begin, and the batch is 1.
    """

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    parameters: Parameters
    causal: bool = False
    key_mask: Tensor | None = None
    query_positions: Positions | None = None
    key_positions: Positions | None = None
    cu_seqlens: Tensor | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms, made anew from the parameters as a model does in each forward."""
        return KINDS[self.case.kind].terms(self.parameters, self.case.n)

    @property
    def inputs(self) -> list[Tensor]:
        """Query, key, value and all parameters."""
        return [self.query, self.key, self.value, *self.parameters.values()]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of :func:`whereformer.attention`."""
        return {**self.positions, **KINDS[self.case.kind].options(self.parameters)}

    @property
    def positions(self) -> dict[str, Any]:
        """Those that are about positions and masks."""
        names = ("causal", "key_mask", "query_positions", "key_positions")
        return {name: getattr(self, name) for name in names}

    def offsets(self) -> Tensor:
        """Return all offsets, (n_q, n)."""
        keys = torch.arange(self.case.n, device=self.query.device)
        queries = keys if self.query_positions is None else self.query_positions.values(self.query.device)
        return keys - queries.unsqueeze(-1)

    def plain(self) -> BenchProblem:
        """Return the same content without terms, causality and other options; padding stays."""
        return replace(self.without_terms(), causal=False)

    def without_terms(self) -> BenchProblem:
        """Return the same content without terms and what comes with them; padding and causality stay."""
        return replace(self, case=replace(self.case, kind="none"), parameters={})

    def exact(self) -> BenchProblem:
        """Return the same problem in float64."""

        def exact(tensor: Tensor) -> Tensor:
            return tensor.detach().double().requires_grad_(tensor.requires_grad)

        parameters = {name: exact(tensor) for name, tensor in self.parameters.items()}
        return replace(
            self, query=exact(self.query), key=exact(self.key), value=exact(self.value), parameters=parameters
        )


def make_problem(case: Case, device: torch.device) -> BenchProblem:
    """Make the random tensors of a case, always the same ones."""
    kind = KINDS[case.kind]
    shares = torch.linspace(1, SHORTEST, case.batch) if case.batch > 1 else torch.tensor([(1 + SHORTEST) / 2])
    lengths = (shares * case.n).ceil().long()
    batch, n = (1, int(lengths.sum())) if kind.packed else (case.batch, case.n)
    key_heads = case.heads // math.gcd(case.heads, 4) if kind.shares_keys else case.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        n_q = math.ceil(n / kind.stride)
        query, key, value = (
            torch.randn(batch, heads, length, case.head_dim).to(device, DTYPES[case.dtype])
            for heads, length in ((case.heads, n_q), (key_heads, n), (key_heads, n))
        )
        parameters = {name: tensor.to(device) for name, tensor in kind.draw(case).items()}
    problem = BenchProblem(case, query, key, value, parameters, causal=kind.causal)
    for tensor in problem.inputs:
        tensor.requires_grad_(case.training)
    if kind.padded:
        mask = torch.arange(case.n, device=device) < lengths.to(device).unsqueeze(-1)
        problem = replace(problem, key_mask=mask)
    if kind.packed:
        problem = replace(problem, cu_seqlens=torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32, device=device))
    if kind.stride > 1:
        grid = Positions(0, kind.stride, n_q)
        problem = replace(problem, query_positions=grid, key_positions=Positions(0, 1, case.n))
    return problem
