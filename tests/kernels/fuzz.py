"""Random attention calls, every backend against :mod:`.oracle`: the output and all gradients.

    python -m tests.kernels.fuzz --seed 0 --count 10000

runs as many cases as one likes, prints each that fails with what reproduces it, and goes on. A case is all made from
its seed; ``Case`` as printed can be made smaller by hand and given to ``failures``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.kernels import oracle
from whereformer import (
    DenseBias,
    DistanceDecay,
    FactorPair,
    OffsetBias,
    OffsetKeys,
    OffsetQueries,
    OffsetValues,
    Positions,
    attention,
    explain,
)
from whereformer.kernels import BackendChoice, blockwise
from whereformer.kernels.backend_choice import BACKENDS
from whereformer.kernels.terms import position_values

CPU = tuple(name for name in BACKENDS if name != "triton")
TABLES = {kind.__name__: kind for kind in (OffsetBias, OffsetKeys, OffsetQueries, OffsetValues)}


@dataclass(frozen=True)
class TermCase:
    """A term: its kind, what its numbers look like, and its sizes, as far as its kind has them."""

    kind: str
    style: str = "plain"
    size: float = 1.0  # of plain numbers
    low: float = -1e9  # what stands where a style wants a hugely negative number
    length: int = 1
    first: int = 0
    shared: bool = False  # by all heads (tables of vectors) or items
    rank: int = 1
    dtype: str = ""  # another than the value's
    factors: bool = False  # whether vectors meet factors in place of queries and keys


@dataclass(frozen=True)
class Case:
    """All that a call depends on; tensors' numbers come from ``seed``."""

    seed: int
    batch: int
    heads: int
    n_q: int
    n_k: int
    head_dim: int  # 0 is no query
    value_dim: int
    dtype: str = "float32"
    terms: tuple[TermCase, ...] = ()
    size: float = 1.0  # of queries and keys
    mask: str = ""
    documents: str = ""
    positions: str = ""
    step: int = 1
    causal: bool = False
    scale: float | None = None
    layouts: tuple[str, ...] = ("plain",)
    needs: tuple[int, ...] = ()  # the tensors without a gradient
    d_out: str = "random"
    autocast: bool = False
    block_scores: int = blockwise.MAX_BLOCK_SCORES  # few make a short sequence as a long one is
    sharing: int = 1  # query heads for each head of keys
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    lse: bool = False


# --- from a seed to a case


def draw(seed: int, kind: str = "cpu") -> Case:
    """The case of a seed; those of kind "triton" are such as the kernels take, and small: they are interpreted."""
    rng = random.Random(f"{kind} {seed}")
    triton = kind == "triton"

    def one_of(*choices: Any) -> Any:
        return rng.choice(choices)

    def chance(probability: float) -> bool:
        return rng.random() < probability

    batch, heads = one_of(1, 1, 2, 3), rng.randint(1, 4)
    lengths = one_of((1, 24), (1, 24), (1, 24), (20, 100), (20, 100), (85, 420))
    if triton:
        batch, heads, lengths = one_of(1, 2), rng.randint(1, 2), one_of((1, 20), (20, 40))
    elif lengths[1] > 400:
        batch, heads = one_of(1, 1, 2), one_of(1, 2)
    if chance(0.01):
        batch = 0
    n_q = rng.randint(*lengths)
    n_k = n_q if chance(0.5) else rng.randint(*lengths)
    few = random.Random(f"few {seed}")
    if not triton and few.random() < 0.3:  # as in decoding, sometimes with many keys
        n_q, n_k = few.randint(1, 8), few.choice([n_k, n_k, n_k, n_k, few.randint(500, 5000)])
    if chance(0.01):
        n_q, n_k = one_of((0, n_k), (n_q, 0), (0, 0))
    widths = (16, 16, 24, 32) if triton else (1, 2, 3, 5, 8, 16, 16, 24, 32, 64)
    head_dim = 0 if chance(0.15) else one_of(*widths)
    value_dim = head_dim if head_dim and chance(0.7) else one_of(*widths)
    dtype = one_of(*["float32"] * 5, *["bfloat16"] * 3, "float16", *([] if triton else ["float64"]))
    terms = []
    huge = False
    for _ in range(one_of(0, 1, 1, 1, 2, 2, 3, 4)):
        term = _draw_term(rng, n_q, n_k, bool(head_dim), dtype)
        # The sum of two of the lowest numbers is no number.
        if term.style != "plain" and term.low < -1e30:
            if huge:
                term = replace(term, low=-1e9)
            huge = True
        terms.append(term)
    terms += _draw_mirrors(seed, kind, n_q, n_k, bool(head_dim), dtype)
    tables = any(term.kind in TABLES for term in terms)
    positions = one_of("", "", "", "", "affine", "affine", "ids", "ids per item", "one place")
    step = 1
    if tables and chance(0.1):
        positions, step = "affine", one_of(2, 3)
    if not tables and chance(0.15):
        positions = "fractional"
    if not head_dim and not positions:
        n_q = n_k
    causal = chance(0.35)
    count = 4 + 2 * len(terms)
    layouts = ("plain",) if chance(0.5) else tuple(_draw_layout(rng) for _ in range(count))
    needs = () if chance(0.7) else tuple(index for index in range(count) if chance(0.6))
    case = Case(
        seed=seed,
        batch=batch,
        heads=heads,
        n_q=n_q,
        n_k=n_k,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        terms=tuple(terms),
        size=one_of(1.0, 1.0, 1.0, 5.0),
        mask=one_of(*[""] * 6, "right", "right", "left", "holes", "an item", "all"),
        documents=one_of(*[""] * 8, "runs", "mixed"),
        positions=positions,
        step=step,
        causal=causal,
        scale=one_of(None, None, None, None, -0.3, 0.0, 1, 4.0) if head_dim else None,
        layouts=layouts,
        needs=needs,
        d_out=one_of("random", "random", "ones", "transposed"),
        autocast=chance(0.12),
        block_scores=one_of(blockwise.MAX_BLOCK_SCORES, 2**12, 1),
    )
    return _draw_options(rng, case)


