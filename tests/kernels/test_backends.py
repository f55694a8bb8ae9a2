"""Every fast backend against the reference in float64, with the same tests for all.

They run on a GPU if there is one; else Triton's kernels run in its interpreter.
"""

import math
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

from tests.kernels.cases import (
    BATCH,
    DEVICE,
    DIM,
    EVERY_KIND,
    HEADS,
    JOINED,
    MIRRORED,
    SEED,
    TABLES,
    TERMS,
    check,
    content,
    error,
    need_native,
    need_triton,
    output_gradient,
    random,
    relative_error,
    run,
    terms_of,
    with_log_sums,
)
from whereformer import DenseBias, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Positions, attention
from whereformer.kernels import blockwise, remember
from whereformer.kernels.backend_choice import OPERATORS

WAYS = ("blockwise in small blocks", *OPERATORS)


on_cpu = pytest.mark.parametrize("fast", [way for way in WAYS if way != "triton"], indirect=True)


# Triton's interpreter is slow; what every day's tests ask of it is in test_triton.
@pytest.fixture(params=[pytest.param(way, marks=pytest.mark.slow) if way == "triton" else way for way in WAYS])
def fast(request, monkeypatch):
    """A fast backend's name; blocks of few queries make a short sequence as a long one is."""
    name, _, how = request.param.partition(" ")
    if how:
        monkeypatch.setattr(blockwise, "_rows_per_block", lambda problem: 7)
    if name == "native":
        need_native()
    elif name == "triton":
        need_triton()
    return name


@pytest.fixture(params=[EVERY_KIND, MIRRORED], ids=["every_kind", "mirrored"])
def kinds(request):
    """Names of terms."""
    return request.param


@pytest.fixture(params=[TABLES, ("queries", "keys_with_a_gate")], ids=["tables", "mirrored"])
def tables(request):
    """Names of terms with tables over offsets."""
    return request.param


# --- what is computed

LENGTHS = [(1, 1), (2, 2), (1, 35), (33, 5), (35, 40)]


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
def test_content_alone(fast, n_q, n_k):
    check(fast, content(n_q, n_k), causal=n_q == n_k)


@pytest.mark.parametrize("term", TERMS)
def test_each_term(fast, term):
    check(fast, content(33, 40), terms_of([term], 33, 40))


ALONE = {
    "all keys": {},
    "causal": {"causal": True},
    "a window that the first blocks of queries do not reach": {
        "window": (2, 0),
        "query_positions": Positions(-20, 1, 33),
    },
    "a window that reaches nothing": {"window": (3, 0), "query_positions": Positions(100, 1, 33)},
    "a window that reaches nothing at explicit positions": {
        "window": (3, 0),
        "query_positions": torch.arange(33) + 100,
    },
    "all keys masked": {"key_mask": torch.zeros(BATCH, 40, dtype=torch.bool)},
}


