"""What holds for the fast backends of the CPU: their memory, edges and operators."""

import contextlib
import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peak import peak_memory
from tests.kernels.cases import (
    BATCH,
    EVERY_KIND,
    FAST,
    HEADS,
    TABLES,
    call_of,
    check,
    check_operators,
    content,
    error,
    output_gradient,
    random,
    terms_of,
)
from whereformer import DenseBias, OffsetBias, OffsetKeys, OffsetValues, Positions, attention
from whereformer.kernels import blockwise, native
from whereformer.kernels.make_call import make_call

fast = pytest.fixture(params=FAST)(lambda request: request.param)


# --- memory

MEMORY = {
    "bias": lambda n: [OffsetBias(torch.randn(1, 2 * n, requires_grad=True), -n)],
    "keys and values": lambda n: [
        OffsetKeys(torch.randn(1, 9, 8, requires_grad=True), -4),
        OffsetValues(torch.randn(1, 9, 8, requires_grad=True), -4),
    ],
    "long tables": lambda n: [OffsetValues(torch.randn(1, 2 * n, 8, requires_grad=True), -n)],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": (60, 3)}], ids=str)
@pytest.mark.parametrize("kind", MEMORY)
def test_memory_grows_with_the_length_and_not_with_its_square(fast, kind, options, monkeypatch):
    # At every length a block has this many scores, and the compiled kernel as many parts with sums of their own.
    monkeypatch.setattr(blockwise, "MAX_BLOCK_SCORES", 2**15)
    monkeypatch.setattr(native, "_NUM_TASKS", 1)
    peaks = []
    for length in (1024, 2048, 4096):
        inputs = [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]
        terms = MEMORY[kind](length)

        def train(inputs=inputs, terms=terms):
            attention(*inputs, terms, **options, backend=fast).sum().backward()

        peaks.append(peak_memory(train))
    # Twice the length adds as much again as half of it did, or less: blocks are a fixed share.
    assert peaks[2] - peaks[1] <= 2.1 * (peaks[1] - peaks[0]) + 2**16
    assert peaks[2] < 4096**2 / 4


@pytest.mark.parametrize(("n_q", "n_k"), [(4096, 4), (4096, 16)])
@pytest.mark.parametrize("training", [False, True])
def test_few_keys_take_no_memory_by_the_square_of_queries(fast, n_q, n_k, training, monkeypatch):
    monkeypatch.setattr(blockwise, "MAX_BLOCK_SCORES", 2**16)
    query, key, value = (torch.randn(1, 2, n, 8, requires_grad=training) for n in (n_q, n_k, n_k))
    table = torch.randn(2, 9, requires_grad=training)

    def attend():
        out = attention(query, key, value, [OffsetBias(table, -4)], backend=fast)
        if training:
            out.sum().backward()

    assert peak_memory(attend) < n_q * n_q


@pytest.mark.parametrize("options", [{"window": 9}, {"window": (9, 0)}, {"causal": True}], ids=str)
def test_what_a_window_forbids_is_hardly_computed(options):
    call = make_call(*(torch.zeros(1, 1, 4096, 8),) * 3, **options)
    pairs = sum(len(rows) * len(keys) for rows, keys, *_ in blockwise._iter_blocks(call))
    assert pairs < (0.8 if "causal" in options else 0.03) * 4096**2


# --- sizes at the edge


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 3), (3, 0), (0, 0)])
def test_documents_of_nothing(fast, n_q, n_k):
    documents = [torch.zeros(BATCH, n, dtype=torch.long) for n in (n_q, n_k)]
    check(fast, content(n_q, n_k), query_documents=documents[0], key_documents=documents[1])


def test_no_heads(fast):
    tensors = [torch.zeros(2, 0, n, 8, requires_grad=True) for n in (3, 4, 4)]
    out = attention(*tensors, backend=fast)
    out.sum().backward()
    assert out.shape == (2, 0, 3, 8)


def test_positions_far_apart_take_no_memory_for_what_lies_between(fast):
    options = {"query_positions": torch.tensor([0, 10**11]), "key_positions": torch.tensor([0, 1, 10**11])}
    check(fast, content(2, 3), terms_of(TABLES, 2, 3), **options)


def test_tables_far_apart_take_no_memory_for_what_lies_between(fast):
    terms = [(OffsetBias, [random(HEADS, 3)], first) for first in (-1, 10**11, -(10**11))]
    check(fast, content(5, 6), terms)


# --- long sequences, in tiles of their real size


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"query_positions": Positions(0, 2, 700)})),
    ],
    ids=str,
)
def test_sequences_of_many_tiles(fast, options):
    inputs = [random(1, HEADS, n, 16) for n in (700, 1500, 1500)]
    terms = [(OffsetBias, [random(HEADS, 40)], -20), *terms_of(["keys", "values"], 700, 1500)]
    check(fast, inputs, terms, **options)


def test_long_tables_of_vectors(fast):
    terms = [(OffsetKeys, [random(HEADS, 599, 16)], -299), (OffsetValues, [random(1, 300, 16)], -100)]
    check(fast, content(300, 300), terms)


