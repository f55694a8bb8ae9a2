"""Which backend ``backend="auto"`` chooses, and how ``explain`` describes the choice."""

import importlib

import pytest
import torch

from tests.kernels.cases import need_native
from whereformer import OffsetBias, attention, explain
from whereformer.kernels.backend_choice import choose_backend
from whereformer.kernels.make_call import make_call
from whereformer.kernels.triton import available as triton

module = importlib.import_module("whereformer.kernels.backend_choice")
TERM = (OffsetBias(torch.zeros(2, 3), -1),)


def inputs(length, **options):
    return [torch.zeros(1, 2, length, 8, **options)] * 3


@pytest.fixture(params=["with", "without"])
def native(request, monkeypatch):
    """Whether the compiled kernel is there."""
    if request.param == "with":
        need_native()
        return True
    monkeypatch.setattr(module.native.backend, "unsupported_reason", lambda call, device: "is not built: no compiler")
    return False


@pytest.mark.parametrize(
    ("terms", "options", "chosen", "otherwise"),
    [
        ((), {}, "native", "sdpa"),
        ((), {"causal": True, "dropout_p": 0.1}, "native", "sdpa"),
        ((), {"key_mask": torch.ones(1, 10, dtype=torch.bool)}, "native", "sdpa"),
        ((), {"window": 3}, "native", "blockwise"),
        ((), {"softcap": 3.0}, "native", "blockwise"),
        (TERM, {}, "native", "blockwise"),
        (TERM, {"return_lse": True, "dropout_p": 0.1}, "native", "blockwise"),
        (TERM, {"backend": "reference"}, "reference", "reference"),
        (TERM, {"backend": "blockwise"}, "blockwise", "blockwise"),
        ((), {"backend": "reference"}, "reference", "reference"),
    ],
)
def test_the_rule(terms, options, chosen, otherwise, native):
    choice = explain(*inputs(10), terms, **options)
    assert choice.backend == (chosen if native else otherwise)
    assert str(choice).startswith(f"{choice.backend}: ")
    assert ("asked for by name" in choice.reason) == ("backend" in options)
    assert ("native" in choice.unavailable) == (not native)


def test_the_choice_does_not_depend_on_gradients(native):
    """A checkpoint computes without gradients first, and with them again: by another backend they would be wrong."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for terms in ((), TERM):
            for options in ({}, {"dropout_p": 0.1}):
                with_gradients = inputs(10, dtype=dtype, requires_grad=True)
                expected = str(explain(*with_gradients, terms, **options))
                assert str(explain(*inputs(10, dtype=dtype), terms, **options)) == expected
                with torch.no_grad():
                    assert str(explain(*with_gradients, terms, **options)) == expected


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own attention
def test_what_only_torchs_attention_can_do_is_left_to_it(native):
    query, key, value = (torch.randn(2, 1, 40, 16) for _ in range(3))
    expected = attention(query, key, value, backend="reference")
    chosen = []

    def one(query, key, value):
        tensors = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        chosen.append(explain(*tensors).backend)
        return attention(*tensors)[0]

    torch.testing.assert_close(torch.func.vmap(one)(query, key, value), expected)
    with torch.autocast("cpu", torch.bfloat16):
        one(query[0], key[0], value[0])
        # A layer's projections are what autocast makes them already.
        halves = [tensor.bfloat16() for tensor in (query, key, value)]
        assert explain(*halves).backend == ("native" if native else "sdpa")
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, value), expected)
    assert chosen == ["sdpa", "sdpa"]
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(query, key, value, [OffsetBias(torch.zeros(1, 3), -1)]).backend != "sdpa"


def test_the_number_of_queries_does_not_matter():
    """The kernel reads the keys of a single query where they lie."""
    need_native()
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = inputs(40, dtype=dtype)
        for n_q in (1, 8, 40):
            assert explain(query[:, :, :n_q], key, value).backend == "native"


def test_says_that_the_compiled_kernel_is_missing_and_why(monkeypatch):
    why = "is not built: no compiler; install one"
    monkeypatch.setattr(module.native.backend, "unsupported_reason", lambda call, device: why)
    choice = explain(*inputs(10), TERM)
    assert choice.reason == (
        f"some queries at a time in plain PyTorch, in O(n) memory; the compiled kernel would be faster, but it {why}"
    )
    assert choice.unavailable["native"] == f"'native' {why}; use backend='blockwise'"
    with pytest.raises(ValueError, match=rf"^backend: 'native' {why}; use backend='blockwise'$"):
        attention(*inputs(10), backend="native")
    assert torch.equal(attention(*inputs(10), TERM), inputs(10)[0])


def test_a_kernel_that_takes_some_dtypes_leaves_the_others(monkeypatch):
    def unsupported_reason(call, device):
        return None if call.value.dtype == torch.float32 else f"needs float32, got {call.value.dtype}"

    monkeypatch.setattr(module.native.backend, "unsupported_reason", unsupported_reason)
    assert explain(*inputs(10), TERM).backend == "native"
    assert explain(*inputs(10, dtype=torch.float64), TERM).backend == "blockwise"


def test_a_backend_refuses_an_input_that_it_does_not_list(monkeypatch):
    need_native()
    listed = tuple(name for name in module.native.backend.supported_inputs if name != "bias")
    monkeypatch.setattr(module.native.backend, "supported_inputs", listed)
    with pytest.raises(ValueError, match=r"^backend: 'native' does not support bias; use backend='blockwise'$"):
        attention(*inputs(10), TERM, backend="native")
    assert explain(*inputs(10), TERM).backend == "blockwise"


def test_explaining_draws_no_random_numbers():
    before = torch.get_rng_state()
    explain(*inputs(100), TERM, dropout_p=0.1)
    assert torch.equal(torch.get_rng_state(), before)


def test_says_why_a_backend_is_out_of_reach(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        assert "needs" in explain(*inputs(100), TERM).unavailable["triton"]
    with pytest.raises(ValueError, match=r"^backend: 'triton' needs"):
        explain(*inputs(100), TERM, backend="triton")


def test_refuses_unknown_backends_and_bad_input_as_attention_does():
    names = "auto, reference, blockwise, native, triton"
    with pytest.raises(ValueError, match=rf"^backend: expected one of {names}, got 'fast'$"):
        explain(*inputs(4), backend="fast")
    with pytest.raises(TypeError, match="terms"):
        explain(*inputs(4), TERM[0])


@pytest.mark.parametrize("window", [20, (19, None), (None, 19)])
def test_a_window_wider_than_the_sequence_is_none(window):
    tensors = inputs(20)
    assert str(explain(*tensors, window=window)) == str(explain(*tensors))
    assert torch.equal(attention(*tensors, window=window), attention(*tensors))
    assert explain(*tensors, window=18).backend != "sdpa"


def test_packed_rows_on_a_gpu_go_to_triton_without_terms_too():
    """Torch's own attention would need a number for every pair."""
    ids = torch.arange(100).expand(1, -1) // 30
    packed = make_call(*inputs(100), query_documents=ids, key_documents=ids)
    gpu = torch.device("cuda")
    chosen = choose_backend(packed, "auto", gpu)
    assert chosen == ("sdpa" if triton.unsupported_reason(packed, gpu) else "triton")
    assert choose_backend(make_call(*inputs(100)), "auto", gpu) == "sdpa"
    assert choose_backend(packed, "auto", gpu) != "native"
