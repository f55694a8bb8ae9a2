"""What is special about ``backend="triton"``: its limits and its operator."""

import importlib
import os

import pytest
import torch

from tests.kernels.cases import (
    BATCH,
    DEVICE,
    EVERY_KIND,
    HEADS,
    call_of,
    check,
    check_operators,
    content,
    output_gradient,
    random,
    terms_of,
)
from whereformer import OffsetBias, OffsetQueries, Positions, attention, explain
from whereformer.kernels.make_call import make_call

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels import interpreter  # it imports Triton

interpreter.mend()
arguments, available, launch = (
    importlib.import_module(f"whereformer.kernels.triton.{name}") for name in ("arguments", "available", "launch")
)


def test_in_short():
    """A little of all that test_backends asks of it at length."""
    terms = terms_of((*EVERY_KIND, "queries", "decay"), 20, 20)
    options = {"query_positions": torch.arange(20) * 7 % 11, "key_mask": torch.arange(40).view(BATCH, 20) % 3 > 0}
    check("triton", content(20, 20), terms, dropout_p=0.2, **options)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["bias"], {"return_lse": True}),
        *(
            pytest.param(names, options, marks=pytest.mark.slow)
            for names, options in (
                ([], {}),
                (EVERY_KIND, {}),
                (EVERY_KIND, {"query_positions": torch.arange(7, device=DEVICE)}),
            )
        ),
    ],
    ids=str,
)
def test_operators(names, options):
    call = call_of(content(7, 9), terms_of(names, 7, 9), dropout_p=0.1, **options)
    # Compiled programs differ from those of other backends in the shapes that they are told; the rest takes long here.
    quick = {"test_utils": ("test_schema", "test_faketensor")} if options == {"return_lse": True} else {}
    check_operators(launch.operators, launch.backend.adapt(call), **quick)


# --- the gradient of a bias


def test_keys_beyond_the_last_add_nothing():
    """They are in the last block of keys, at offsets for which the table has numbers that overflow there."""
    table = torch.zeros(HEADS, 64, dtype=torch.float64, device=DEVICE)
    table[:, 20:] = 1e4
    check("triton", content(20, 20), [(OffsetBias, [table], 0)], query_positions=Positions(0, 1, 20))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter
def test_gradients_of_a_bias_at_any_magnitude():
    leaves = [tensor.float().requires_grad_() for tensor in (*content(20, 33), random(HEADS, 9))]
    actual, expected = (
        attention(*leaves[:3], [OffsetBias(leaves[3], -4)], backend=name) for name in ("triton", "reference")
    )

    def gradients(d_out):
        return [torch.autograd.grad(out, leaves[3], d_out, retain_graph=True)[0] for out in (actual, expected)]

    for magnitude in (1e-25, 1e25):
        ours, theirs = gradients(output_gradient(actual).float() * magnitude)
        torch.testing.assert_close(ours / magnitude, theirs / magnitude, rtol=1e-5, atol=1e-5)
    for number in (torch.nan, torch.inf):
        d_out = torch.ones_like(actual)
        d_out[0, :, 3] = number
        assert not gradients(d_out)[0].isfinite().any(), "finite by mistake"


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
    with pytest.raises(ValueError, match=f"^backend: 'triton' {message}; use backend='blockwise'$"):
        attention(*tensors, backend="triton")


def test_says_which_tables_of_queries_are_too_long():
    tensors, table = [torch.zeros(1, 1, 700, 16, device=DEVICE)] * 3, torch.zeros(1, 1399, 16, device=DEVICE)
    with pytest.raises(ValueError, match="needs OffsetQueries of at most 1024 offsets, got 1399"):
        attention(*tensors, [OffsetQueries(table, -699)], backend="triton")
    # Of a long table, only offsets that occur count.
    term, shorter = OffsetQueries(table, -699), [tensor[:, :, :400] for tensor in tensors]
    assert "triton" not in explain(*shorter, [term]).unavailable


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu"])
def test_needs_a_cuda_device_unless_interpreted(kind, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = make_call(*[torch.zeros(1, 2, 4, 16)] * 3)
    expected = f"needs a CUDA device, got {kind}"
    assert available.unsupported_reason(call, torch.device(kind)) == expected


GPUS = {
    "needs an NVIDIA GPU, got one of AMD's": {"hip": "6.4"},
    "needs compute capability 8.0, got 7.5": {"capability": (7, 5)},
    "": {},
}


@pytest.mark.parametrize("expected", GPUS)
def test_says_which_gpus_it_cannot_use(expected, monkeypatch):
    gpu = {"hip": None, "capability": (8, 9), **GPUS[expected]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu["capability"])
    monkeypatch.setattr(torch.version, "hip", gpu["hip"])
    reason = available.unsupported_reason(make_call(*[torch.zeros(1, 2, 4, 16)] * 3), torch.device("cuda"))
    assert reason == (expected or None)


def test_needs_positions_that_fit():
    tensors = [torch.zeros(1, 2, 4, 16, device=DEVICE)] * 3
    with pytest.raises(ValueError, match=r"needs offsets below 2\*\*30"):
        attention(*tensors, key_positions=Positions(2**31, 1, 4), backend="triton")


@pytest.mark.parametrize("stride", [2**22, 2**24, 2**29])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_tiles_that_reach_beyond_32_bits_are_refused(stride, options):
    """The offsets of four positions fit, but not those of the 128 in a tile."""
    tensors, positions = [torch.zeros(1, 2, 4, 16, device=DEVICE)] * 3, Positions(0, stride, 4)
    with pytest.raises(ValueError, match=r"needs offsets below 2\*\*30, got positions from 0 and 0 on;"):
        attention(*tensors, query_positions=positions, key_positions=positions, backend="triton", **options)
