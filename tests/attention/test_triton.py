"""``backend="triton"`` against the reference in float64: on a GPU where there is one, else in Triton's interpreter."""

import importlib
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from whereformer import DenseBias, FactorPair, OffsetBias, OffsetKeys, OffsetValues, Positions, attention
from whereformer.attention.call import make_call

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from . import interpreter  # it imports Triton

interpreter.mend()
backend = importlib.import_module("whereformer.attention.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, DIM = 2, 2, 16


def content(n_q, n_k, head_dim=DIM, value_dim=None, batch=BATCH):
    value_dim = head_dim if value_dim is None else value_dim
    shapes = (batch, HEADS, n_q, head_dim), (batch, HEADS, n_k, head_dim), (batch, HEADS, n_k, value_dim)
    return [random(*shape) for shape in shapes]


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


# A term as its class, its tensors and its first offset, so that tests can put other tensors in their place.
TERMS = {
    "bias": lambda n_q, n_k: (OffsetBias, [random(HEADS, 9)], -4),
    "bias_of_one_number": lambda n_q, n_k: (OffsetBias, [random(HEADS, 1)], 3),
    "bias_of_two_numbers": lambda n_q, n_k: (OffsetBias, [random(HEADS, 2)], -1),
    "bias_left_of_all_offsets": lambda n_q, n_k: (OffsetBias, [random(HEADS, 7)], -90),
    "bias_right_of_all_offsets": lambda n_q, n_k: (OffsetBias, [random(HEADS, 7)], 90),
    "bias_with_a_tail_on_the_left_alone": lambda n_q, n_k: (OffsetBias, [random(HEADS, 60)], -3),
    "bias_for_all_offsets": lambda n_q, n_k: (OffsetBias, [random(HEADS, n_q + n_k)], -n_q),
    "keys": lambda n_q, n_k: (OffsetKeys, [random(1, 9, DIM)], -5),
    "keys_per_head": lambda n_q, n_k: (OffsetKeys, [random(HEADS, 2, DIM)], 0),
    "values": lambda n_q, n_k: (OffsetValues, [random(1, 7, DIM)], -2),
    "values_per_head": lambda n_q, n_k: (OffsetValues, [random(HEADS, 20, DIM)], -9),
    "values_of_one_vector": lambda n_q, n_k: (OffsetValues, [random(1, 1, DIM)], 4),
    "factors": lambda n_q, n_k: (FactorPair, [random(BATCH, HEADS, n_q, 3), random(1, HEADS, n_k, 3)], None),
    "factors_of_all_rows": lambda n_q, n_k: (FactorPair, [random(1, HEADS, n_q, 17), random(1, HEADS, n_k, 17)], None),
    "dense": lambda n_q, n_k: (DenseBias, [random(BATCH, HEADS, n_q, n_k)], None),
    "dense_of_all_rows": lambda n_q, n_k: (DenseBias, [random(1, HEADS, n_q, n_k)], None),
}
EVERY_KIND = ("bias", "keys", "values", "factors", "dense_of_all_rows")
TABLES = ("bias", "keys", "values")


def terms_of(names, n_q, n_k):
    return [TERMS[name](n_q, n_k) for name in names]


def run(name, dtype, inputs, terms, options, d_out=None):
    """The output and all gradients."""
    leaves = [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    built = []
    for kind, tensors, first in terms:
        parts = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        leaves += parts
        built.append(kind(*parts) if first is None else kind(*parts, first))
    torch.manual_seed(3)
    out = attention(*leaves[:3], built, **options, backend=name)
    if d_out is None:
        d_out = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=DEVICE).sin().view(out.shape)
    leaves = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(out, leaves, d_out.to(dtype), materialize_grads=True)
    return [out.detach(), *gradients]


@torch.no_grad()
def error(found, expected):
    """The error of a tensor, relative to its norm or to that of as many ones."""
    if expected.numel() == 0:
        return 0.0
    return float((found.double() - expected).norm() / max(expected.norm(), expected.numel() ** 0.5))


@torch.no_grad()
def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


# What a sum over the rows of a test loses, though in truth it be 0.
ROUNDING = 4 * torch.finfo(torch.float32).eps


def check(inputs, terms=(), **options):
    """The same as float64 up to twice the error of plain float32, for the output and every gradient."""
    options = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected = run("reference", torch.float64, inputs, terms, options)
    plain = run("reference", torch.float32, inputs, terms, options)
    found = run("triton", torch.float32, inputs, terms, options)
    allowed = 2 * max(ROUNDING, *map(error, plain, expected))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        assert ours.shape == theirs.shape
        assert error(ours, theirs) <= allowed
    return found


# --- what is computed

LENGTHS = [(1, 1), (2, 2), (1, 35), (33, 5), (35, 40)]


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
def test_content_alone(n_q, n_k):
    check(content(n_q, n_k), causal=n_q == n_k)


@pytest.mark.parametrize("term", TERMS)
def test_each_term(term):
    check(content(33, 40), terms_of([term], 33, 40))


@pytest.mark.parametrize("term", ["bias", "bias_right_of_all_offsets", "keys_per_head", "values"])
def test_each_term_causal(term):
    check(content(40, 33), terms_of([term], 40, 33), causal=True)


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
def test_terms_add_up(n_q, n_k):
    check(content(n_q, n_k), terms_of(EVERY_KIND, n_q, n_k), causal=True, scale=-0.3)


def test_the_same_kind_twice():
    names = ("bias", "bias_for_all_offsets", "keys", "keys_per_head", "values", "values_of_one_vector")
    check(content(20, 20), terms_of(names, 20, 20))


def test_masks():
    mask = torch.rand(BATCH, 40) > 0.3
    mask[1, 15:] = False
    check(content(33, 40), terms_of(EVERY_KIND, 33, 40), key_mask=mask)


@pytest.mark.parametrize("positions", [False, True])
def test_packed_rows(positions):
    lengths = [13, 1, 20]
    documents = torch.repeat_interleave(torch.tensor([7, 2, 5]), torch.tensor(lengths)).expand(BATCH, -1)
    options = {"query_documents": documents, "key_documents": documents.int()}
    if positions:
        ids = torch.cat([torch.arange(length) for length in lengths])
        options |= {"query_positions": ids, "key_positions": ids, "causal": True}
    check(content(34, 34), terms_of(TABLES, 34, 34), **options)


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


@pytest.mark.parametrize("case", POSITIONS)
def test_positions(case):
    query_positions, key_positions = (at.to(DEVICE) if isinstance(at, torch.Tensor) else at for at in POSITIONS[case])
    options = {"query_positions": query_positions, "key_positions": key_positions, "causal": case != "ids"}
    check(content(37, 50), terms_of(TABLES, 37, 50), **options)


def test_causal_with_fractional_positions():
    options = {"query_positions": torch.linspace(0, 3, 20), "key_positions": torch.linspace(0.5, 4, 30)}
    check(content(20, 30), terms_of(["dense"], 20, 30), causal=True, **options)


@pytest.mark.parametrize("term", [None, "bias", "values", "factors", "dense"])
def test_without_content(term):
    terms = [] if term is None else terms_of([term], 37, 37)
    check([None, None, content(37, 37)[2]], terms, causal=True)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (80, 16), (16, 129)])
