"""All gradients in one pass of backend="triton", where a call permits bits that differ from run to run."""

import importlib
import os

import pytest
import torch

from tests.kernels.cases import (
    DEVICE,
    DIM,
    EVERY_KIND,
    HEADS,
    check,
    content,
    error,
    output_gradient,
    random,
    run,
    terms_of,
)
from tests.kernels.test_backends import with_log_sums
from whereformer import OffsetBias, Positions, attention, attention_varlen

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels import interpreter  # it imports Triton

interpreter.mend()
KERNELS = ("all_gradients", "query_gradients", "key_gradients")


@pytest.fixture(autouse=True)
def permitted():
    """No switch of the process asks for deterministic algorithms, as some runs of the tests do."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def launched(monkeypatch):
    """The names of the gradient kernels that were launched."""
    names = []

    class Spy:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            names.append(self.name)
            return self.kernel[grid]

    for name in KERNELS:
        module = importlib.import_module(f"whereformer.kernels.triton.jit.{name}")
        monkeypatch.setattr(module, name, Spy(name, getattr(module, name)))
    return names


def check_one_pass(launched, inputs, terms=(), dtype=torch.float32, **options):
    """The one-pass kernel alone computes the gradients, and each number of them is right."""
    check("triton", inputs, terms, dtype, deterministic=False, **options)
    assert launched == ["all_gradients"]


DOCUMENTS = torch.arange(80).view(2, 40) // 13
KEY_MASK = (torch.arange(80).view(2, 40) * 7 % 5 > 1) & torch.tensor([[True], [False]])  # no key of the second row
EVERYTHING = {"causal": True, "window": (17, None), "dropout_p": 0.2, "softcap": 1.5, "scale": -0.4}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "padding": {"key_mask": KEY_MASK},
    "window": {"window": (9, 3)},
    "dropout": {"dropout_p": 0.3},
    "soft cap": {"softcap": 0.7},
    "scale of zero": {"scale": 0.0},
    "documents": {"query_documents": DOCUMENTS[:, 5:38], "key_documents": DOCUMENTS},
    "strides": {"query_positions": Positions(-3, 2, 33), "key_positions": Positions(5, 2, 40)},
    "everything": {**EVERYTHING, "key_mask": KEY_MASK.roll(1, 0)},
    "shared keys": {"key_heads": 1, "causal": True},
    **{f"{dtype}": {"dtype": dtype, "causal": True} for dtype in (torch.bfloat16, torch.float16)},
}
TABLES = {
    "no table": [],
    "T5": ["bias"],
    "one number": ["bias_of_one_number"],
    "every offset": ["bias_for_all_offsets"],
    "left of all": ["bias_left_of_all_offsets"],
    "right of all": ["bias_right_of_all_offsets"],
    "a tail on the left": ["bias_with_a_tail_on_the_left_alone"],
}
LENGTHS = [(1, 1), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 35), (33, 5), (20, 67)])]
QUICK = [("every offset", "padding")]
QUICK += [("T5", name) for name in ("everything", "documents", "shared keys", "torch.bfloat16")]


def cases():
    for table in TABLES:
        for options in OPTIONS:
            marks = () if (table, options) in QUICK else pytest.mark.slow
            yield pytest.param(table, options, marks=marks)


@pytest.mark.parametrize(("table", "options"), list(cases()))
def test_every_gradient(table, options, launched):
    options = dict(OPTIONS[options])
    inputs = content(33, 40, key_heads=options.pop("key_heads", HEADS))
    check_one_pass(launched, inputs, terms_of(TABLES[table], 33, 40), **options)


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
@pytest.mark.parametrize("table", ["T5", pytest.param("every offset", marks=pytest.mark.slow)])
def test_lengths(table, n_q, n_k, launched):
    check_one_pass(launched, content(n_q, n_k), terms_of(TABLES[table], n_q, n_k), causal=n_q == n_k)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (80, 16), (16, 128)])
def test_widths(head_dim, value_dim, launched):
    check_one_pass(launched, content(20, 40, head_dim, value_dim), terms_of(["bias"], 20, 40))


def test_sinks_and_logs_of_sums(launched):
    inputs, terms, sinks = content(20, 33), terms_of(["bias"], 20, 33), random(HEADS)
    options = {"window": (7, 0), "deterministic": False}
    expected = with_log_sums("reference", torch.float64, inputs, terms, sinks, **options)
    found = with_log_sums("triton", torch.float32, inputs, terms, sinks, **options)
    assert all(error(ours, theirs) < 1e-6 for ours, theirs in zip(found, expected, strict=True))
    assert launched == ["all_gradients"]


def test_keys_beyond_the_last_add_nothing(launched):
    """They are in the last block of keys, at offsets for which the table has numbers that overflow there."""
    table = torch.zeros(HEADS, 64, dtype=torch.float64, device=DEVICE)
    table[:, 20:] = 1e4
    terms = [(OffsetBias, [table], 0)]
    check_one_pass(launched, content(20, 20), terms, query_positions=Positions(0, 1, 20))


# --- which kernels run


def gradients_of(inputs, terms=(), needed=(0, 1, 2), **options):
    leaves = [tensor.float().requires_grad_(place in needed) for place, tensor in enumerate(inputs)]
    out = attention(*leaves, terms, backend="triton", **options)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(out, wanted, output_gradient(out).float())


@pytest.mark.parametrize("options", [{}, pytest.param({"deterministic": True}, marks=pytest.mark.slow)], ids=str)
def test_gradients_are_deterministic_by_default(options, launched):
    gradients_of(content(7, 9), **options)
    assert launched == ["query_gradients", "key_gradients"]


def test_the_switch_of_torch_wins(launched):
    inputs = content(7, 9)
    torch.use_deterministic_algorithms(True)
    gradients_of(inputs, deterministic=False)
    assert launched == ["query_gradients", "key_gradients"]
    torch.use_deterministic_algorithms(False)
    gradients_of(inputs, deterministic=False)
    assert launched[2:] == ["all_gradients"]


IDS = torch.arange(20, device=DEVICE)
OTHERS = {
    "a table of keys": (["keys"], {}),
    "a table of values": (["values"], {}),
    "factors": (["factors"], {}),
    "levels": (["decay"], {}),
    "dense scores": (["dense"], {}),
    "a bias over ids": (["bias"], {"query_positions": IDS, "key_positions": IDS}),
    "strides that differ": (["bias"], {"query_positions": Positions(0, 2, 20)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_keep_the_deterministic_kernels(case, launched):
    names, options = OTHERS[case]
    check("triton", content(20, 20), terms_of(names, 20, 20), deterministic=False, causal=True, **options)
    assert "all_gradients" not in launched


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "value_dim"), [(129, 16), (16, 129)])
def test_wide_heads_keep_the_deterministic_kernels(head_dim, value_dim, launched):
    gradients_of(content(7, 9, head_dim, value_dim), deterministic=False)
    assert launched == ["query_gradients", "key_gradients"]


def test_without_a_query(launched):
    check("triton", [None, None, content(20, 20)[2]], terms_of(["bias"], 20, 20), deterministic=False)
    assert launched == ["key_gradients"]


@pytest.mark.parametrize(("needed", "kernels"), [((0,), ["query_gradients"]), ((1, 2), ["key_gradients"])])
def test_fewer_gradients_take_fewer_products(needed, kernels, launched):
    gradients_of(content(7, 9), needed=needed, deterministic=False)
    assert launched == kernels


@pytest.mark.slow
def test_a_table_without_a_gradient(launched):
    inputs, terms = content(20, 33), [OffsetBias(random(HEADS, 9).float(), -4)]
    found, expected = (gradients_of(inputs, terms, deterministic=each) for each in (False, True))
    assert launched == ["all_gradients", "query_gradients", "key_gradients"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_options_reach_sequences_of_any_length(launched):
    leaves = [random(20, HEADS, DIM).float().requires_grad_() for _ in range(3)]
    lengths = torch.tensor([0, 7, 20], dtype=torch.int32, device=DEVICE)
    grads = []
    for name in ("triton", "reference"):
        out = attention_varlen(*leaves, cu_seqlens_q=lengths, deterministic=False, backend=name)
        grads.append(torch.autograd.grad(out, leaves, output_gradient(out).float()))
    assert launched == ["all_gradients"]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_other_backends_do_not_change(name):
    inputs, terms = content(20, 33), terms_of(EVERY_KIND, 20, 33)
    found, expected = (run(name, torch.float32, inputs, terms, {"deterministic": each}) for each in (False, True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert len(found) == 1 + len(inputs) + sum(len(tensors) for _, tensors, _ in terms)
