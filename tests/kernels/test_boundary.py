"""Unusual input to a call: numbers of other libraries, infinite numbers, mixed dtypes, unequal lengths."""

import math
from fractions import Fraction

import pytest
import torch

from whereformer import DenseBias, OffsetBias, Positions, attention
from whereformer.kernels.call import Call

B, H, D = 2, 3, 8


def content(n_q, n_k, dtype=torch.float64):
    return [torch.randn(B, H, length, D, dtype=dtype, requires_grad=True) for length in (n_q, n_k, n_k)]


# --- numbers of other libraries


def test_positions_and_offsets_may_be_numpys():
    numpy = pytest.importorskip("numpy")
    positions = Positions(numpy.int64(-3), numpy.int32(2), numpy.uint8(5))
    assert positions == Positions(-3, 2, 5)
    assert all(type(number) is int for number in vars(positions).values())
    table = torch.randn(H, 9)
    term = OffsetBias(table, numpy.int64(-8), numpy.int16(2))
    assert (type(term.first), type(term.step)) == (int, int)
    inputs = [tensor.detach().float() for tensor in content(5, 5)]
    options = {"query_positions": positions, "key_positions": positions}
    expected = attention(*inputs, [OffsetBias(table, -8, 2)], scale=0.25, **options)
    assert torch.equal(attention(*inputs, [term], scale=numpy.float32(0.25), **options), expected)
    with pytest.raises(TypeError, match=r"^OffsetBias.first: expected an int, got np.float64"):
        attention(*inputs, [OffsetBias(table, numpy.float64(1.0))])


def test_a_scale_is_any_finite_number():
    inputs = [tensor.detach() for tensor in content(5, 5)]
    assert torch.equal(attention(*inputs, scale=Fraction(1, 4)), attention(*inputs, scale=0.25))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_positions_are_finite(number):
    positions = torch.tensor([0.0, 1.0, number, 2.0, 3.0])
    for name in ("query_positions", "key_positions"):
        with pytest.raises(ValueError, match=rf"^{name}: expected finite numbers, got infinite ones or NaN"):
            attention(*content(5, 5), causal=True, **{name: positions})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
def test_positions_and_documents_of_any_whole_dtype(backend, dtype):
    inputs, terms = content(7, 7), [OffsetBias(torch.randn(H, 5, dtype=torch.float64), -2)]
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    documents = torch.tensor([[0, 0, 0, 4, 4, 4, 4]]).expand(B, -1)

    def attend(dtype):
        options = {"query_positions": ids.to(dtype), "key_positions": ids.to(dtype), "causal": True}
        packed = {"query_documents": documents.to(dtype), "key_documents": documents.to(dtype)}
        return attention(*inputs, terms, backend=backend, **options, **packed)

    assert torch.equal(attend(dtype), attend(torch.int64))


# --- infinite biases


@pytest.mark.parametrize("length", [7, 300])
@pytest.mark.parametrize("kind", ["offsets", "pairs"])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_rows_that_read_plus_infinity_are_not_a_number(backend, kind, length):
    bias = torch.zeros(1, H, length, length)
    bias[:, 0, 3, 5] = math.inf
    term = DenseBias(bias)
    if kind == "offsets":
        bias = torch.zeros(H, 2 * length - 1)
        bias[0, 0] = math.inf
        term = OffsetBias(bias, 1 - length)  # the last query's offset from the first key
    inputs = [tensor.detach() for tensor in content(length, length, torch.float32)]
    expected = torch.zeros(B, H, length, D, dtype=torch.bool)
    expected[:, 0, 3 if kind == "pairs" else -1] = True
    assert torch.equal(attention(*inputs, [term], backend=backend).isnan(), expected)


# --- dtypes that autocast makes


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("terms", [False, True])
def test_autocast_casts_what_differs_as_torchs_attention_does(terms, backend):
    query, key, value = (tensor.detach() for tensor in content(5, 5, torch.float32))
    mixed = query, key.bfloat16(), value.bfloat16()
    biases = [OffsetBias(torch.randn(H, 5), -2)] * terms
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*mixed, biases, backend=backend)
        assert out.dtype == torch.bfloat16
        alike = attention(*(tensor.bfloat16() for tensor in mixed), biases, backend=backend)
        assert torch.equal(out, alike)
        if backend == "auto" and not terms:
            # Torch's kernels round the weights to bfloat16 on some processors and not on others.
            expected = torch.nn.functional.scaled_dot_product_attention(*mixed)
            torch.testing.assert_close(out, expected, atol=1e-2, rtol=2e-2)
        with pytest.raises(TypeError, match=r"^query: expected the value's dtype torch.bfloat16, got torch.float64"):
            attention(query.double(), *mixed[1:], biases, backend=backend)
    with pytest.raises(TypeError, match=r"^query: expected the value's dtype torch.bfloat16, got torch.float32"):
        attention(*mixed, biases, backend=backend)


def test_a_masked_query_after_all_keys_needs_no_offsets(monkeypatch):
    inputs, mask = content(1, 9), torch.rand(B, 9) > 0.4
    expected = attention(*inputs, key_mask=mask)
    monkeypatch.setattr(Call, "offsets", lambda _: pytest.fail("made the offsets of all pairs"))
    assert torch.equal(attention(*inputs, key_mask=mask, causal=True), expected)