def test_widths(head_dim, value_dim):
    terms = [
        (OffsetBias, [random(HEADS, 5)], -2),
        (OffsetKeys, [random(1, 5, head_dim)], -2),
        (OffsetValues, [random(1, 5, value_dim)], -2),
    ]
    check(content(20, 20, head_dim, value_dim), terms)


@pytest.mark.parametrize("explicit", [False, True])
def test_long_tables_go_in_parts(explicit, monkeypatch):
    monkeypatch.setattr(backend, "_ROW_TABLE", 8)
    monkeypatch.setattr(backend, "_FEWEST_ROWS", 16)
    terms = [
        (OffsetBias, [random(HEADS, 70)], -40),
        (OffsetKeys, [random(1, 70, DIM)], -40),
        (OffsetValues, [random(HEADS, 70, DIM)], -30),
        *terms_of(["factors", "dense_of_all_rows"], 37, 30),
    ]
    options = {"query_positions": torch.arange(37), "query_documents": torch.arange(74).view(2, 37) // 24}
    if explicit:
        options["key_documents"] = torch.arange(60).view(2, 30) // 20
    else:
        options = {"key_mask": torch.rand(BATCH, 30) > 0.2}
    check(content(37, 30), terms, causal=True, dropout_p=0.2, **options)


# --- dropout


@pytest.mark.parametrize("positions", ["affine", "ids"])
def test_dropout_drops_what_the_reference_drops(positions):
    options = {"query_positions": torch.arange(37)} if positions == "ids" else {}
    check(content(37, 30), terms_of(EVERY_KIND, 37, 30), dropout_p=0.6, **options)


# --- sizes and layouts at the edge


@pytest.mark.parametrize(("batch", "n_q", "n_k"), [(2, 0, 5), (2, 5, 0), (0, 4, 5)])
def test_nothing(batch, n_q, n_k):
    terms = terms_of(TABLES, n_q, n_k)
    out, *gradients = check(content(n_q, n_k, batch=batch), terms)
    assert out.shape == (batch, HEADS, n_q, DIM)
    assert all((gradient == 0).all() for gradient in gradients)


def test_memory_layout_does_not_matter():
    query, key, value = content(20, 20)
    key, value = key[:1, :1].expand(BATCH, HEADS, -1, -1), value[:, :1].expand(-1, HEADS, -1, -1)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    terms = terms_of(EVERY_KIND, 20, 20)
    strange = [lambda tensor: tensor, lambda tensor: tensor.mT.contiguous().mT]
    outs = []
    for change in strange:
        leaves = [change(tensor.float()).detach().requires_grad_() for tensor in (query, key, value)]
        parts = [[change(tensor.float()).detach().requires_grad_() for tensor in term[1]] for term in terms]
        built = [
            kind(*part) if first is None else kind(*part, first)
            for (kind, _, first), part in zip(terms, parts, strict=True)
        ]
        out = attention(*leaves, built, backend="triton")
        flat = [*leaves, *(tensor for part in parts for tensor in part)]
        # A sum's gradient has strides of zero.
        outs.append([out, *torch.autograd.grad(out.sum(), flat)])
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_may_attend_nothing_are_zeros_with_zero_gradients():
    query, key, value = (tensor.float().requires_grad_() for tensor in content(20, 20))
    scores = random(1, HEADS, 20, 20).float()
    scores[:, 0, 3] = -math.inf
    scores[:, :, 5] = torch.finfo(torch.float32).min
    scores.requires_grad_()
    mask = torch.ones(BATCH, 20, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    terms = [DenseBias(scores), OffsetValues(random(1, 5, DIM).float(), -2)]
    out = attention(query, key, value, terms, key_mask=mask, backend="triton")
    assert (out[1] == 0).all()
    assert (out[0, 0, 3] == 0).all()
    assert (out[0, :, 5] != 0).any()
    gradients = torch.autograd.grad(out.sum(), (query, key, value, scores))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[1] == 0).all() for gradient in gradients[:3])
    assert (gradients[3][:, 0, 3] == 0).all()


