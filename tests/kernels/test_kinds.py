"""Calls of a kind that is remembered: what differs counts, and only where it differs."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

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
)
from whereformer.kernels import kinds, native

N, HEADS, DIM = 24, 2, 16


@pytest.fixture(autouse=True)
def _native():
    need_native()
    kinds._known.values.clear()


def rows(*size, dtype=torch.float32):
    return torch.randn(size or (1, HEADS, N, DIM), dtype=dtype)


def remembered():
    return len(kinds._known.values)


def attend(*arguments, **options):
    with torch.no_grad():
        return attention(*arguments, **options, backend="native")


def check(make, kinds=1, **options):
    """Three calls of one kind with other numbers, of which the last two are computed from what is remembered."""
    held = []
    for _ in range(3):
        # What was given before stays in memory, so that an old address would be read without a crash.
        held.append(given := make())
        found, wanted = attend(*given, **options), attention(*given, **options, backend="reference")
        close = 1e-5 if found.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
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


@pytest.mark.parametrize("terms", TERMS)
def test_only_addresses_change(terms):
    check(lambda: (rows(), rows(), rows(), TERMS[terms]()))


DESCRIBED_AGAIN = {"what the kernel reads in a copy": 6, "dense": 4}
"""How often three calls with gradients are described to the kernel: twice, if it reads no copy and fills all memory."""


@pytest.mark.parametrize("terms", TERMS)
def test_gradients_of_other_numbers(terms, monkeypatch):
    described, arguments = [], native.Arguments
    monkeypatch.setattr(native, "Arguments", lambda *each, **named: described.append(1) or arguments(*each, **named))
    held = []
    for number in range(3):
        some = TERMS[terms]()
        given = [rows(), rows(), rows(), *(getattr(term, field) for term in some for field in term.axes)]
        held.append([each.requires_grad_() for each in given])
        d_results, found = (rows(), rows(1, HEADS, N)), []
        for name in ("native", "reference"):
            torch.manual_seed(number)  # of dropout
            results = attention(*given[:3], some, causal=True, dropout_p=0.2, return_lse=True, backend=name)
            found.append(torch.autograd.grad(results, given, d_results))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert len(described) == DESCRIBED_AGAIN.get(terms, 2)


def test_inputs_that_are_copied_are_not_remembered():
    check(lambda: (rows(), rows(), rows(), [OffsetBias(rows(HEADS, 9).double(), -4)]), kinds=0)
    check(lambda: (rows(), rows(), rows(), [OffsetBias(rows(HEADS, 9), -4), OffsetBias(rows(HEADS, 5), 0)]), kinds=0)
    check(lambda: (rows(), rows(), rows(), [DistanceDecay(rows(1, HEADS, N), rows(1, HEADS, N))] * 2), kinds=0)


def test_shaws_tables_beside_bfloat16():
    """The forward keeps more for a backward, which does not come."""
    check(lambda: (*(rows(dtype=torch.bfloat16) for _ in range(3)), [OffsetKeys(rows(1, 9, DIM), -4)]))


def test_tensors_may_share_memory():
    both = rows(1, HEADS, 3 * N, DIM)
    check(lambda: (*both.normal_().clone().chunk(3, 2), []))


@pytest.mark.parametrize("layout", [lambda x: x.mT.contiguous().mT, lambda x: x[:, :1].expand(x.shape)])
def test_layouts_are_kinds(layout):
    check(lambda: (rows(), rows(), rows()))
    check(lambda: (rows(), layout(rows()), layout(rows())), kinds=2)


def test_numbers_of_masks_and_positions_are_read_again():
    def given():
        ids = torch.randint(0, 3, (2, 1, N))
        at = torch.randint(0, N, (2, N))
        return {
            "key_mask": torch.rand(1, N) > 0.5,
            "query_documents": ids[0],
            "key_documents": ids[1],
            "query_positions": at[0],
            "key_positions": at[1].sort().values,
        }

    q, k, v = rows(), rows(), rows()
    for _ in range(3):
        options = given()
        found, wanted = (
            fn(q, k, v, causal=True, **options)
            for fn in (attend, lambda *a, **o: attention(*a, **o, backend="reference"))
        )
        torch.testing.assert_close(found, wanted)
    assert remembered() == 1


@pytest.mark.parametrize("size", [(HEADS,), (1, HEADS, N)], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_sinks_are_read_again(size, return_lse):
    for _ in range(3):
        given, sinks = (rows(), rows(), rows()), rows(*size)
        found, wanted = (
            attention(*given, sinks=sinks, return_lse=return_lse, backend=name) for name in ("native", "reference")
        )
        torch.testing.assert_close(found, wanted)
    assert remembered() == 1


@pytest.mark.parametrize(
    "other",
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
def test_options_are_kinds(other):
    """A call after one of the same tensors gives what it would alone, errors included."""
    given = rows(), rows(), rows()

    def result():
        try:
            return attend(*given, **other)
        except TypeError as error:
            return str(error)

    alone = result()
    kinds._known.values.clear()
    for options in ({"scale": 1}, {"causal": True, "scale": 1.0}, {"window": (3, 4)}, {"window": 3}):
        attend(*given, **options)
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
    at = torch.arange(N, dtype=torch.float64)
    attention(q, k, v, causal=True, query_positions=at, key_positions=at.clone())
    with pytest.raises(ValueError, match="finite"):
        attention(q, k, v, causal=True, query_positions=at.where(at != 3, torch.nan), key_positions=at)


def test_a_conjugates_part_has_the_other_sign(monkeypatch):
    """Its memory does not say so, and kernels read nothing else, so no backend gets one."""
    kind, read = type(native.backend), []
    for name, usual in (("forward", kind.forward), ("backward", kind.backward)):

        def noted(self, call, *rest, usual=usual):
            read.extend(each for each in (*call.arguments(), *rest[0]) if isinstance(each, torch.Tensor))
            return usual(self, call, *rest)

        monkeypatch.setattr(kind, name, noted)
    part = torch.randn(1, HEADS, N, DIM, dtype=torch.complex64).conj().imag
    k, v, bias = rows(), rows(), torch.randn(HEADS, 9, dtype=torch.complex64).conj().imag
    terms = [OffsetBias(bias, -4)]
    assert part.is_neg()
    assert bias.is_neg()
    attend(part.clone(), k, v, [OffsetBias(bias.clone(), -4)])
    torch.testing.assert_close(attend(part, k, v, terms), attention(part, k, v, terms, backend="reference"))
    leaf = rows().requires_grad_()
    wanted = torch.autograd.grad(attention(leaf, k, v, terms, backend="reference"), leaf, part)
    torch.testing.assert_close(torch.autograd.grad(attention(leaf, k, v, terms, backend="native"), leaf, part), wanted)
    assert read
    assert not any(each.is_neg() for each in read)


def test_another_default_device_changes_nothing():
    given = rows(), rows(), rows()
    wanted = attend(*given)
    with torch.device("meta"):
        assert torch.equal(attend(*given), wanted)


def test_gradients_are_recorded_where_they_are_wanted():
    q, k, v = rows(), rows(), nn.Parameter(rows())
    wanted = attend(q, k, v)
    with torch.inference_mode():
        assert torch.equal(attend(q, k, v), wanted)
    out = attention(q, k, v)
    assert out.requires_grad
    assert torch.equal(out, wanted)
    assert not attention(q, k, v.detach()).requires_grad


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")  # of torch's own attention
def test_transforms_are_seen():
    given = rows(), rows(), rows()
    attend(*given)
    stacked = [torch.stack((each, 2 * each)) for each in given]
    wanted = torch.stack([attention(*each, backend="reference") for each in zip(*stacked, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attention)(*stacked), wanted)


def test_dropout_draws_again():
    given = rows(), rows(), rows()
    assert not torch.equal(attend(*given, dropout_p=0.5), attend(*given, dropout_p=0.5))


def test_few_kinds_are_remembered(monkeypatch):
    most = 20
    monkeypatch.setattr(kinds._known, "_most", most)
    q = rows(1, HEADS, 1, DIM)
    for n in range(1, most + 50):
        attend(q, rows(1, HEADS, n, DIM), rows(1, HEADS, n, DIM))
    assert remembered() == most
    # Nothing of the tensors stays.
    v = rows()
    before = sys.getrefcount(v)
    attend(rows(), rows(), v)
    assert sys.getrefcount(v) == before


def test_threads_share_what_is_remembered():
    given = rows(), rows(), rows()
    wanted = attend(*given)

    def results(_):
        return [attend(*given) for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(results, range(6)):
            assert all(torch.equal(each, wanted) for each in found)
