"""The reference, and what ``backend="auto"`` chooses, against an independent oracle; and what the reference promises.

The oracle has the output and all gradients of named calls here, and of random ones in :mod:`.test_differential`. The
numbers of a call, and positions, masks and documents of the kind that it names, follow from its seed.
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.every import EVERY
from tests.kernels import fuzz
from tests.kernels.fuzz import Built, Case, TermCase
from tests.kernels.oracle import Oracle, Precision
from whereformer import DenseBias, OffsetBias, attention, attention_weights

PLAIN = Case(seed=0, batch=2, heads=3, n_q=5, n_k=7, head_dim=4, value_dim=4, dtype="float64")
TERMS = {
    "bias": TermCase("OffsetBias", length=5, first=-2),
    "bias of one number": TermCase("OffsetBias", length=1, first=3),
    "bias right of all offsets": TermCase("OffsetBias", length=4, first=50),
    "bias wider than the grid": TermCase("OffsetBias", length=41, first=-20),
    "bias that forbids": TermCase("OffsetBias", "forbidden window", length=9, first=-4),
    "keys": TermCase("OffsetKeys", length=5, first=-3, shared=True),
    "keys per head": TermCase("OffsetKeys", length=4, first=-1),
    "keys with factors": TermCase("OffsetKeys", length=6, first=-4, rank=3, factors=True, shared=True),
    "keys with a gate": TermCase("OffsetKeys", length=4, first=-1, rank=1, factors=True),
    "queries": TermCase("OffsetQueries", length=5, first=-2, shared=True),
    "queries per head": TermCase("OffsetQueries", length=4, first=-2),
    "queries with factors": TermCase("OffsetQueries", length=5, first=-3, rank=3, factors=True),
    "queries with a gate": TermCase("OffsetQueries", length=3, first=0, rank=1, factors=True, shared=True),
    "decay": TermCase("DistanceDecay"),
    "decay of all rows": TermCase("DistanceDecay", shared=True),
    "values": TermCase("OffsetValues", length=5, first=-3, shared=True),
    "values per head": TermCase("OffsetValues", length=4, first=-1),
    "factors": TermCase("FactorPair", rank=2),
    "factors of all rows": TermCase("FactorPair", rank=3, shared=True),
    "dense": TermCase("DenseBias"),
    "dense of all rows": TermCase("DenseBias", shared=True),
    "dense that forbids pairs": TermCase("DenseBias", "forbidden pairs", shared=True),
    "dense that forbids rows": TermCase("DenseBias", "forbidden rows"),
}
CONTENT = {name for name, term in TERMS.items() if term.kind in ("OffsetKeys", "OffsetQueries") and not term.factors}
"""Those that need queries and keys."""
KINDS = {
    "no terms": (),
    "tables": ("bias", "keys per head", "values"),
    "mirrored": ("queries per head", "queries with factors", "keys with factors", "decay"),
    "pairs": ("factors", "dense", "bias"),
    "all": tuple(TERMS),
}
OPTIONS = {
    "causal": {"causal": True},
    "causal, more queries than keys": {"causal": True, "n_q": 9},
    "causal, one query": {"causal": True, "n_q": 1},
    **{f"scale of {scale}": {"scale": scale} for scale in (0.0, 1, -0.7)},
    **{f"mask, {mask}": {"mask": mask} for mask in ("right", "left", "holes", "an item", "all")},
    "documents in order": {"documents": "runs"},
    "documents in any order": {"documents": "mixed", "mask": "holes", "causal": True},
    **{f"positions, {kind}": {"positions": kind} for kind in ("affine", "ids", "ids per item", "one place")},
    **{f"causal positions, {kind}": {"positions": kind, "causal": True} for kind in ("affine", "ids", "ids per item")},
    "tables with a step": {"positions": "affine", "step": 3},
    "window": {"window": (2, 1)},
    "window of positions": {"window": (9, None), "positions": "ids per item"},
    "soft cap": {"softcap": 0.6},
    "heads that share keys": {"heads": 2, "sharing": 3},
    "log-sum-exps": {"lse": True, "causal": True, "mask": "an item"},
    "values of their own width": {"value_dim": 6},
    **{f"layout, {layout}": {"layouts": (layout,)} for layout in ("heads inside", "transposed", "sliced")},
    "shared memory": {"layouts": ("one for all heads", "one for all items"), "d_out": "ones"},
}
LENGTHS = [(1, 1), (2, 2), (1, 6), (5, 7), (7, 5), (2, 9)]  # (n_q, n_k)


def case_of(names, **changes):
    return replace(PLAIN, terms=tuple(TERMS[name] for name in names), **changes)


def check(*names, **changes):
    """The output and every gradient of a call with these terms are the oracle's."""
    wrong = fuzz.failures(case_of(names, **changes), ("reference", "auto"))
    assert not wrong, "\n".join(wrong)