def test_gradients_only_where_needed():
    query, key, value = (tensor.float() for tensor in content(20, 20))
    table = random(HEADS, 5).float()
    for needed in (query, key, value, table):
        needed.requires_grad_()
        out = attention(query, key, value, [OffsetBias(table, -2)], backend="triton")
        out.sum().backward()
        assert needed.grad is not None
        needed.requires_grad_(False)
    with torch.no_grad():
        assert not attention(query, key, value, backend="triton").requires_grad


# --- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [("bias",), ("keys", "values"), ("factors", "dense")])
def test_half_precision_is_as_good_as_fused_attention(dtype, terms):
    inputs = [tensor.to(dtype).double() for tensor in content(37, 50)]
    # Fused attention takes no terms, so its errors are those of a call without any.
    leaves = [[tensor.to(kind).requires_grad_() for tensor in inputs] for kind in (dtype, torch.float64)]
    plain = []
    for tensors in leaves:
        out = scaled_dot_product_attention(*tensors)
        d_out = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=DEVICE).sin().view(out.shape)
        plain.append([out, *torch.autograd.grad(out, tensors, d_out.to(out.dtype))])
    allowed = 2 * max(relative_error(*pair) for pair in zip(*plain, strict=True))
    terms = [
        (kind, [tensor.to(dtype).double() for tensor in tensors], first)
        for kind, tensors, first in terms_of(terms, 37, 50)
    ]
    expected = run("reference", torch.float64, inputs, terms, {})
    found = run("triton", dtype, inputs, terms, {})
    assert all(tensor.dtype == dtype for tensor in found)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= allowed