@on_cpu
@pytest.mark.parametrize(
    ("term", "case"),
    [
        pytest.param(term, case, marks=() if case == "all keys" or term in EVERY_KIND + MIRRORED else pytest.mark.slow)
        for term in TERMS
        for case in ALONE
    ],
)
def test_a_single_tensor_needs_a_gradient(fast, term, case):
    """Any one of a call's tensors, also where a block of queries or the whole call reaches no key."""
    inputs, terms = content(33, 40), terms_of([term], 33, 40)
    options = {"return_lse": True, "sinks": random(HEADS), **ALONE[case]}
    out, lse, *gradients = run("reference", torch.float64, inputs, terms, options)
    for number, expected in enumerate(gradients):
        results = run(fast, torch.float32, inputs, terms, options, only=number)
        for ours, theirs in zip(results, (out, lse, expected), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


SHARED = (
    "bias", "keys_with_a_gate", "queries", "queries_with_a_gate", "decay_of_all_rows", "values", "factors_of_all_rows",
    "dense_of_all_rows",
)  # fmt: skip
"""Terms of each kind that the items of a batch share, so that a batch may be empty."""


@on_cpu
@pytest.mark.parametrize("positions", [False, True], ids=["affine", "explicit"])
@pytest.mark.parametrize(
    ("term", "batch", "n_k"), [*((term, BATCH, 0) for term in TERMS), *((term, 0, 40) for term in SHARED)]
)
def test_a_single_tensor_needs_a_gradient_of_nothing(fast, term, batch, n_k, positions):
    inputs, terms = content(33, n_k, batch=batch), terms_of([term], 33, n_k)
    options = {"query_positions": torch.zeros(batch, 33, dtype=torch.long) if positions else None}
    for number in range(3 + len(terms[0][1])):
        *_, gradient = run(fast, torch.float32, inputs, terms, options, only=number)
        assert not gradient.any()


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
@pytest.mark.parametrize("names", [EVERY_KIND, MIRRORED, JOINED])
def test_terms_add_up(fast, n_q, n_k, names):
    check(fast, content(n_q, n_k), terms_of(names, n_q, n_k), causal=True, scale=-0.3)


def test_the_same_kind_twice(fast):
    tables = ("bias", "bias_for_all_offsets", "keys", "keys_per_head", "values", "values_of_one_vector")
    mirrored = ("queries", "queries_per_head", "keys_with_factors", "keys_with_a_gate", "decay", "decay")
    check(fast, content(20, 20), terms_of(tables, 20, 20))
    check(fast, content(20, 20), terms_of(mirrored, 20, 20))


@pytest.mark.parametrize("shared", [(0, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("trains", [False, True])
def test_calls_of_one_tensor_are_no_pattern_for_those_of_several(fast, shared, trains):
    """A call that was prepared for one of the same sizes and strides computes what is given to it."""
    n = 21 + sum(shared)  # sizes that no other test prepares a call of
    for order in (shared, (0, 1, 2), shared, (2, 1, 0)):
        query, key, value = (random(BATCH, HEADS, n, DIM).float() for _ in range(3))
        inputs = [(query, key, value)[index].requires_grad_(trains) for index in order]
        expected = attention(*inputs, backend="reference")
        torch.testing.assert_close(attention(*inputs, backend=fast), expected, rtol=1e-4, atol=1e-5)


def test_masks(fast, kinds):
    mask = torch.rand(BATCH, 40) > 0.3
    mask[1, 15:] = False
    check(fast, content(33, 40), terms_of(kinds, 33, 40), key_mask=mask)


@pytest.mark.parametrize("positions", [False, True])
def test_packed_rows(fast, tables, positions):
    lengths = [13, 1, 20]
    documents = torch.repeat_interleave(torch.tensor([7, 2, 5]), torch.tensor(lengths)).expand(BATCH, -1)
    options = {"query_documents": documents, "key_documents": documents.int()}
    if positions:
        ids = torch.cat([torch.arange(length) for length in lengths])
        options |= {"query_positions": ids, "key_positions": ids, "causal": True}
    check(fast, content(34, 34), terms_of(tables, 34, 34), **options)


POSITIONS = {
    "strided_queries": (Positions(0, 2, 37), Positions(0, 1, 50)),
    "pooled_queries_after_a_cls": (Positions(-1, 4, 37), Positions(0, 1, 50)),
    "strided_keys": (None, Positions(1, 3, 50)),
    "strides_that_differ": (Positions(2, 3, 37), Positions(-5, 2, 50)),
    "strides_with_a_common_divisor": (Positions(1, 2, 37), Positions(0, 4, 50)),
    "cache": (Positions(100, 1, 37), Positions(87, 1, 50)),
    "ids": (torch.arange(37) * 7 % 40, torch.arange(50) * 11 % 30 - 3),
    "ids_with_a_batch_of_one": ((torch.arange(37) * 7 % 40)[None], torch.arange(50)[None].int()),
    "ids_per_row_against_a_range": (torch.arange(74).view(2, 37) % 40, Positions(3, 1, 50)),
    "all_keys_in_one_place": (None, torch.full((BATCH, 50), 30)),
}


@pytest.mark.parametrize("window", [None, (9, 5)])
@pytest.mark.parametrize("case", POSITIONS)
def test_positions(fast, tables, case, window):
    query_positions, key_positions = POSITIONS[case]
    causal = case == "cache" if window else case != "ids"
    options = {"query_positions": query_positions, "key_positions": key_positions, "causal": causal, "window": window}
    check(fast, content(37, 50), terms_of(tables, 37, 50), **options)


def test_causal_with_fractional_positions(fast):
    options = {"query_positions": torch.linspace(0, 3, 20), "key_positions": torch.linspace(0.5, 4, 30)}
    # The compiled kernel leaves them to "blockwise".
    name = "auto" if fast == "native" else fast
    check(name, content(20, 30), terms_of(["dense"], 20, 30), causal=True, **options)


@pytest.mark.parametrize(
    "term", [None, "bias", "keys_with_factors", "queries_with_factors", "decay", "values", "factors", "dense"]
)
def test_without_content(fast, term):
    terms = [] if term is None else terms_of([term], 37, 37)
    check(fast, [None, None, content(37, 37)[2]], terms, causal=True)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (80, 16), (16, 129)])
def test_widths(fast, head_dim, value_dim):
    terms = [
        (OffsetBias, [random(HEADS, 5)], -2),
        (OffsetKeys, [random(1, 5, head_dim)], -2),
        (OffsetQueries, [random(1, 5, head_dim)], -2),
        (OffsetValues, [random(1, 5, value_dim)], -2),
    ]
    check(fast, content(20, 20, head_dim, value_dim), terms)


# --- what few calls ask for


WINDOWS = {
    "itself": 0,
    "both sides": 4,
    "one side": (6, None),
    "the other side": (None, 3),
    "different sides": (2, 9),
    "more than there is": (100, 41),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_windows(fast, kinds, window):
    check(fast, content(33, 40), terms_of(kinds, 33, 40), window=WINDOWS[window])


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 10**30])
def test_numbers_that_no_int64_holds_forbid_nothing(fast, number):
    *inputs, terms = *(tensor.float() for tensor in content(9, 9)), [OffsetBias(random(HEADS, 5).float(), -2)]
    positions = torch.arange(9, device=DEVICE)
    run = partial(attention, *inputs, terms, key_positions=positions, backend=fast)
    torch.testing.assert_close(run(window=number), run(), rtol=0, atol=1e-6)
    torch.testing.assert_close(run(window=(2, number)), run(window=(2, None)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": (4, 1)}, {"softcap": 0.7}], ids=str)
def test_heads_that_share_keys(fast, kinds, options):
    mask = torch.rand(BATCH, 40) > 0.3
    check(fast, content(33, 40, key_heads=1), terms_of(kinds, 33, 40), key_mask=mask, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 5}], ids=str)
def test_soft_caps(fast, kinds, options):
    check(fast, content(33, 40), terms_of(kinds, 33, 40), softcap=0.6, scale=2.0, **options)


@pytest.mark.parametrize("items", [1, 2])
def test_heads_share_scores(fast, items):
    """As in a mask of other libraries, (batch, 1, n_q, n_k)."""
    inputs, scores = content(9, 14), random(items, 1, 9, 14)
    results = check(fast, inputs, [(DenseBias, [scores], None)])
    expected = run("reference", torch.float64, inputs, [(DenseBias, [scores.expand(-1, HEADS, -1, -1)], None)], {})
    torch.testing.assert_close(results[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[4].double(), expected[4].sum(1, keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 0)}, {"window": 3, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("sinks_of", [None, "heads", "queries"])
def test_log_sums(fast, kinds, options, sinks_of):
    inputs, terms = content(37, 30), terms_of(kinds, 37, 30)
    sinks = {None: None, "heads": random(HEADS), "queries": random(BATCH, HEADS, 37)}[sinks_of]
    expected = with_log_sums("reference", torch.float64, inputs, terms, sinks, **options)
    results = with_log_sums(fast, torch.float32, inputs, terms, sinks, **options)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)
    # Where the first queries may not attend to anything, there is nothing to sum.
    assert expected[1].isneginf().any() == (sinks is None and ("causal" in options or "window" in options))


@pytest.mark.parametrize("sink", [math.inf * -1, -3.0, 60.0])
def test_a_sink_is_a_key_with_no_value(fast, sink):
    """It takes its share of each row; with a key mask of which nothing is left, it takes all."""
    query, key, value = (tensor.float() for tensor in content(9, 9))
    mask = torch.ones(BATCH, 9, dtype=torch.bool)
    mask[1] = False
    options = {"key_mask": mask, "scale": 0.5}
    sinks = torch.tensor([sink, 0.0])
    out, lse = attention(query, key, value, sinks=sinks, return_lse=True, backend=fast, **options)
    extended = [torch.cat([rows, torch.zeros_like(rows[:, :, :1])], 2) for rows in (key, value)]
    bias = torch.zeros(1, HEADS, 9, 10)
    bias[..., -1] = sinks.unsqueeze(-1)
    longer = torch.cat([mask, torch.ones(BATCH, 1, dtype=torch.bool)], 1)
    options["key_mask"] = longer
    expected = attention(query, *extended, [DenseBias(bias)], return_lse=True, backend="reference", **options)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_is_lost_beside_huge_biases(fast, trains):
    """Every score is 1e9, so a row's keys, and its sink, share its attention equally."""
    bias, n = OffsetBias(torch.full((HEADS, 3), 1e9, device=DEVICE), -1), 40
    query, key, value = (tensor.float() for tensor in content(n, n))
    query, value = torch.zeros_like(query), value.requires_grad_(trains)
    sinks = torch.full((HEADS,), 1e9, device=DEVICE)
    out = attention(query, key, value, [bias], sinks=sinks, backend=fast)
    torch.testing.assert_close(out, value.sum(2, keepdim=True).expand_as(out) / (n + 1), rtol=1e-5, atol=1e-6)
    if trains:
        (gradient,) = torch.autograd.grad(out.sum(), value)
        torch.testing.assert_close(gradient, torch.full_like(value, n / (n + 1)), rtol=1e-5, atol=1e-6)


def test_parts_merge_to_the_whole(fast):
    """Attention to two parts of the keys, one of them masked for an item, is that to all: gradients too."""
    inputs, bias = content(20, 30), random(HEADS, 60)
    mask = torch.rand(BATCH, 30) > 0.3
    mask[0, :12] = False
    results = []
    for cuts in ([(0, 30)], [(0, 12), (12, 13), (13, 30)]):
        query, key, value, table = leaves = [tensor.float().requires_grad_() for tensor in (*inputs, bias)]
        parts = [
            attention(
                *(query, key[:, :, start:end], value[:, :, start:end], [OffsetBias(table, -20)]),
                key_mask=mask[:, start:end],
                query_positions=Positions(10, 1, 20),
                key_positions=Positions(start, 1, end - start),
                return_lse=True,
                backend=fast,
            )
            for start, end in cuts
        ]
        outs, lses = (torch.stack(results) for results in zip(*parts, strict=True))
        out, lse = (lses.softmax(0).unsqueeze(-1) * outs).sum(0), lses.logsumexp(0)
        loss = (out * output_gradient(out)).sum() + (lse * output_gradient(lse)).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for of_all, merged in zip(*results, strict=True):
        torch.testing.assert_close(merged, of_all, rtol=2e-5, atol=2e-5)


# --- dropout


@pytest.mark.parametrize(("positions", "dropout_p"), [("affine", 0.6), ("ids", 0.6), ("affine", 0.999)])
def test_dropout_drops_what_the_reference_drops(fast, kinds, positions, dropout_p):
    options = {"query_positions": torch.arange(37)} if positions == "ids" else {}
    check(fast, content(37, 30), terms_of(kinds, 37, 30), dropout_p=dropout_p, **options)


def test_dropout_drops_what_the_reference_drops_beside_sinks(fast):
    """An item whose queries see nothing has the sinks' logits as its log-sum-exps."""
    options = {"window": (7, 2), "dropout_p": 0.5, "key_mask": torch.tensor([[True], [False]]).expand(-1, 40)}
    inputs, terms, sinks = content(37, 40, key_heads=1), terms_of(["bias"], 37, 40), random(BATCH, HEADS, 37)
    results = []
    for backend, dtype in ((fast, torch.float32), ("reference", torch.float64)):
        torch.manual_seed(SEED)
        results.append(with_log_sums(backend, dtype, inputs, terms, sinks, **options))
        # All draw as much, so that what follows is the same too.
        results[-1].append(torch.rand(1))
        assert not results[-1][0][1].any()
        torch.testing.assert_close(results[-1][1][1], sinks[1].to(dtype))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(HEADS,), (BATCH, HEADS, 37)], ids=str)
