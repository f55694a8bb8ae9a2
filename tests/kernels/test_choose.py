"""Which backend ``backend="auto"`` chooses, and how ``explain`` describes the choice."""

from dataclasses import fields, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.onednn import need_onednn
from whereformer import OffsetBias, attention, explain
from whereformer.kernels import tuning
from whereformer.kernels.call import make_call
from whereformer.kernels.choose import choose
from whereformer.kernels.shape import CallShape
from whereformer.kernels.triton import available as triton

TERM = (OffsetBias(torch.zeros(2, 3), -1),)


def inputs(length, **options):
    return [torch.zeros(1, 2, length, 8, **options)] * 3


@pytest.mark.parametrize(
    ("length", "terms", "options", "chosen"),
    [
        (100, (), {}, "fused"),
        (100, (), {"causal": True}, "fused"),
        (100, (), {"dropout_p": 0.1}, "blockwise"),
        (100, (), {"key_mask": torch.ones(1, 100, dtype=torch.bool)}, "blockwise"),
        (10, (), {"key_mask": torch.ones(1, 10, dtype=torch.bool)}, "fused"),
        (90, TERM, {}, "reference"),
        (91, TERM, {}, "blockwise"),
        (91, TERM, {"backend": "reference"}, "reference"),
        (10, TERM, {"backend": "blockwise"}, "blockwise"),
        (10, (), {"backend": "reference"}, "reference"),
    ],
)
def test_the_rule(length, terms, options, chosen):
    choice = explain(*inputs(length), terms, **options)
    assert choice.backend == chosen
    assert str(choice).startswith(f"{chosen}: ")
    assert ("asked for by name" in choice.reason) == ("backend" in options)


@pytest.fixture
def onednn():
    need_onednn()
    with tuning.use(onednn=True):
        yield


def test_long_plain_calls_go_where_products_are_faster(onednn):
    long = [torch.randn(1, 1, 512, 64) for _ in range(3)]
    choice = explain(*long)
    assert (choice.backend, f"float32 on {tuning.current().processor}:" in choice.reason) == ("blockwise", True)
    assert explain(*long, causal=True).backend == "blockwise"
    expected = attention(*long, backend="reference")
    torch.testing.assert_close(attention(*long), expected)
    short = [tensor[:, :, 1:] for tensor in long]
    others = (short, [tensor.double() for tensor in long], [*long[:2], long[2][..., 1:]])
    assert all(explain(*inputs).backend == "fused" for inputs in others)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(*long).backend == "fused"
    with sdpa_kernel(SDPBackend.MATH):
        assert explain(*long).backend == "fused"
    with tuning.use(onednn=False):
        assert explain(*long).backend == "fused"


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own attention
def test_what_only_torchs_attention_can_do_is_left_to_it(onednn):
    query, key, value = (torch.randn(2, 1, 512, 64) for _ in range(3))
    expected = attention(query, key, value, backend="reference")

    def one(query, key, value):
        return attention(*(tensor.unsqueeze(0) for tensor in (query, key, value)))[0]

    torch.testing.assert_close(torch.func.vmap(one)(query, key, value), expected)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, value), expected)


def test_says_what_the_processor_decided():
    """Each way on the CPU is named, with the dtype and the family of processors whose thresholds it follows."""
    plain, trained = inputs(100), inputs(100, requires_grad=True)
    few = "on a test: so few scores a head that"
    with tuning.use(processor="a test", kept_scores=100**2, fused_dtypes=frozenset({torch.float32})):
        assert explain(*inputs(90), TERM).reason == f"float32 {few} writing them all out is fastest"
        assert explain(*trained, TERM).reason == f"float32 {few} training keeps their softmax"
        assert explain(*plain, TERM).reason == "float32 on a test: torch's own kernels read the table of offsets"
        rows = "tile by tile, in O(n) memory"
        assert explain(*inputs(100, dtype=torch.bfloat16), TERM).reason == rows
        assert explain(*plain, TERM, causal=True).reason == rows
        assert explain(*plain, TERM, backend="blockwise", dropout_p=0.1).reason == f"asked for by name; {rows}"
    with tuning.use(kept_scores=100**2 - 1, fused_dtypes=frozenset()):
        assert explain(*trained, TERM).reason == rows


