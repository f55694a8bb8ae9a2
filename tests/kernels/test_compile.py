"""Compiled and exported programs of any length, with every backend that needs no GPU."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

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
)

HEADS, DIM = 3, 8
LENGTHS = (2, 30, 120, 300)
"""Short ones, and such as every backend treats in its way for long ones."""


def content(n_q, n_k=None, batch=2):
    lengths = (n_q, n_q if n_k is None else n_k, n_q if n_k is None else n_k)
    return [torch.randn(batch, HEADS, length, DIM) for length in lengths]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


class Attention(nn.Module):
    """Attention with terms of the kinds named, whose tables are parameters."""

    def __init__(self, kinds, **options):
        super().__init__()
        self.kinds, self.options = kinds, options
        self.bias = nn.Parameter(torch.randn(HEADS, 9))
        self.vectors = nn.Parameter(torch.randn(1, 7, DIM))
        self.linear = nn.Linear(DIM, 5)

    def forward(self, query, key, value, mask=None):
        make = {
            "bias": lambda: OffsetBias(self.bias, -4),
            "other bias": lambda: OffsetBias(self.bias[:, 2:4], 1),
            "stepped bias": lambda: OffsetBias(self.bias, -4, 2),
            "keys": lambda: OffsetKeys(self.vectors, -2),
            "keys with factors": lambda: OffsetKeys(self.vectors[..., :5], -2, query_factors=self.linear(query)),
            "queries": lambda: OffsetQueries(self.vectors, -2),
            "queries with factors": lambda: OffsetQueries(self.vectors[..., :5], -2, key_factors=self.linear(key)),
            "decay": lambda: DistanceDecay(self.linear(query)[..., 0], self.linear(key)[..., 0]),
            "values": lambda: OffsetValues(self.vectors, -2),
            "factors": lambda: FactorPair(self.linear(query), self.linear(key)),
            "dense": lambda: DenseBias((query @ key.mT).sin()),
        }
        options = dict(self.options)
        if "stepped bias" in self.kinds:
            options["query_positions"] = options["key_positions"] = Positions(0, 2, query.shape[2])
        return attention(query, key, value, [make[kind]() for kind in self.kinds], key_mask=mask, **options)


KINDS = {
    "no terms": (),
    "two biases": ("bias", "other bias"),
    "stepped bias": ("stepped bias",),
    "vectors": ("keys", "keys with factors", "queries with factors", "queries", "decay", "values"),
    "pairs": ("factors", "dense"),
}
OPTIONS = {"two biases": {"window": 7, "softcap": 2.0}}


@pytest.mark.parametrize(
    ("kinds", "dynamic"),
    [
        (("bias",), None),
        pytest.param((), True, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.every) for case in (((), None), (("bias",), True))),
    ],
)
def test_cached_decoding(kinds, dynamic):
    model = Attention(kinds, causal=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n_q, n_k in ((5, 5), (1, 6), (1, 7), (2, 9), (9, 9), (12, 3), (1, 300)):
        inputs = content(n_q, n_k)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("kinds", "backend"),
    [
        (("keys", "values"), "blockwise"),
        *(pytest.param(("bias",), name, marks=pytest.mark.slow) for name in ("reference", "blockwise", "auto")),
    ],
)
def test_tables_that_are_parameters_with_dynamic_shapes(kinds, backend):
    model = Attention(kinds, backend=backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    table = model.bias if kinds == ("bias",) else model.vectors
    for length in (10, 120):
        inputs = content(length)
        outs = [call(*inputs) for call in (compiled, model)]
        torch.testing.assert_close(*outs)
        gradients = [torch.autograd.grad(out.sin().sum(), table)[0] for out in outs]
        torch.testing.assert_close(*gradients)


def exported(model, inputs, shapes):
    return export(model, tuple(inputs), dynamic_shapes=shapes, strict=False).module()


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "backend", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "blockwise"))]
)
@pytest.mark.parametrize("kinds", KINDS)
def test_export_with_a_dynamic_length(kinds, backend, causal):
    model = Attention(KINDS[kinds], backend=backend, causal=causal, **OPTIONS.get(kinds, {})).eval()
    length = {2: Dim("n", min=2, max=4096)}
    program = exported(model, content(24), {"query": length, "key": length, "value": length})
    for n in LENGTHS:
        inputs = content(n)
        torch.testing.assert_close(program(*inputs), model(*inputs), msg=lambda text, n=n: f"{n} tokens: {text}")


@pytest.mark.parametrize("kinds", ["no terms", "two biases"])
@pytest.mark.parametrize("backend", [pytest.param("blockwise", marks=pytest.mark.slow), "auto"])
def test_export_with_a_dynamic_batch_and_a_mask(backend, kinds):
    model = Attention(KINDS[kinds], backend=backend, causal=True).eval()
    sizes = {0: Dim("batch", max=64), 2: Dim("n", max=4096)}
    shapes = {"query": sizes, "key": sizes, "value": sizes, "mask": {0: sizes[0], 1: sizes[2]}}
    program = exported(model, [*content(24), torch.ones(2, 24, dtype=torch.bool)], shapes)
    for batch, length in ((2, 24), (5, 7), (3, 120)):
        inputs = [*content(length, batch=batch), torch.rand(batch, length) > 0.3]
        torch.testing.assert_close(program(*inputs), model(*inputs))


@pytest.mark.parametrize("kinds", ["no terms", "two biases"])
@pytest.mark.parametrize("backend", [pytest.param("blockwise", marks=pytest.mark.slow), "auto"])
def test_export_with_two_dynamic_lengths(backend, kinds):
    model = Attention(KINDS[kinds], backend=backend, causal=True).eval()
    queries, keys = {2: Dim("queries", max=4096)}, {2: Dim("keys", max=4096)}
    program = exported(model, content(5, 24), {"query": queries, "key": keys, "value": keys})
    for n_q, n_k in ((5, 24), (20, 20), (30, 7), (40, 300)):
        inputs = content(n_q, n_k)
        torch.testing.assert_close(program(*inputs), model(*inputs))


# --- transforms of functions


def loss(backend, terms=True, **options):
    """A function of query, key, value and a table."""

    def compute(query, key, value, table):
        return attention(query, key, value, [OffsetBias(table, -4)] * terms, backend=backend, **options).sin().sum()

    return compute


def gradients(function, inputs):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(function(*leaves), leaves, materialize_grads=True)


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("length", [30, 120])
def test_func_grad(length, terms, masked):
    options = {"key_mask": torch.arange(length).unsqueeze(0) < length - 5} if masked else {}
    inputs = *content(length, batch=1), torch.randn(HEADS, 9)
    expected = gradients(loss("reference", terms, **options), inputs)
    torch.testing.assert_close(torch.func.grad(loss("auto", terms, **options), ALL)(*inputs), expected)


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("length", [30, 120])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own attention
def test_per_sample_gradients(length, terms):
    query, key, value = (tensor.unsqueeze(1) for tensor in content(length))
    table = torch.randn(HEADS, 9)
    by_sample = torch.func.vmap(torch.func.grad(loss("auto", terms), ALL), (0, 0, 0, None))(query, key, value, table)
    for index, sample in enumerate(zip(query, key, value, strict=True)):
        expected = gradients(loss("reference", terms), (*sample, table))
        torch.testing.assert_close([gradient[index] for gradient in by_sample], list(expected))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_a_fast_backend_has_gradients():
    query, key, value = (tensor.unsqueeze(1) for tensor in content(120))
    function = loss("blockwise")
    inputs = query, key, value, torch.randn(HEADS, 9)
    actual = gradients(lambda *leaves: torch.func.vmap(function, (0, 0, 0, None))(*leaves).sum(), inputs)
    expected = gradients(lambda *leaves: function(*(rows.flatten(0, 1) for rows in leaves[:3]), leaves[3]), inputs)
    torch.testing.assert_close(actual, expected)


def test_compiled_func_grad():
    inputs = *content(120), torch.randn(HEADS, 9)
    gradient = torch.func.grad(loss("auto"), ALL)
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), gradients(loss("reference"), inputs))


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("length", [30, 120])
@pytest.mark.parametrize("second", [torch.func.jacfwd, torch.func.jacrev])
def test_func_has_second_derivatives(second, length, terms):
    query, *rest = (tensor.double() for tensor in (*content(length, batch=1), torch.randn(HEADS, 9)))
    scale = torch.ones((), dtype=torch.float64)

    def scaled(backend):
        return lambda scale: loss(backend, terms)(query * scale, *rest)

    derivative = second(torch.func.grad(scaled("auto")))(scale)
    nearby = [torch.func.grad(scaled("reference"))(scale + step) for step in (1e-6, -1e-6)]
    torch.testing.assert_close(derivative, (nearby[0] - nearby[1]) / 2e-6, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("length", [30, 120])
def test_a_fast_backend_is_refused_under_func_grad(length, terms):
    inputs = *content(length), torch.randn(HEADS, 9)
    with pytest.raises(ValueError, match=r"^backend: 'blockwise' has no derivative for torch.func; use backend='ref"):
        torch.func.grad(loss("blockwise", terms), ALL)(*inputs)
