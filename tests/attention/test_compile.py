"""Compiled and exported programs of any length, with every backend that needs no GPU."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from whereformer import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, Positions, attention

HEADS, DIM = 3, 8
LENGTHS = (2, 30, 120, 300)
"""Short ones, and such as every backend treats in its way for long ones."""


def content(n_q, n_k=None, batch=2):
    lengths = (n_q, n_q if n_k is None else n_k, n_q if n_k is None else n_k)
    return [torch.randn(batch, HEADS, length, DIM) for length in lengths]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
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
    "bias": ("bias",),
    "two biases": ("bias", "other bias"),
    "stepped bias": ("stepped bias",),
    "vectors": ("keys", "values"),
    "factors": ("factors",),
    "dense": ("dense",),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kinds", [(), ("bias",)])
def test_cached_decoding(kinds, dynamic):
    model = Attention(kinds, causal=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n_q, n_k in ((5, 5), (1, 6), (1, 7), (2, 9), (9, 9), (12, 3), (1, 300)):
        inputs = content(n_q, n_k)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("kinds", "backend"),
    [(("bias",), "reference"), (("bias",), "blockwise"), (("bias",), "auto"), (("keys", "values"), "blockwise")],
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
@pytest.mark.parametrize("kinds", KINDS)
def test_export_with_a_dynamic_length(kinds, backend, causal):
    model = Attention(KINDS[kinds], backend=backend, causal=causal).eval()
    length = {2: Dim("n", min=2, max=4096)}
    program = exported(model, content(24), {"query": length, "key": length, "value": length})
    for n in LENGTHS:
        inputs = content(n)
        torch.testing.assert_close(program(*inputs), model(*inputs), msg=lambda text, n=n: f"{n} tokens: {text}")


@pytest.mark.parametrize("kinds", ["no terms", "bias"])
@pytest.mark.parametrize("backend", ["blockwise", "auto"])
def test_export_with_a_dynamic_batch_and_a_mask(backend, kinds):
    model = Attention(KINDS[kinds], backend=backend, causal=True).eval()
    sizes = {0: Dim("batch", max=64), 2: Dim("n", max=4096)}
    shapes = {"query": sizes, "key": sizes, "value": sizes, "mask": {0: sizes[0], 1: sizes[2]}}
    program = exported(model, [*content(24), torch.ones(2, 24, dtype=torch.bool)], shapes)
    for batch, length in ((2, 24), (5, 7), (3, 120)):
        inputs = [*content(length, batch=batch), torch.rand(batch, length) > 0.3]
        torch.testing.assert_close(program(*inputs), model(*inputs))


@pytest.mark.parametrize("kinds", ["no terms", "bias"])
@pytest.mark.parametrize("backend", ["blockwise", "auto"])
def test_export_with_two_dynamic_lengths(backend, kinds):
    model = Attention(KINDS[kinds], backend=backend, causal=True).eval()
    queries, keys = {2: Dim("queries", max=4096)}, {2: Dim("keys", max=4096)}
    program = exported(model, content(5, 24), {"query": queries, "key": keys, "value": keys})
    for n_q, n_k in ((5, 24), (20, 20), (30, 7), (40, 300)):
        inputs = content(n_q, n_k)
        torch.testing.assert_close(program(*inputs), model(*inputs))