def test_sinks_in_half_precision(fast, shape):
    """Each tensor has on average at most twice the error that plain attention without sinks has in this precision."""
    plain, ours = [], []
    for _ in range(4):
        inputs, terms = [tensor.bfloat16().double() for tensor in content(37, 40)], terms_of(["bias"], 37, 40)
        sinks = random(*shape).bfloat16().double()
        for errors, backend, of_sinks in ((plain, "reference", None), (ours, fast, sinks)):
            expected = with_log_sums("reference", torch.float64, inputs, terms, of_sinks)
            results = with_log_sums(backend, torch.bfloat16, inputs, terms, of_sinks)
            errors.append([error(result, exact) for result, exact in zip(results, expected, strict=True)])
    plain, ours = np.mean(plain, axis=0), np.mean(ours, axis=0)
    assert (ours[:-1] <= 2 * plain).all()
    assert ours[-1] <= 2 * plain.max()


# --- sizes and layouts at the edge


@pytest.mark.parametrize(("batch", "n_q", "n_k"), [(2, 0, 5), (2, 5, 0), (0, 4, 5)])
def test_nothing(fast, tables, batch, n_q, n_k):
    terms = terms_of(tables, n_q, n_k)
    out, *gradients = check(fast, content(n_q, n_k, batch=batch), terms)
    assert out.shape == (batch, HEADS, n_q, DIM)
    assert all((gradient == 0).all() for gradient in gradients)