def test_tables_stay_float32_beside_half_precision():
    table = random(HEADS, 9).float().requires_grad_()
    query, key, value = (tensor.bfloat16() for tensor in content(37, 37))
    attention(query, key, value, [OffsetBias(table, -4)], backend="triton").float().pow(2).sum().backward()
    assert table.grad.dtype == torch.float32
    expected = table.detach().double().requires_grad_()
    inputs = [tensor.double() for tensor in (query, key, value)]
    attention(*inputs, [OffsetBias(expected, -4)], backend="reference").pow(2).sum().backward()
    assert error(table.grad, expected.grad) < 2e-2


def test_autocast_changes_nothing():
    inputs = [tensor.float().requires_grad_() for tensor in content(20, 20)]
    tables = [random(1, 5, DIM).float().requires_grad_() for _ in range(2)]
    terms = [OffsetKeys(tables[0], -2), OffsetValues(tables[1], -2)]
    outs = []
    for enabled in (False, True):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=enabled):
            out = attention(*inputs, terms, backend="triton")
            outs.append([out, *torch.autograd.grad(out.sum(), [*inputs, *tables])])
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


# --- as an operator of torch


def test_the_same_bits_every_time():
    inputs, terms = content(20, 20), terms_of(EVERY_KIND, 20, 20)
    first, second = (run("triton", torch.float32, inputs, terms, {"dropout_p": 0.1}) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("explicit", [False, True])
def test_operator_contract(explicit, monkeypatch):
    calls = []
    forward = torch.ops.whereformer.triton_forward

    class Spy:
        def triton_forward(self, *arguments):
            calls.append(arguments)
            return forward(*arguments)

    inputs = [tensor.float().requires_grad_() for tensor in content(7, 9)]
    built = [
        kind(*(tensor.float().requires_grad_() for tensor in tensors), *(() if first is None else (first,)))
        for kind, tensors, first in terms_of(EVERY_KIND, 7, 9)
    ]
    options = {"query_positions": torch.arange(7, device=DEVICE)} if explicit else {}
    call = make_call(*inputs, built, dropout_p=0.1, **options)
    monkeypatch.setattr(torch.ops, "whereformer", Spy())
    backend.attend(call)
    monkeypatch.undo()
    arguments = [
        tensor.detach().requires_grad_(tensor.is_floating_point()) if isinstance(tensor, torch.Tensor) else tensor
        for tensor in calls[0]
    ]
    torch.library.opcheck(forward, arguments)


def test_compiles_as_one_graph():
    inputs = [tensor.float().requires_grad_() for tensor in content(20, 20)]
    table = random(HEADS, 5).float().requires_grad_()

    def attend(query, key, value, table):
        return attention(query, key, value, [OffsetBias(table, -2)], causal=True, dropout_p=0.1, backend="triton")

    outs = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        out = function(*inputs, table)
        outs.append([out, *torch.autograd.grad(out.sum(), [*inputs, table])])
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


def test_compiles_for_any_length():
    def attend(query, key, value):
        return attention(query, key, value, [OffsetBias(table, -2)], causal=True, backend="triton")

    table = random(HEADS, 5).float()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (17, 30):
        inputs = [tensor.float() for tensor in content(length, length)]
        assert torch.equal(compiled(*inputs), attend(*inputs))


# --- what it cannot take


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 2, 4, 8), torch.float32, "needs a value's head_dim from 16 to 256, got 8"),
        ((1, 2, 4, 257), torch.float32, "needs a value's head_dim from 16 to 256, got 257"),
        ((1, 2, 4, 16), torch.float64, "needs bfloat16, float16 or float32, got float64"),
    ],
)
def test_says_what_it_cannot_take(shape, dtype, message):
    tensors = [torch.zeros(shape, dtype=dtype, device=DEVICE)] * 3
    with pytest.raises(ValueError, match=f"^backend: backend 'triton' {message}; use backend='blockwise'$"):
        attention(*tensors, backend="triton")


def test_needs_a_cuda_device_unless_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu"):
        attention(*[torch.zeros(1, 2, 4, 16)] * 3, backend="triton")


def test_needs_positions_that_fit():
    tensors = [torch.zeros(1, 2, 4, 16, device=DEVICE)] * 3
    with pytest.raises(ValueError, match=r"needs offsets below 2\*\*30"):
        attention(*tensors, key_positions=Positions(2**31, 1, 4), backend="triton")


def test_importing_needs_no_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch, whereformer
inputs = [torch.zeros(1, 2, 4, 16)] * 3
whereformer.attention(*inputs)
try:
    whereformer.attention(*inputs, backend="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "needs Triton, which is not installed" in done.stdout
