"""``backend="auto"`` computes what the reference computes, whichever backend it chooses."""

import math

import pytest
import torch

from whereformer import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, Positions, attention, explain

BATCH, HEADS, DIM = 2, 3, 4


def content(n_q, n_k, value_dim=DIM, dtype=torch.float64):
    shapes = (BATCH, HEADS, n_q, DIM), (BATCH, HEADS, n_k, DIM), (BATCH, HEADS, n_k, value_dim)
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def assert_backends_agree(inputs, terms=(), tables=(), tolerance=1e-12, **options):
    """Outputs and gradients of all inputs (and of the terms' ``tables``)."""
    outputs, gradients = [], []
    for backend in ("reference", "auto"):
        out = attention(*inputs, terms, **options, backend=backend)
        leaves = [tensor for tensor in (*inputs, *tables) if tensor is not None]
        # Every output counts with a weight of its own, so that no mistake cancels.
        loss = (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        outputs.append(out)
        gradients.append(torch.autograd.grad(loss, leaves))
    assert outputs[1].dtype == outputs[0].dtype
    torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
    for ours, expected in zip(*reversed(gradients), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    return outputs[1]


MASK = torch.tensor([[True, False, True, True, False, True, True], [False] * 7])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [3, 4, 3, 4, 3, 4, 5]])

OPTIONS = {
    "nothing": {},
    "scale": {"scale": -0.3},
    "scale_of_zero": {"scale": 0.0},
    "causal": {"causal": True},
    "causal_with_explicit_positions": {
        "causal": True,
        "query_positions": torch.tensor([[3, 0, 9, 4, -1, 2, 2], [0, 1, 2, 3, 4, 5, 6]]),
        "key_positions": torch.tensor([0, 5, 1, 2, 8, 4, 4]),
    },
    "causal_with_query_positions_alone": {"causal": True, "query_positions": Positions(2, 3, 7)},
    "causal_with_key_positions_alone": {"causal": True, "key_positions": Positions(-3, 2, 7)},
    "causal_with_fractions": {"causal": True, "query_positions": torch.linspace(-1, 5, 7)},
    "mask": {"key_mask": MASK},
    "causal_mask": {"causal": True, "key_mask": MASK},
    "documents": {"query_documents": DOCUMENTS, "key_documents": DOCUMENTS},
    "causal_documents": {"causal": True, "query_documents": DOCUMENTS, "key_documents": DOCUMENTS},
    "everything": {"causal": True, "key_mask": MASK, "query_documents": DOCUMENTS, "key_documents": DOCUMENTS},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_without_terms(options):
    assert_backends_agree(content(7, 7), **OPTIONS[options])


@pytest.mark.parametrize("options", ["nothing", "causal", "causal_mask", "everything"])
def test_without_terms_in_float32(options):
    assert_backends_agree(content(7, 7, dtype=torch.float32), tolerance=1e-5, **OPTIONS[options])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"key_mask": MASK, "causal": True}], ids=str)
@pytest.mark.parametrize("n_q", [0, 1, 2, 6, 9])
def test_unequal_lengths(n_q, options):
    assert_backends_agree(content(n_q, 7), **options)


@pytest.mark.parametrize("length", [1, 2, 17, 63, 130])
def test_causal_squares(length):
    assert_backends_agree(content(length, length, dtype=torch.float32), causal=True, tolerance=1e-5)


def test_value_of_another_width():
    assert assert_backends_agree(content(5, 7, value_dim=6), causal=True).shape[-1] == 6


def test_queries_before_every_key_are_zero():
    out = assert_backends_agree(content(9, 7), causal=True)
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:] != 0).all()


def test_fully_masked_rows_are_zero():
    out = assert_backends_agree(content(7, 7), key_mask=MASK)
    assert (out[1] == 0).all()


def test_no_keys_give_zeros():
    assert torch.equal(attention(*content(3, 0)), torch.zeros(BATCH, HEADS, 3, DIM, dtype=torch.float64))


def test_an_empty_batch():
    inputs = [tensor[:0] for tensor in content(3, 5)]
    assert attention(*inputs, key_mask=torch.ones(0, 5, dtype=torch.bool), causal=True).shape == (0, HEADS, 3, DIM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", ["nothing", "causal", "everything"])
def test_half_precision(options, dtype):
    inputs = [tensor.detach().to(dtype) for tensor in content(7, 7)]
    exact = attention(*(tensor.double() for tensor in inputs), **OPTIONS[options], backend="reference")
    out = attention(*inputs, **OPTIONS[options])
    assert out.dtype == dtype
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= 2 * rounding


def test_memory_layout_does_not_matter():
    inputs = [tensor.detach() for tensor in content(7, 7)]
    spread = [tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in inputs]
    out = assert_backends_agree(spread, **OPTIONS["causal_mask"])
    torch.testing.assert_close(out, attention(*inputs, **OPTIONS["causal_mask"]))


def table(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


TERMS = {
    "offset_bias": lambda: (OffsetBias, (table(HEADS, 5),), -2),
    "offset_keys": lambda: (OffsetKeys, (table(1, 5, DIM),), -2),
    "offset_values": lambda: (OffsetValues, (table(HEADS, 5, DIM),), -2),
    "factor_pair": lambda: (FactorPair, (table(1, HEADS, 5, 2), table(1, HEADS, 7, 2))),
    "dense_bias": lambda: (DenseBias, (table(BATCH, HEADS, 5, 7),)),
}


@pytest.mark.parametrize(
    ("kind", "with_content"),
    [(kind, True) for kind in TERMS] + [(kind, False) for kind in TERMS if kind != "offset_keys"],
)
def test_with_terms(kind, with_content):
    term, tables, *first = TERMS[kind]()
    inputs = content(5, 7)
    inputs = inputs if with_content else (None, None, inputs[2])
    options = {"causal": True, "key_mask": MASK, "query_positions": Positions(0, 2, 5)}
    assert_backends_agree(inputs, [term(*tables, *first)], tables, **options)


def test_with_a_term_that_forbids_pairs():
    scores = torch.zeros(1, HEADS, 7, 7).double()
    scores[..., ::2] = -math.inf
    scores[:, :, 3] = -math.inf
    out = assert_backends_agree(content(7, 7), [DenseBias(scores)])
    assert (out[:, :, 3] == 0).all()


def test_without_content_and_without_terms():
    value = content(7, 7)[2]
    assert_backends_agree((None, None, value), causal=True)


@pytest.mark.parametrize("backend", ["flash", "", "AUTO", None])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match=rf"backend: expected one of auto, reference.*, got {backend!r}"):
        attention(*content(2, 2), backend=backend)


@pytest.mark.parametrize("window", [20, (19, None), (None, 19)])
def test_a_window_wider_than_the_sequence_is_none(window):
    query, key, value = (torch.randn(1, 2, 20, 8) for _ in range(3))
    found = explain(query, key, value, window=window)
    assert str(found) == str(explain(query, key, value))
    assert torch.equal(attention(query, key, value, window=window), attention(query, key, value))
    assert explain(query, key, value, window=18).backend != "fused"
