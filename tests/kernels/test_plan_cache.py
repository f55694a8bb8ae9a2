"""Calls whose plan is remembered: differences count, and only where calls differ."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import whereformer.kernels
from tests.kernels.cases import need_native
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
    attention_varlen,
)
from whereformer.kernels import native, plan_cache, remember
from whereformer.kernels.call import CallTemplate

N, HEADS, DIM = 24, 2, 16


@pytest.fixture(autouse=True)
def _native():
    need_native()
    remember(True)


@contextmanager
def without_memories():
    remember(False)
    try:
        yield
    finally:
        remember(True)


def rows(*size, dtype=torch.float32):
    return torch.randn(size or (1, HEADS, N, DIM), dtype=dtype)


def remembered():
    return len(plan_cache._plans.values)


def attend(*arguments, **options):
    with torch.no_grad():
        return attention(*arguments, **options, backend="native")


def check(make, kinds=1, **options):
    """Three calls of one kind with other numbers, of which the last two are computed from what is remembered."""
    all_inputs = []
    for _ in range(3):
        # What was given before stays in memory, so that an old address would be read without a crash.
        all_inputs.append(inputs := make())
        actual, expected = attend(*inputs, **options), attention(*inputs, **options, backend="reference")
        close = 1e-5 if actual.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual, expected, rtol=close, atol=close)
    assert remembered() == kinds


def table(*size):
    """A part of a longer table of this size, so that it begins inside of its storage."""
    return torch.randn(size[0], size[1] + 6, *size[2:])[:, 3:-3]


TERMS = {
    "none": list,
    "bias": lambda: [OffsetBias(rows(HEADS, 9), -4)],
    "what the kernel reads in a copy": lambda: [OffsetBias(rows(9, HEADS).mT, -4)],
    "part of a table": lambda: [OffsetBias(table(HEADS, 9), -4)],
    "more than the offsets that occur": lambda: [OffsetBias(rows(HEADS, 200), -120)],
    "parts of tables": lambda: [OffsetKeys(table(HEADS, 9, DIM), -4), OffsetValues(table(1, 9, DIM), -4)],
    "keys with factors": lambda: [OffsetKeys(table(HEADS, 9, 3), -4, query_factors=rows(1, HEADS, N, 3))],
    "queries": lambda: [OffsetQueries(table(1, 9, DIM), -4)],
    "queries with factors": lambda: [OffsetQueries(rows(1, 9, 3), -4, key_factors=rows(1, HEADS, N, 3))],
    "decay": lambda: [DistanceDecay(rows(1, HEADS, N), rows(1, HEADS, N))],
    "factors": lambda: [FactorPair(rows(1, HEADS, N, 3), rows(1, HEADS, N, 3))],
    "dense": lambda: [DenseBias(rows(1, HEADS, N, N).mT)],
}


def half(*size):
    return rows(*size, dtype=torch.bfloat16)


def three(make=rows, *size):
    return [make(*size) for _ in range(3)]


def decay():
    return DistanceDecay(rows(1, HEADS, N), rows(1, HEADS, N))


CALLS = {
    **{name: lambda name=name: [*three(), TERMS[name]()] for name in TERMS},
    "one tensor as query, key and value": lambda: [*[rows()] * 3, TERMS["bias"]()],
    "a bias in bfloat16": lambda: [*three(half), [OffsetBias(half(HEADS, 9), -4)]],
    "keys in bfloat16": lambda: [*three(half), [OffsetKeys(half(1, 9, DIM), -4)]],
    "factors in bfloat16": lambda: [*three(half), [FactorPair(half(1, HEADS, N, 3), half(1, HEADS, N, 3))]],
    "one head's dense bias in bfloat16": lambda: [*three(half), [DenseBias(half(1, 1, N, N))]],
    "two biases": lambda: [*three(), [OffsetBias(rows(HEADS, 9), -4), OffsetBias(rows(HEADS, 5), 0)]],
    "one bias twice": lambda: [*three(), 2 * TERMS["bias"]()],
    "a bias in float64": lambda: [*three(), [OffsetBias(rows(HEADS, 9).double(), -4)]],
    "two decays": lambda: [*three(), [decay(), decay()]],
    "two dense biases": lambda: [*three(), [*TERMS["dense"](), *TERMS["dense"]()]],
    "keys with factors and without": lambda: [*three(), TERMS["keys with factors"]() + TERMS["parts of tables"]()],
    "every second offset": lambda: [*three(rows, 1, HEADS, 4, DIM), [OffsetBias(rows(HEADS, 9), -8, 2)]],
}

OPTIONS = {
    "every second offset": {"query_positions": Positions(0, 2, 4), "key_positions": Positions(0, 2, 4)},
    "one bias twice": {"key_positions": Positions(0, 2, N)},
}


def results_of(options, training, arguments, seed):
    """The results of a call, and the gradients of all of its tensors."""
    *content, terms = arguments
    tensors = [getattr(term, field) for term in terms for field in term.axes]
    leaves = [*content, *(tensor for tensor in tensors if tensor is not None)]
    for leaf in leaves:
        leaf.requires_grad_(training)
    torch.manual_seed(seed)  # of dropout
    with nullcontext() if training else torch.no_grad():
        results = attention(*content, terms, **options, backend="native")
        results = results if options.get("return_lse") else (results,)
        loss = sum(result.sin().sum() for result in results)
        return [*results, *(torch.autograd.grad(loss, leaves) if training else ())]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.2, "return_lse": True}], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_is_remembered_and_gives_the_bits_of_a_call_that_is_not(name, options, training, monkeypatch):
    calls, options = [CALLS[name]() for _ in range(3)], {**options, **OPTIONS.get(name, {})}
    results = [results_of(options, training, calls[0], 0)]
    assert remembered() == 1
    with monkeypatch.context() as patch:
        patch.delattr(whereformer.kernels, "make_call")
        patch.delattr(native, "CallStruct")
        results += [results_of(options, training, calls[seed], seed) for seed in (1, 2)]
    with without_memories():
        for seed, arguments in enumerate(calls):
            assert all(map(torch.equal, results_of(options, training, arguments, seed), results[seed]))
        assert remembered() == 0


def test_calls_of_other_backends_and_functions_are_remembered(monkeypatch):
    ids, ends = torch.arange(N, dtype=torch.int32).unsqueeze(0) // 5, torch.tensor([0, 5, 5, N])
    q, k, v, short, packed, bias = rows(), rows(), rows(), rows(1, HEADS, 1, DIM), rows(N, HEADS, DIM), TERMS["bias"]()
    calls = (
        lambda: attention(q, k, v, query_documents=ids, key_documents=ids),
        lambda: attention_varlen(packed, packed, packed, bias, cu_seqlens_q=ends, return_lse=True)[1],
        lambda: attention(short, k, v),
        lambda: attention(q, k, v, bias, backend="blockwise"),
        lambda: attention(q, k, v.bfloat16(), bias),
    )
    for number, call in enumerate(calls, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=number == len(calls)):
            call()
            assert remembered() == number
            with monkeypatch.context() as patch:
                patch.delattr(whereformer.kernels, "make_call")
                again = call()
            known = dict(plan_cache._plans.values)
            with without_memories():
                assert torch.equal(call(), again)
            plan_cache._plans.values.update(known)


def test_a_gradient_may_be_an_input():
    leaves = [rows().requires_grad_() for _ in range(3)]
    for d_output in (leaves[0], rows(), leaves[2]):
        actual, expected = (
            torch.autograd.grad(attention(*leaves, backend=name), leaves, d_output) for name in ("native", "reference")
        )
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_variable_switches_memories_off():
    code = "from whereformer.kernels.bounded_cache import BoundedCache as C; c = C(1); c.put(1, 2); print(c.values)"
    environment = {**os.environ, "WHEREFORMER_REMEMBER": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{}"


UNWRITTEN = {
    "reads a number": lambda x, y: [x * float(y[0, 0, 0, 0])],
    "reads what no signature has": lambda x, y: [x.neg() if y.requires_grad else x.exp()],
    "changes a tensor in place": lambda x, y: [x.add_(1)],
    "writes into a tensor": lambda x, y: [torch.add(x, y, out=torch.empty(0))],
    "takes a tensor from elsewhere": lambda x, y: [x + ELSEWHERE],
    "takes a tensor from elsewhere by name": lambda x, y: [torch.add(x, other=ELSEWHERE)],
    "has several results": lambda x, y: list(x.chunk(2, 1)),
    "is none of them": lambda x, y: [ELSEWHERE],
}
ELSEWHERE = torch.ones(1)


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_depends_on_more_than_the_tensors_is_not_remembered(name):
    signature = plan_cache.make_signature((rows(), rows()), (), ())
    with (recorder := plan_cache.StepRecorder(signature)):
        results = UNWRITTEN[name](*signature.tensors)
    recorder.cache_plan(CallTemplate, results)
    assert remembered() == 0


def test_steps_take_tensors_in_lists_and_tuples():
    def compute(x, y):
        return [torch.cat([x, y.double().float()], -1), torch.cat((y[:, 1:], x), 1), x.mT, x[torch.tensor(0)]]

    class Itself:
        def attend(self, tensors):
            return tensors

    signature = plan_cache.make_signature((rows(), rows()), (), ())
    with (recorder := plan_cache.StepRecorder(signature)):
        results = compute(*signature.tensors)
    recorder.cache_plan(Itself(), results[:3])
    later = plan_cache.make_signature((rows(), rows()), (), ())
    assert all(map(torch.equal, plan_cache.attend_from_cache(later), compute(*later.tensors)[:3]))


def test_tensors_may_share_memory():
    both = rows(1, HEADS, 3 * N, DIM)
    check(lambda: (*both.normal_().clone().chunk(3, 2), []))


@pytest.mark.parametrize("layout", [lambda x: x.mT.contiguous().mT, lambda x: x[:, :1].expand(x.shape)])
def test_layouts_are_kinds(layout):
    check(lambda: (rows(), rows(), rows()))
    check(lambda: (rows(), layout(rows()), layout(rows())), kinds=2)


def test_numbers_of_masks_and_positions_are_read_again():
    def draw_options():
        ids = torch.randint(0, 3, (2, 1, N))
        positions = torch.randint(0, N, (2, N))
        return {
            "key_mask": torch.rand(1, N) > 0.5,
            "query_documents": ids[0],
            "key_documents": ids[1],
            "query_positions": positions[0],
            "key_positions": positions[1].sort().values,
        }

    q, k, v = rows(), rows(), rows()
    for _ in range(3):
        options = draw_options()
        actual, expected = (
            fn(q, k, v, causal=True, **options)
            for fn in (attend, lambda *a, **o: attention(*a, **o, backend="reference"))
        )
        torch.testing.assert_close(actual, expected)
    assert remembered() == 1


@pytest.mark.parametrize("size", [(HEADS,), (1, HEADS, N)], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_sinks_are_read_again(size, return_lse):
    for _ in range(3):
        inputs, sinks = (rows(), rows(), rows()), rows(*size)
        actual, expected = (
            attention(*inputs, sinks=sinks, return_lse=return_lse, backend=name) for name in ("native", "reference")
        )
        torch.testing.assert_close(actual, expected)
    assert remembered() == 1


@pytest.mark.parametrize(
    "call_options",
    [
        {"causal": True},
        {"scale": 2},
        {"scale": 1.0},
        {"scale": True},
        {"window": (3, 5)},
        {"window": (5, 3)},
        {"softcap": 2.0},
        {"return_lse": True},
        {"query_positions": Positions(3, 2, N), "causal": True},
        {"key_positions": Positions(-5, 1, N), "causal": True},
    ],
    ids=str,
)
def test_options_are_kinds(call_options):
    """A call after one of the same tensors gives what it would alone, errors included."""
    inputs = rows(), rows(), rows()

    def result():
        try:
            return attend(*inputs, **call_options)
        except TypeError as error:
            return str(error)

    alone = result()
    remember(True)
    for options in ({"scale": 1}, {"causal": True, "scale": 1.0}, {"window": (3, 4)}, {"window": 3}):
        attend(*inputs, **options)
    for _ in range(2):
        after = result()
        assert after == alone if isinstance(alone, str) else all(map(torch.equal, after, alone))


def test_a_wrong_call_after_a_good_one_is_refused():
    q, k, v = rows(), rows(), rows()
    attend(q, k, v, window=(1, 2), key_mask=torch.ones(1, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="window"):
        attend(q, k, v, window=(1.0, 2.0), key_mask=torch.ones(1, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="window"):
        attend(q, k, v, window=((1, [2]), 3))
    with pytest.raises(TypeError, match="key_mask"):
        attend(q, k, v, window=(1, 2), key_mask=torch.ones(1, N, dtype=torch.uint8))
    meta = [torch.empty(0, 2, N, 4, device="meta")] * 3
    assert attention(*meta, causal=True).shape == (0, 2, N, 4)
    positions = torch.arange(N, dtype=torch.float64)
    attention(q, k, v, causal=True, query_positions=positions, key_positions=positions.clone())
    broken = positions.where(positions != 3, torch.nan)
    with pytest.raises(ValueError, match="finite"):
        attention(q, k, v, causal=True, query_positions=broken, key_positions=positions)


def test_a_conjugates_part_has_the_other_sign(monkeypatch):
    """Its memory does not say so, and kernels read nothing else, so no backend gets one."""
    kind, read = type(native.backend), []
    for name, usual in (("forward", kind.forward), ("backward", kind.backward)):

        def noting(self, call, *rest, usual=usual):
            read.extend(argument for argument in (*call.arguments(), *rest[0]) if isinstance(argument, torch.Tensor))
            return usual(self, call, *rest)

        monkeypatch.setattr(kind, name, noting)
    part = torch.randn(1, HEADS, N, DIM, dtype=torch.complex64).conj().imag
    k, v, bias = rows(), rows(), torch.randn(HEADS, 9, dtype=torch.complex64).conj().imag
    terms = [OffsetBias(bias, -4)]
    assert part.is_neg()
    assert bias.is_neg()
    attend(part.clone(), k, v, [OffsetBias(bias.clone(), -4)])
    torch.testing.assert_close(attend(part, k, v, terms), attention(part, k, v, terms, backend="reference"))
    leaf = rows().requires_grad_()
    actual, expected = (
        torch.autograd.grad(attention(leaf, k, v, terms, backend=name), leaf, part) for name in ("native", "reference")
    )
    torch.testing.assert_close(actual, expected)
    assert read
    assert not any(argument.is_neg() for argument in read)


def test_another_default_device_changes_nothing():
    inputs = rows(), rows(), rows()
    expected = attend(*inputs)
    with torch.device("meta"):
        assert torch.equal(attend(*inputs), expected)


def test_gradients_are_recorded_where_they_are_wanted():
    q, k, v = rows(), rows(), nn.Parameter(rows())
    expected = attend(q, k, v)
    with torch.inference_mode():
        assert torch.equal(attend(q, k, v), expected)
    out = attention(q, k, v)
    assert out.requires_grad
    assert torch.equal(out, expected)
    assert not attention(q, k, v.detach()).requires_grad


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")  # of torch's own attention
def test_transforms_are_seen():
    inputs = rows(), rows(), rows()
    attend(*inputs)
    stacked = [torch.stack((tensor, 2 * tensor)) for tensor in inputs]
    expected = torch.stack([attention(*tensor, backend="reference") for tensor in zip(*stacked, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attention)(*stacked), expected)


def test_dropout_draws_again():
    inputs = rows(), rows(), rows()
    assert not torch.equal(attend(*inputs, dropout_p=0.5), attend(*inputs, dropout_p=0.5))


def test_few_kinds_are_remembered(monkeypatch):
    limit = 20
    monkeypatch.setattr(plan_cache._plans, "_max_size", limit)
    q = rows(1, HEADS, 1, DIM)
    for n in range(1, limit + 50):
        attend(q, rows(1, HEADS, n, DIM), rows(1, HEADS, n, DIM))
    assert remembered() == limit
    # Nothing of the tensors stays.
    v = rows()
    before = sys.getrefcount(v)
    attend(rows(), rows(), v)
    assert sys.getrefcount(v) == before


@pytest.mark.parametrize("name", ["one tensor as query, key and value", "two biases"])
def test_threads_share_what_is_remembered(name):
    """Also first calls in several threads at once, while another thread switches memories off and on."""
    calls = [CALLS[name]() for _ in range(3)]
    expected = [attend(*arguments) for arguments in calls]

    def results(number):
        for _ in range(20):
            remember(number % 3 != 0)
            for arguments, result in zip(calls, expected, strict=True):
                assert torch.equal(attend(*arguments), result)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(results, range(6)))
    remember(True)