def reference(*args, **options):
    return attention(*args, **options, backend="reference")


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def content(n_q, n_k):
    return tuple(torch.randn(2, 3, length, 4, dtype=torch.float64) for length in (n_q, n_k, n_k))


# --- what is computed


@pytest.mark.parametrize("term", TERMS)
def test_each_term(term):
    for n_q, n_k in LENGTHS:
        check(term, n_q=n_q, n_k=n_k)
    check(term, causal=True, mask="holes")


@pytest.mark.parametrize("term", [term for term in TERMS if term not in CONTENT])
def test_each_term_without_content(term):
    check(term, head_dim=0, n_k=5)


def test_without_content_the_number_of_queries_follows_from_positions():
    for positions in ("affine", "ids", "ids per item"):
        check("bias", head_dim=0, n_q=2, n_k=5, positions=positions)
    check("factors of all rows", "values", head_dim=0, n_q=2, n_k=5, positions="affine")


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option(option, kinds):
    for seed in range(2 if EVERY else 1):
        check(*KINDS[kinds], **OPTIONS[option], seed=seed)


@pytest.mark.parametrize("n_q", [0, 3])
@pytest.mark.parametrize("term", ["", *TERMS])
def test_sizes_of_nothing(term, n_q):
    names = [term] if term else []
    check(*names, n_q=n_q, n_k=5 * (n_q == 0), causal=True)
    check(*names, batch=0, mask="right")


@pytest.mark.parametrize("names", [(), ("dense",), ("factors",)])
@pytest.mark.parametrize("head_dim", [0, 4])
def test_fractional_positions(names, head_dim):
    check(*names, positions="fractional", causal=True, head_dim=head_dim)


def test_nothing_at_all_is_the_mean_of_the_values():
    value = content(5, 5)[2]
    assert_same(reference(None, None, value), value.mean(2, keepdim=True).expand_as(value))


def test_forbidden_pairs_send_no_gradient_however_large_the_scores():
    query, key, value = (tensor.requires_grad_() for tensor in content(4, 4))
    scores = torch.full((1, 3, 4, 4), 1e30, dtype=torch.float64)
    scores[..., 2] = -math.inf
    out = reference(query, key, value, [DenseBias(scores.requires_grad_())], causal=True)
    gradients = torch.autograd.grad(out.sum(), (query, key, value, scores))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[2][:, :, 2] == 0).all()


def test_second_derivatives():
    inputs = [tensor[:1, :2].requires_grad_() for tensor in content(2, 3)]
    table = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *x: reference(*x[:3], [OffsetBias(x[3], -1)]), (*inputs, table))


# --- dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("term", [None, *TERMS])
def test_half_precision_is_rounded_once(term, dtype):
    """All is computed in float32, so the output is off by one rounding and by what float32 loses."""
    names = [term] if term else []
    built = Built(case_of(names, n_q=9, n_k=33, dtype=dtype))
    out = reference(built.query, built.key, built.value, built.terms)
    truth = Oracle(built.oracle_inputs(), built.d_out.numpy(), Precision(0.0), exact=True).results["out"].number
    info = torch.finfo(out.dtype)
    torch.testing.assert_close(out.double(), torch.from_numpy(truth), rtol=0.51 * info.eps, atol=info.tiny + 1e-6)
    check(*names, n_q=9, n_k=33, dtype=dtype)


def test_tables_may_stay_in_float32():
    term = replace(TERMS["bias"], dtype="float32")
    for dtype in ("bfloat16", "float16", "float64"):
        wrong = fuzz.failures(replace(PLAIN, dtype=dtype, terms=(term,), causal=True), ("reference", "auto"))
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_autocast_changes_nothing(dtype):
    built = Built(case_of(("bias", "keys", "values", "factors"), dtype=dtype))
    inputs = built.query, built.key, built.value

    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = reference(*inputs, built.terms), attention_weights(*inputs, built.terms)
        results.append((*outputs, *torch.autograd.grad(outputs[0].square().sum(), inputs)))
    assert all(map(torch.equal, *results))
    assert {tensor.dtype for tensor in results[1]} == {getattr(torch, dtype)}


# --- the weights


def test_weights_are_those_of_the_output():
    built = Built(case_of(("bias", "keys", "factors", "dense that forbids rows"), causal=True, mask="holes"))
    query, key, value = built.query, built.key, built.value
    options = {"causal": True, "key_mask": built.options["key_mask"]}
    weights = attention_weights(query, key, value, built.terms, **options)
    assert weights.shape == (2, 3, 5, 7)
    assert_same(weights @ value, reference(query, key, value, built.terms, **options))
    identity = torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7)
    assert_same(weights, reference(query, key, identity, built.terms, **options))
    sums = weights.sum(-1)
    assert ((sums - 1).abs() < 1e-12).logical_or(sums == 0).all()
    assert (sums == 0).any()


def test_weights_of_half_precision_come_in_float32():
    weights = attention_weights(*(tensor.bfloat16() for tensor in content(4, 6)))
    assert weights.dtype == torch.float32
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