# --- windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(
    ("n_q", "n_k", "options"),
    [
        (101, 101, {"window": 5}),
        (101, 101, {"window": (9, 0), "causal": True}),
        # The first queries have no keys.
        (120, 97, {"window": (3, 8)}),
        (90, 131, {"window": (0, 20), "softcap": 3.0}),
        # All keys are to the left or to the right of the queries.
        (60, 60, {"window": 200, "query_positions": Positions(190, 1, 60)}),
        (101, 101, {"window": (None, 4)}),
        # Blocks of queries with a step between them do not go together.
        (40, 80, {"window": 6, "query_positions": Positions(0, 2, 40)}),
    ],
)
@pytest.mark.parametrize("names", [(), TABLES], ids=["no terms", "tables"])
def test_windows_in_blocks(fast, names, n_q, n_k, options, key_heads, dtype, monkeypatch):
    monkeypatch.setattr(blockwise, "MIN_ROWS", 7)
    check(fast, content(n_q, n_k, key_heads=key_heads), terms_of(names, n_q, n_k), dtype, **options)


# --- as an operator of torch

MASKED = torch.arange(9) >= torch.tensor([[0], [3]])
CALLS = {
    "rows of nothing": (EVERY_KIND, {"causal": True, "key_mask": MASKED, "return_lse": True}),
    "plain": ([], {}),
    "causal": (["bias"], {"causal": True}),
    "padding": (["bias"], {"key_mask": MASKED.flip(1)}),
    "ids": (EVERY_KIND, {"query_positions": torch.arange(9), "dropout_p": 0.1}),
    "options": (EVERY_KIND, {"window": 4, "softcap": 2.0, "dropout_p": 0.1, "return_lse": True}),
}


@pytest.mark.parametrize(
    "case", [case if case == "rows of nothing" else pytest.param(case, marks=pytest.mark.slow) for case in CALLS]
)
def test_operators(fast, case):
    """Also that outputs are laid out as compiled programs are told, which is as projections are."""
    terms, options = CALLS[case]
    projected = [tensor.float().transpose(1, 2).contiguous().transpose(1, 2) for tensor in content(9, 9)]
    operators = importlib.import_module(f"whereformer.kernels.{fast}").operators
    check_operators(operators, call_of(projected, terms_of(terms, 9, 9), **options))


def test_the_operator_is_the_function_behind_it(fast):
    """In eager mode the operator is passed by; wherever something watches, it is called."""
    watched = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            watched.append(str(function))
            return function(*arguments, **(options or {}))

    inputs, table = [tensor.float() for tensor in content(40, 40)], random(HEADS, 9).float()
    results = []
    for mode in (contextlib.nullcontext(), Watch()):
        leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, table)]
        with mode:
            out, lse = attention(*leaves[:3], [OffsetBias(leaves[3], -4)], return_lse=True, backend=fast)
            loss = out.sin().sum() + lse.sin().sum()
            results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for passed_by, called in zip(*results, strict=True):
        assert torch.equal(passed_by, called)
    assert {name for name in watched if "whereformer" in name} == {
        f"whereformer.{fast}_forward.default",
        f"whereformer.{fast}_backward.default",
    }


@pytest.mark.parametrize("length", [20, 400])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.1}], ids=str)
def test_outputs_may_be_changed_in_place(fast, length, options):
    """As those of torch's attention, by a hook for one; only a backward that needs what was there is refused."""
    query, key, value = (random(1, 2, length, 8).requires_grad_() for _ in range(3))
    bias = OffsetBias(random(2, 5).requires_grad_(), -2)
    torch.manual_seed(1)
    expected = attention(query, key, value, [bias], backend=fast, **options).detach()
    torch.manual_seed(1)
    output = attention(query, key, value, [bias], backend=fast, **options)
    output[0, :, 0] = 0.0
    output.mul_(2.0)
    expected[0, :, 0] = 0.0
    assert torch.equal(output, 2 * expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_of_dense_biases_that_a_batch_shares_are_summed_in_float32(fast):
    inputs = [tensor.bfloat16() for tensor in content(60, 200, batch=64)]
    scores = random(1, HEADS, 60, 200).bfloat16().requires_grad_()
    exact = scores.detach().double().requires_grad_()
    d_out = output_gradient(inputs[0]).bfloat16()
    out = attention(*inputs, [DenseBias(scores)], backend=fast)
    expected = attention(*(tensor.double() for tensor in inputs), [DenseBias(exact)], backend="reference")
    (gradient,) = torch.autograd.grad(out, scores, d_out)
    (truth,) = torch.autograd.grad(expected, exact, d_out.double())
    # Rounded once where it is stored, and what rounding of the output does to delta.
    assert error(gradient, truth) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("length", [20, 300])
def test_a_second_derivative_is_refused_and_not_wrong(fast, length):
    inputs = [tensor.requires_grad_() for tensor in content(length, length)]
    out = attention(*inputs, [OffsetBias(random(HEADS, 5), -2)], backend=fast)
    (gradient,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^backend: only 'reference' has second derivatives; use backend="):
        gradient.sum().backward()


def test_a_forward_derivative_is_refused_and_auto_takes_the_reference(fast):
    inputs, term = tuple(content(100, 100)), OffsetBias(random(HEADS, 5), -2)

    def attend(backend):
        return torch.func.jvp(
            lambda query: attention(query, *inputs[1:], [term], backend=backend), inputs[:1], inputs[:1]
        )

    with pytest.raises(ValueError, match=r"^backend: .* has no forward-mode derivative; use"):
        attend(fast)
    assert torch.equal(attend("auto")[1], attend("reference")[1])