def test_rows_that_may_attend_nothing_are_zeros_with_zero_gradients(fast):
    scores = random(1, HEADS, 20, 20)
    scores[:, 0, 3] = -math.inf
    # Of these rows' keys none is better than another: each has the same weight.
    scores[:, :, 5] = torch.finfo(torch.float32).min
    scores[:, :, 7] = -1e9
    mask = torch.ones(BATCH, 20, dtype=torch.bool)
    mask[1] = False
    terms = [(DenseBias, [scores], None), (OffsetValues, [random(1, 5, DIM)], -2)]
    inputs = content(20, 20)
    inputs[0][:, :, 7] = 0.0
    out, *gradients = check(fast, inputs, terms, key_mask=mask)
    assert (out[1] == 0).all()
    assert (out[0, 0, 3] == 0).all()
    assert (out[0, :, 5] != 0).any()
    assert all((gradient[1] == 0).all() for gradient in gradients[:3])
    assert (gradients[3][:, 0, 3] == 0).all()


def elsewhere(tensor):
    """The same numbers, every other one in memory, beginning at another multiple of four bytes."""
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)[..., 1].copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["parts of a projection", "one head for all"])
def test_saved_tensors_may_come_back_elsewhere(fast, layout, dtype):
    """Hooks that offload or compress them give back other memory, with other strides."""
    table, d_out = random(1, 9, DIM).float(), random(1, HEADS, 24, DIM).to(dtype)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    for hook in (None, torch.clone, None, elsewhere, torch.clone, elsewhere):
        if layout == "one head for all":
            projected = random(3, 1, 1, 24, DIM).to(dtype)
            rows = [row.expand(-1, HEADS, -1, -1) for row in projected]
        else:
            projected = random(1, 24, 3, HEADS, DIM).to(dtype)
            rows = list(projected.transpose(1, 3).unbind(2))
        gradients = []
        for name in (fast, "reference"):
            wide = torch.float32 if name == "reference" else dtype
            leaves = [row.detach().to(wide).requires_grad_() for row in rows]
            leaves.append(table.clone().requires_grad_())
            hooks = torch.autograd.graph.saved_tensors_hooks(hook, lambda tensor: tensor) if hook else nullcontext()
            with hooks:
                out = attention(*leaves[:3], [OffsetKeys(leaves[3], -4)], causal=True, backend=name)
            gradients.append(torch.autograd.grad(out, leaves, d_out.to(wide)))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours.to(theirs.dtype), theirs, **close)