def test_sinks_and_sink_tokens_are_explained_by_what_is_then_computed():
    def by_blockwise(length, terms=(), **options):
        found = explain(*inputs(length), terms, backend="blockwise", window=2, **options).reason
        return found.removeprefix("asked for by name; ")

    block_by_block = "torch's own kernels compute the window, block by block"
    tiles = "tile by tile, in O(n) memory"
    assert by_blockwise(600) == block_by_block
    # Torch's kernels mask no keys, and tell no log-sum-exp that has a gradient.
    assert by_blockwise(600, sinks=torch.zeros(2)) == by_blockwise(600, sink_tokens=1) == tiles
    with tuning.use(processor="a test", fused_dtypes=frozenset({torch.float32})):
        table = "float32 on a test: torch's own kernels read the table of offsets"
        assert by_blockwise(600, TERM, sink_tokens=1) == f"{tiles}; sink tokens: {table}"


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
    with pytest.raises(ValueError, match=r"^backend: expected one of auto, reference, blockwise, triton, got 'fast'$"):
        explain(*inputs(4), backend="fast")
    with pytest.raises(TypeError, match="terms"):
        explain(*inputs(4), TERM[0])


def test_what_is_chosen_runs():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 100, 8) for _ in range(3))
    mask = torch.arange(100).unsqueeze(0) < 60
    expected = attention(query, key, value, key_mask=mask, backend="reference")
    torch.testing.assert_close(attention(query, key, value, key_mask=mask), expected)


def test_few_scores_in_half_precision_are_written_out_where_there_is_a_backward(monkeypatch):
    monkeypatch.setattr(tuning, "_current", replace(tuning.current(), half_written_out_scores=90**2))
    half = inputs(90, dtype=torch.bfloat16)
    assert explain(*half).backend == "fused"
    trained = [half[0].clone().requires_grad_(), *half[1:]]
    choice = explain(*trained)
    assert (choice.backend, "half precision" in choice.reason) == ("reference", True)
    with torch.no_grad():
        assert explain(*trained).backend == "fused"
    assert explain(*[tensor.float() for tensor in trained]).backend == "fused"
    assert explain(*inputs(91, dtype=torch.bfloat16, requires_grad=True)).backend == "fused"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}, {"key_mask": True}], ids=str)
@pytest.mark.parametrize("terms", [(), TERM], ids=["no terms", "a bias"])
@pytest.mark.parametrize("length", [16, 80, 120, 512])
def test_the_shape_of_a_call_is_enough_to_choose(length, terms, options, dtype, training):
    options = dict(options)
    if "key_mask" in options:
        options["key_mask"] = torch.ones(1, length, dtype=torch.bool)
    query = torch.zeros(1, 2, length, 64, dtype=dtype, requires_grad=training)
    call = make_call(query, query, query, terms, **options)
    shape = CallShape(
        torch.device("cpu"),
        dtype,
        *(length, length, 64, 64),
        has_terms=bool(terms),
        has_masks="key_mask" in options,
        dropout_p=options.get("dropout_p", 0.0),
        trains=training,
        offset_range=(1 - length, length - 1),
    )
    assert choose(shape, "auto") == choose(call, "auto")
    for field in fields(CallShape):
        assert getattr(shape, field.name) == getattr(call, field.name), field.name


def test_packed_rows_on_a_gpu_go_to_triton_without_terms_too():
    """Torch's own attention would need a number for every pair."""
    ids = torch.arange(100).expand(1, -1) // 30
    packed = make_call(*inputs(100), query_documents=ids, key_documents=ids)
    gpu = torch.device("cuda")
    chosen = choose(packed, "auto", gpu)
    assert chosen == ("fused" if triton.unavailable(packed, gpu) else "triton")
    assert choose(make_call(*inputs(100)), "auto", gpu) == "fused"
    assert choose(packed, "auto") == "blockwise"
