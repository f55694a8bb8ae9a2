"""Random calls in every backend against an independent oracle; :mod:`.fuzz` runs any number of them by hand."""

from dataclasses import replace

import pytest
import torch

from tests.every import EVERY
from tests.kernels import fuzz
from tests.kernels.cases import need_triton
from tests.kernels.fuzz import Case, TermCase

FEW, MANY = 24, 460 if EVERY else 260
FEW_INTERPRETED, MANY_INTERPRETED = 3, 70 if EVERY else 40


def seeds(few, many, *more_seeds):
    quick = {*range(few), *more_seeds}
    return [seed if seed in quick else pytest.param(seed, marks=pytest.mark.slow) for seed in range(many)]


@pytest.mark.parametrize("seed", seeds(FEW, MANY))
def test_cpu_backends_are_within_rounding(seed):
    assert not (wrong := fuzz.report(seed)), wrong


@pytest.fixture
def interpreted():
    if torch.cuda.is_available():
        pytest.skip("the calls are on the CPU")
    need_triton()


# Kernels also compute keys beyond the last, which they do not store. With seed 11 a bias overflows there, and a table
# of queries reads the sums of these keys.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("seed", seeds(FEW_INTERPRETED, MANY_INTERPRETED, 11))
def test_triton_is_within_rounding(seed, interpreted):
    assert not (wrong := fuzz.report(seed, "triton")), wrong


# --- cases that were wrong once

PLAIN = Case(seed=0, batch=1, heads=2, n_q=257, n_k=257, head_dim=16, value_dim=16)
LOWEST = torch.finfo(torch.float32).min
ONCE_WRONG = {
    "factors alone in bfloat16": replace(
        PLAIN, n_q=91, n_k=91, head_dim=0, dtype="bfloat16", terms=(TermCase("FactorPair", rank=8),)
    ),
    **{
        f"rows of {low:.2g}": replace(PLAIN, terms=(TermCase("DenseBias", "rows", low=low),))
        for low in (-1e4, -1e9, -1e10, LOWEST)
    },
    "keys beyond a window of the lowest number": replace(
        PLAIN, batch=2, mask="left", terms=(TermCase("OffsetBias", "window", low=LOWEST, length=9, first=-4),)
    ),
    "biases of 1e4": replace(PLAIN, terms=(TermCase("OffsetBias", size=1e4, length=9, first=-4),)),
    "a forbidden window": replace(
        PLAIN, batch=2, mask="left", terms=(TermCase("OffsetBias", "forbidden window", length=9, first=-4),)
    ),
    "causal with a negative scale": replace(PLAIN, n_q=8, n_k=8, causal=True, scale=-0.3),
    "causal with a scale of zero": replace(PLAIN, n_q=8, n_k=8, causal=True, scale=0.0),
}
BETWEEN = ("rows of -1e+09", "rows of -1e+10")
"""Cases whose neighbors on both sides are among the quick tests."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if dtype == case.dtype and name not in BETWEEN else pytest.mark.slow)
        for name, case in ONCE_WRONG.items()
        for dtype in ("float32", "bfloat16")
    ],
)
def test_what_was_wrong_once(name, dtype):
    case = replace(ONCE_WRONG[name], dtype=dtype)
    if dtype == "bfloat16":
        case = replace(case, terms=tuple(replace(term, dtype="float32") for term in case.terms))
    assert not (wrong := fuzz.failures(case)), "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_wrong_once_in_triton(name, interpreted):
    case = ONCE_WRONG[name]
    case = replace(case, n_q=min(case.n_q, 37), n_k=min(case.n_k, 37))
    assert not (wrong := fuzz.failures(case, ("triton",))), "\n".join(wrong)


# --- that the oracle would notice


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_errors_of_a_thousandth_are_noticed(seed, monkeypatch):
    """Every result of an ordinary float32 call, made larger by 0.1%, is refused."""
    kinds = ("OffsetBias", "OffsetKeys", "OffsetQueries", "OffsetValues", "FactorPair", "DenseBias")
    terms = tuple(TermCase(kind, length=5, first=-2, rank=2) for kind in kinds)
    terms += tuple(TermCase(kind, length=5, first=-2, rank=2, factors=True) for kind in ("OffsetKeys", "OffsetQueries"))
    terms += (TermCase("DistanceDecay"),)
    random_case = fuzz.draw(seed)
    case = replace(PLAIN, seed=seed, n_q=max(8, random_case.n_q), n_k=max(8, random_case.n_k), head_dim=8, terms=terms)
    right = fuzz.results
    names = list(right(fuzz.Built(case), "reference"))
    assert len(names) == 17
    for name in names:

        def wrong(built, backend, name=name):
            tensors = right(built, backend)
            return tensors | {name: tensors[name] * 1.001}

        monkeypatch.setattr(fuzz, "results", wrong)
        lines = fuzz.failures(case, ("reference",))
        assert lines, name
        assert all(line.startswith(f"reference: {name}") for line in lines)