@pytest.mark.parametrize("hook", [torch.Tensor.bfloat16, lambda tensor: tensor[..., :7]], ids=["dtype", "shape"])
def test_saved_tensors_that_come_back_as_others_are_refused(fast, hook):
    inputs = [tensor.float().requires_grad_() for tensor in content(20, 20)]
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda tensor: tensor):
            out = attention(*inputs, backend=fast)
        with pytest.raises(RuntimeError, match=r"expected the saved query as torch.float32 of shape \(2, 2, 20, 16\)"):
            out.sum().backward()


@pytest.mark.parametrize("name", ["reference", "fast"])
@pytest.mark.parametrize("first", [0, 1], ids=["with first", "without first"])
def test_positions_have_no_gradient(fast, name, first, monkeypatch):
    """Whichever comes first: a call that is cached is replayed for positions with a gradient and without one."""
    module = import_module("whereformer.kernels.make_call")
    monkeypatch.setattr(module, "can_read", lambda tensor: False)  # as for tensors of a GPU
    name = fast if name == "fast" else name
    query, key, value = (tensor.float().requires_grad_() for tensor in content(20, 20))
    positions = torch.arange(20.0, device=DEVICE).requires_grad_()
    remember(True)
    results = []
    for line in (positions, positions.detach(), positions)[first:]:
        # The compiled kernel leaves causality at fractional positions to others.
        options = {"query_positions": line * 1.5, "key_positions": line + 0.25, "causal": name != "native"}
        out = attention(query, key, value, **options, backend=name)
        results.append(torch.autograd.grad(out.sum(), [query, key, value, positions], allow_unused=True))
    for *gradients, none in results:
        assert none is None
        assert all(map(torch.equal, gradients, results[0]))