def _draw_options(rng: random.Random, case: Case) -> Case:
    """The case with what few calls ask for."""
    sides = [None, 0, 1, 5, case.n_k // 3, case.n_k, rng.randint(0, case.n_k + 3)]
    window = (rng.choice(sides), rng.choice(sides)) if rng.random() < 0.35 else None
    sharing = rng.choice([2, 3]) if case.head_dim and case.heads <= 2 and rng.random() < 0.3 else 1
    softcap = rng.choice([0.5, 3.0, 30.0]) if case.head_dim and rng.random() < 0.2 else None
    return replace(case, sharing=sharing, window=window, softcap=softcap, lse=rng.random() < 0.3)


def _draw_term(rng: random.Random, n_q: int, n_k: int, content: bool, dtype: str) -> TermCase:
    kinds = ["OffsetBias", "OffsetBias", "OffsetValues", "FactorPair", "DenseBias"]
    kind = rng.choice(kinds + ["OffsetKeys"] * content)
    longest = n_q + n_k + 3
    length = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, longest), longest])
    first = rng.choice([0, -length // 2, -length // 2, rng.randint(-longest, longest), -n_q])
    term = TermCase(
        kind,
        length=length,
        first=first,
        shared=rng.random() < 0.5,
        rank=rng.choice([1, 1, 1, 2, 3, 3, 17]),
        dtype=rng.choice(["", "", "float32"] if dtype in ("bfloat16", "float16") else ["", "", "bfloat16"]),
    )
    styles = {
        "OffsetBias": ["window", "forbidden window", "half", "constant"],
        "DenseBias": ["rows", "rows", "columns", "constant", "forbidden pairs", "forbidden rows"],
    }
    if kind in styles:
        lows = [-1e4, -1e9, -1e9, -1e10, "lowest", "lowest"]
        low = rng.choice(lows)
        narrowest = getattr(torch, term.dtype or dtype)
        lowest = max(torch.finfo(float_type).min for float_type in (narrowest, getattr(torch, dtype)))
        if dtype != "float64":
            lowest = max(lowest, torch.finfo(torch.float32).min)
        if dtype == "float16":
            lowest = torch.finfo(narrowest).min
        term = replace(
            term,
            style=rng.choice(["plain"] * 4 + styles[kind]),
            size=rng.choice([1.0, 1.0, 1.0, 1e2, 1e4, 1e9]),
            low=lowest if low == "lowest" else max(low, float(torch.finfo(narrowest).min)),
        )
    return term


def _draw_mirrors(seed: int, kind: str, n_q: int, n_k: int, content: bool, dtype: str) -> list[TermCase]:
    """In some cases, vectors that meet keys or factors, and levels."""
    rng = random.Random(f"mirrors {kind} {seed}")
    if rng.random() < 0.6:
        return []
    kinds = ["OffsetKeys", "OffsetQueries", "OffsetQueries", "DistanceDecay"]
    longest = n_q + n_k + 3
    terms = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        length = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, longest), longest])
        what = rng.choice(kinds)
        terms.append(
            TermCase(
                what,
                style=rng.choice(["plain", "plain", "few levels"]) if what == "DistanceDecay" else "plain",
                size=rng.choice([1.0, 1.0, 30.0]) if what == "DistanceDecay" else 1.0,
                length=length,
                first=rng.choice([0, -length // 2, -length // 2, rng.randint(-longest, longest), -n_q]),
                shared=rng.random() < 0.5,
                rank=rng.choice([1, 1, 2, 3, 16, 17]),
                dtype=rng.choice(["", "", "float32"] if dtype in ("bfloat16", "float16") else ["", "", "bfloat16"]),
                factors=what != "DistanceDecay" and (what == "OffsetKeys" or not content or rng.random() < 0.5),
            )
        )
    return terms


def _draw_layout(rng: random.Random) -> str:
    return rng.choice(["plain", "heads inside", "transposed", "sliced", "one for all heads", "one for all items"])


# --- from a case to a call


class Built:
    """A case's tensors: the call, what it is differentiated by, and the same in float64."""

    def __init__(self, case: Case) -> None:
        self.case, self.made = case, 0
        self.random = torch.Generator().manual_seed(case.seed)
        self.choice = random.Random(case.seed)
        self.dtype = getattr(torch, case.dtype)
        self.leaves: dict[str, Tensor] = {}
        batch, heads = case.batch, case.heads
        self.value = self.tensor("value", self.normal(batch, heads, case.n_k, case.value_dim))
        self.query = self.key = None
        self.heads = heads * case.sharing
        if case.head_dim:
            self.query = self.tensor("query", self.normal(batch, self.heads, case.n_q, case.head_dim) * case.size)
            self.key = self.tensor("key", self.normal(batch, heads, case.n_k, case.head_dim) * case.size)
        self.terms: list[Any] = []
        self.numbers: list[oracle.Table | oracle.Factors | oracle.Decay | oracle.Dense] = []
        for index, term in enumerate(case.terms):
            self.add_term(f"terms[{index}]", term)
        self.options: dict[str, Any] = {"causal": case.causal, "scale": case.scale, "softcap": case.softcap}
        self.options |= {"window": case.window, "return_lse": case.lse}
        self.add_positions()
        self.add_masks()
        self.d_out = self.normal(batch, self.heads, case.n_q, case.value_dim)
        if case.d_out == "ones":
            self.d_out = torch.ones((), dtype=torch.float64).expand(batch, self.heads, case.n_q, case.value_dim)
        elif case.d_out == "transposed":
            self.d_out = self.d_out.transpose(1, 2).contiguous().transpose(1, 2)
        self.d_lse = self.normal(batch, self.heads, case.n_q) if case.lse else None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def tensor(self, name: str, numbers: Tensor, dtype: str = "") -> Tensor:
        """The numbers in the case's next layout, as something with a gradient if it is to have one."""
        layout = self.case.layouts[self.made % len(self.case.layouts)]
        kind = getattr(torch, dtype) if dtype else self.dtype
        finite = torch.finfo(kind)
        # What a narrow type cannot hold stays finite.
        numbers = torch.where(numbers.isneginf(), numbers, numbers.clamp(finite.min, finite.max)).to(kind)
        rows = numbers.dim() == 4
        if layout == "heads inside" and rows:
            numbers = numbers.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "transposed":
            numbers = numbers.mT.contiguous().mT
        elif layout == "one for all heads" and rows:
            numbers = numbers[:, :1].contiguous().expand(numbers.shape)
        elif layout == "one for all items" and rows:
            numbers = numbers[:1].contiguous().expand(numbers.shape)
        if self.made not in self.case.needs:
            numbers = numbers.requires_grad_()
        if layout == "sliced":
            numbers = numbers.repeat_interleave(2, -2)[..., ::2, :]
        if self.made not in self.case.needs:
            self.leaves[name] = numbers
        self.made += 1
        return numbers

    def add_term(self, name: str, term: TermCase) -> None:
        case = self.case
        batch, heads = case.batch, self.heads
        if term.kind in TABLES:
            step = case.step
            shape = (heads, term.length)
            if term.kind != "OffsetBias":
                width = case.value_dim if term.kind == "OffsetValues" else case.head_dim
                shape = (1 if term.shared else heads, term.length, term.rank if term.factors else width)
            numbers = self.normal(*shape) * term.size
            offsets = torch.arange(term.length) + term.first
            forbidden = float("-inf")
            match term.style:
                case "window":
                    numbers[:, offsets.abs() > 2] = term.low
                case "forbidden window":
                    numbers[:, offsets.abs() > 2] = forbidden
                case "half":
                    numbers[: max(1, heads // 2), offsets > 0] = forbidden
                case "constant":
                    numbers[:] = term.low
            table = self.tensor(f"{name}.table", numbers, term.dtype)
            arguments, factors = (table, term.first * step, step), None
            if term.factors:
                which, length = ("query", case.n_q) if term.kind == "OffsetKeys" else ("key", case.n_k)
                numbers = self.normal(1 if case.seed % 2 == 0 else batch, heads, length, term.rank) * term.rank**-0.5
                factors = self.tensor(f"{name}.{which}_factors", numbers, term.dtype)
                arguments += (factors,)
            self.terms.append(TABLES[term.kind](*arguments))
            factor_numbers = None if factors is None else _numbers(factors)
            self.numbers.append(oracle.Table(term.kind, _numbers(table), term.first * step, step, factor_numbers))
        elif term.kind == "DistanceDecay":
            self.add_decay(name, term)
        elif term.kind == "FactorPair":
            # Of products as large as a number of the normal distribution.
            size = term.rank**-0.25
            query, key = (
                self.tensor(
                    f"{name}.{which}_factors",
                    self.normal(1 if shared else batch, heads, length, term.rank) * size,
                    term.dtype,
                )
                for which, length, shared in (
                    ("query", case.n_q, term.shared),
                    ("key", case.n_k, term.shared and case.seed % 2 == 0),
                )
            )
            self.terms.append(FactorPair(query, key))
            self.numbers.append(oracle.Factors(_numbers(query), _numbers(key)))
        else:
            items = 1 if term.shared else batch
            numbers = self.normal(items, heads, case.n_q, case.n_k) * term.size
            draws = torch.rand(numbers.shape, generator=self.random)
            match term.style:
                case "rows":
                    numbers[draws[..., :1].expand(numbers.shape) < 0.3] = term.low
                case "columns":
                    numbers[draws[..., :1, :].expand(numbers.shape) < 0.4] = term.low
                case "constant":
                    numbers[:] = term.low
                case "forbidden pairs":
                    numbers[draws < 0.3] = float("-inf")
                case "forbidden rows":
                    numbers[draws[..., :1].expand(numbers.shape) < 0.3] = float("-inf")
            scores = self.tensor(f"{name}.scores", numbers, term.dtype)
            self.terms.append(DenseBias(scores))
            self.numbers.append(oracle.Dense(_numbers(scores)))

    def add_decay(self, name: str, term: TermCase) -> None:
        case, levels = self.case, []
        for which, length in (("query", case.n_q), ("key", case.n_k)):
            items = 1 if term.shared and (which == "query" or case.seed % 2 == 0) else case.batch
            numbers = self.normal(items, self.heads, length) * term.size
            if term.style == "few levels":
                # Some are equal, where the distance has no slope.
                numbers = numbers.round()
            levels.append(self.tensor(f"{name}.{which}_levels", numbers, term.dtype))
        self.terms.append(DistanceDecay(*levels))
        self.numbers.append(oracle.Decay(*map(_numbers, levels)))

    def add_positions(self) -> None:
        case, choice = self.case, self.choice
        n_q, n_k, step = case.n_q, case.n_k, case.step
        queries: Any = Positions(n_k - n_q, 1, n_q)
        keys: Any = Positions(0, 1, n_k)
        far = n_q + n_k
        items = (case.batch,) if case.positions == "ids per item" else ()
        match case.positions:
            case "affine":
                queries = Positions(step * choice.randint(-far, far), step * choice.choice([1, 1, 2, 3]), n_q)
                keys = Positions(step * choice.randint(-far, far), step * choice.choice([1, 1, 2, 4]), n_k)
            case "ids" | "ids per item":
                queries = torch.randint(-3, n_q + 3, (*items, n_q), generator=self.random)
                keys = torch.randint(-3, n_k + 3, (*items, n_k), generator=self.random).int()
            case "one place":
                keys = torch.full((n_k,), choice.randint(-3, n_k))
            case "fractional":
                queries, keys = (self.normal(n).float() for n in (n_q, n_k))
        if case.positions:
            self.options |= {"query_positions": queries, "key_positions": keys}
        self.positions = [np.atleast_2d(_numbers(position_values(positions))) for positions in (queries, keys)]

    def choice_of(self, backend: str) -> BackendChoice:
        """What the package says of the call."""
        return explain(self.query, self.key, self.value, self.terms, backend=backend, **self.options)

    def add_masks(self) -> None:
        case, choice = self.case, self.choice
        batch, n_q, n_k = case.batch, case.n_q, case.n_k
        if case.mask:
            mask = torch.ones(batch, n_k, dtype=torch.bool)
            for item in range(batch):
                cut = choice.randint(0, n_k)
                match case.mask:
                    case "right":
                        mask[item, cut:] = False
                    case "left":
                        mask[item, :cut] = False
                    case "holes":
                        mask[item] = torch.rand(n_k, generator=self.random) > 0.3
                    case "an item":
                        mask[item] = item > 0
                    case "all":
                        mask[item] = False
            self.options["key_mask"] = mask
        if case.documents:
            ids = [torch.randint(0, 3, (batch, n), generator=self.random) for n in (n_q, n_k)]
            if case.documents == "runs":
                ids = [rows.sort(-1, descending=True).values for rows in ids]
            self.options |= {"query_documents": ids[0], "key_documents": ids[1].int()}

    def oracle_inputs(self, content: Any = None) -> oracle.Inputs:
        """The call in float64; with ``content`` queries, keys and values are first rounded to that type."""
        rows = (self.query, self.key, self.value)
        if content is not None:
            rows = tuple(None if tensor is None else tensor.to(content) for tensor in rows)
        case = self.case
        width = case.head_dim or case.value_dim
        key_mask = _numbers(self.options["key_mask"]) if case.mask else None
        documents = [_numbers(self.options[f"{which}_documents"]) for which in ("query", "key") if case.documents]
        return oracle.Inputs(
            *(None if tensor is None else _numbers(tensor) for tensor in rows),
            self.numbers,
            width**-0.5 if case.scale is None else float(case.scale),
            case.causal,
            *self.positions,
            key_mask,
            tuple(documents) or None,
            case.window or (None, None),
            case.softcap,
        )


def _numbers(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


# --- the comparison


def results(built: Built, backend: str) -> dict[str, Tensor]:
    """A backend's output and gradients, by name."""
    case = built.case
    with mock.patch.object(blockwise, "MAX_BLOCK_SCORES", case.block_scores):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            outs = attention(built.query, built.key, built.value, built.terms, backend=backend, **built.options)
        outs = outs if case.lse else (outs,)
        tensors = dict(zip(("out", "lse"), (result.detach() for result in outs), strict=False))
        # A call in which only empty tensors have gradients need not have one.
        if any(leaf.numel() for leaf in built.leaves.values()):
            # The log of sums depends on fewer tensors than the output.
            pairs = [
                (result, gradient)
                for result, gradient in zip(outs, (built.d_out, built.d_lse), strict=False)
                if result.requires_grad
            ]
            gradients = torch.autograd.grad(
                [result for result, _ in pairs],
                list(built.leaves.values()),
                [gradient.to(result.dtype) for result, gradient in pairs],
                materialize_grads=True,
            )
            tensors |= dict(zip(built.leaves, gradients, strict=True))
    return tensors


def _precision(dtype: torch.dtype, rounds_scores: bool) -> oracle.Precision:
    if dtype not in (torch.bfloat16, torch.float16):
        return oracle.Precision(torch.finfo(dtype).eps / 2)
    limits = torch.finfo(dtype)
    narrow = limits.eps / 2
    return oracle.Precision(
        torch.finfo(torch.float32).eps / 2,
        narrow,
        narrow if rounds_scores else 0.0,
        limits.smallest_normal * limits.eps,
    )


def failures(case: Case, backends: tuple[str, ...] = CPU) -> list[str]:
    """What is wrong with a case, a line for each backend and tensor."""
    built = Built(case)
    lines: list[str] = []
    truths: dict[Any, list[oracle.Oracle]] = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        missing = {"native"} & built.choice_of("auto").unavailable.keys()
        choices = {name: built.choice_of(name) for name in backends if name not in missing}
    for backend, chosen in choices.items():
        uses_sdpa = chosen.backend == "sdpa"
        autocast = uses_sdpa and case.autocast and built.dtype != torch.float64
        dtype = torch.bfloat16 if autocast else built.dtype
        # In half precision, torch's own attention may round scores.
        if (dtype, uses_sdpa) not in truths:
            inputs = built.oracle_inputs(dtype if autocast else None)
            precision = _precision(dtype, rounds_scores=uses_sdpa)
            d_out = _numbers(built.d_out.to(dtype))
            wide = torch.promote_types(dtype, torch.float32)
            d_lse = None if built.d_lse is None else _numbers(built.d_lse.to(wide))
            rounded = oracle.Oracle(inputs, d_out, precision, exact=False, d_lse=d_lse)
            truths[dtype, uses_sdpa] = [rounded]
            if rounded.swallows:
                truths[dtype, uses_sdpa].append(oracle.Oracle(inputs, d_out, precision, exact=True, d_lse=d_lse))
        try:
            tensors = results(built, backend)
        except Exception as error:
            lines.append(f"{backend}: {type(error).__name__}: {error}")
            continue
        wrong = [_differences(built, tensors, truth, dtype) for truth in truths[dtype, uses_sdpa]]
        lines += [f"{backend}: {line}" for line in min(wrong, key=len)]
    return lines


def _differences(built: Built, tensors: dict[str, Tensor], truth: oracle.Oracle, dtype: torch.dtype) -> list[str]:
    """Describe what differs from the truth."""
    lines = []
    for name, tensor in tensors.items():
        results_in = {"out": dtype, "lse": torch.promote_types(dtype, torch.float32)}
        wanted_dtype = results_in[name] if name in results_in else built.leaves[name].dtype
        if tensor.dtype != wanted_dtype:
            lines.append(f"{name} is {tensor.dtype}, expected {wanted_dtype}")
        limits = torch.finfo(tensor.dtype)
        narrow = limits.eps / 2
        expected = truth.results[name]
        numbers = _numbers(tensor)
        if numbers.shape != expected.number.shape:
            lines.append(f"{name} has shape {numbers.shape}, expected {expected.number.shape}")
            continue
        error = expected.error + 2 * narrow * abs(expected.number)
        if tensor.dtype == torch.float16:
            error = np.where(expected.error > 0, error + limits.smallest_normal * narrow, error)
        wanted_numbers = expected.number
        if name == "lse":
            # GPU kernels compute in units of log2, where the lowest number would be none; they take a quarter of it.
            lowest = torch.finfo(torch.float32).min / 4
            numbers, wanted_numbers = (
                np.where(np.isfinite(array), np.maximum(array, lowest), array) for array in (numbers, expected.number)
            )
        checks = [("", numbers, wanted_numbers, error)]
        if np.isfinite(numbers).all():
            checks += truth.sums(name, numbers, narrow)
        for what, ours, theirs, bound in checks:
            if line := _worst(ours, theirs, bound + 1e-30):
                lines.append(f"{name}{', ' * bool(what)}{what}{line}")
    return lines


def _worst(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> str:
    """Where a number is farthest out of its bounds; nothing if none is."""
    with np.errstate(all="ignore"):
        excess = np.where(np.isfinite(actual), abs(actual - expected) / bound, np.inf)
    # Of a row that may not attend to anything, the sum of exponentials is 0.
    excess = np.where(np.isneginf(expected) & np.isneginf(actual), 0.0, excess)
    if not excess.size or excess.max() <= 1:
        return ""
    worst = np.unravel_index(excess.argmax(), excess.shape)
    where = ", ".join(str(int(index)) for index in worst)
    return (
        f"[{where}] = {actual[worst]:.8g}, expected {expected[worst]:.8g} ± {bound[worst]:.2g}"
        f" ({int((excess > 1).sum())} of {excess.size} numbers are off)"
    )


def report(seed: int, kind: str = "cpu") -> str:
    """What is wrong with a seed's case, and how to see it again; nothing if nothing is."""
    case = draw(seed, kind)
    lines = failures(case, CPU if kind == "cpu" else (kind,))
    if not lines:
        return ""
    again = f"python -m tests.kernels.fuzz --kind {kind} --seed {seed} --count 1"
    again = "TRITON_INTERPRET=1 " * (kind == "triton") + again
    return "\n".join([again, f"  {case}", *(f"  {line}" for line in lines)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--kind", choices=("cpu", "triton"), default="cpu")
    options = parser.parse_args()
    if options.kind == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            # Triton reads it when it is imported, which torch may have done.
            parser.error("--kind triton needs the environment variable TRITON_INTERPRET=1")
        from tests.kernels import interpreter

        interpreter.mend()
    torch.set_num_threads(1)
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        if text := report(seed, options.kind):
            failed += 1
            print(text, flush=True)
    print(f"{failed} of {options.count} cases fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