# --- precision


def test_errors_are_those_of_plain_float32_over_many_seeds(fast):
    """One error is luck, and its bound has to be wide; the median of several tells a lost digit."""
    errors_of = {"reference": [], fast: []}
    for seed in range(9):
        torch.manual_seed(seed)
        inputs, terms = content(20, 30), terms_of(TABLES, 20, 30)
        exact = run("reference", torch.float64, inputs, terms, {"causal": True})
        for name, errors in errors_of.items():
            errors.append(list(map(error, run(name, torch.float32, inputs, terms, {"causal": True}), exact)))
    plain, ours = (torch.tensor(errors).median(0).values for errors in errors_of.values())
    # Weights that the backward makes anew, and what it takes from the output in place of them, cost up to twice.
    assert (ours <= 3 * plain).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [("bias",), ("keys", "values"), ("factors", "dense"), ("queries", "decay")])
def test_half_precision_rounds_after_the_softmax_alone(fast, dtype, terms):
    """Scores are float32, as in torch's fused attention, even if they are large."""
    if fast == "native" and dtype == torch.float16:
        pytest.skip("the compiled kernel leaves float16 to blockwise")
    query, key, value = content(37, 50)
    inputs = [tensor.to(dtype).double() for tensor in (4 * query, key, value)]
    terms = [
        (kind, [tensor.to(dtype).double() for tensor in tensors], first)
        for kind, tensors, first in terms_of(terms, 37, 50)
    ]
    out, _, _, value_gradient, *_ = check(fast, inputs, terms, dtype)
    expected = run("reference", torch.float64, inputs, terms, {})
    # These two follow the weights alone. Were scores rounded too, they would be off by twice as much.
    for ours, theirs in ((out, expected[0]), (value_gradient, expected[3])):
        assert relative_error(ours, theirs) <= torch.finfo(dtype).eps / 2


def test_what_rounding_takes_from_the_output_spoils_no_gradient_of_a_table(fast):
    """All keys beyond a table's end share a vector, whose gradient sums one error of a row for each of them."""
    torch.manual_seed(0)
    *inputs, d_out = (torch.randn(1, 2, 257, 32).bfloat16() for _ in range(4))
    tables = [0.3 * torch.randn(1, 33, 32) for _ in range(2)]
    results = []
    for name, dtype in ((fast, torch.bfloat16), ("reference", torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        keys, values = (table.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for table in tables)
        out = attention(*leaves, [OffsetKeys(keys, -16), OffsetValues(values, -16)], backend=name)
        results.append([out, *torch.autograd.grad(out, [*leaves, keys, values], d_out.to(dtype))])
    of_output, *of_gradients = map(relative_error, *results)
    assert max(of_gradients) <= 1.5 * of_output


# --- as an operator of torch


def test_the_same_bits_every_time(fast, kinds):
    inputs, terms = content(20, 20), terms_of(kinds, 20, 20)
    first, second = (run(fast, torch.float32, inputs, terms, {"dropout_p": 0.1}) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_compiles_as_one_graph(fast):
    inputs = [tensor.float().requires_grad_() for tensor in content(20, 20)]
    table = random(HEADS, 5).float().requires_grad_()

    def attend(query, key, value, table):
        return attention(query, key, value, [OffsetBias(table, -2)], causal=True, dropout_p=0.1, backend=fast)

    outs = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        out = function(*inputs, table)
        outs.append([out, *torch.autograd.grad(out.sum(), [*inputs, table])])
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
