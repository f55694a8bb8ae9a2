"""What may differ between a call that was recorded and later calls of its kind, on the card."""

import contextlib
import re
import threading
from pathlib import Path

import pytest
import torch

from tests.kernels import test_backends
from tests.kernels.card import card
from whereformer import OffsetBias, OffsetKeys, OffsetValues, attention
from whereformer.kernels import remember
from whereformer.kernels.call import GRADIENTS
from whereformer.kernels.make_call import make_call
from whereformer.kernels.triton import launch, plan

BATCH, HEADS, N, DIM = 2, 2, 20, 16


def random(*size, dtype=torch.float32):
    return torch.randn(size).to(dtype)


def rows(n_q=N, n_k=N, batch=BATCH, dtype=torch.float32):
    return [random(batch, HEADS, n, DIM, dtype=dtype) for n in (n_q, n_k, n_k)]


def bias():
    return [OffsetBias(random(HEADS, 9), -4)]


def vectors():
    return [OffsetKeys(random(1, 9, DIM), -4), OffsetValues(random(1, 9, DIM), -4)]


def differentiate(backend, leaves, terms, d_out=None, **options):
    """Return the output and its gradients by the ``leaves``: query, key, value, and the tables of the ``terms``."""
    built = [type(term)(table, term.first) for term, table in zip(terms, leaves[3:], strict=True)]
    out = attention(*leaves[:3], built, backend=backend, **options)
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    if not (needed and torch.is_grad_enabled()):
        return [out]
    return [out.detach(), *torch.autograd.grad(out, needed, d_out.to(out.dtype))]


def check(inputs, terms, d_out=None, needs=None, **options):
    """Compare a call and its gradients with float64. The layouts of what it gets are those of the arguments."""
    tensors = [*inputs, *(term.table for term in terms)]
    needs = [True] * len(tensors) if needs is None else needs
    d_out = random(*inputs[0].shape) if d_out is None else d_out
    leaves = [tensor.detach().requires_grad_(bool(need)) for tensor, need in zip(tensors, needs, strict=True)]
    results = differentiate("triton", leaves, terms, d_out, **options)
    with torch.autocast("cpu", enabled=False):
        leaves = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
        expected = differentiate("reference", leaves, terms, d_out, **options)
    close = 1e-4 if inputs[0].dtype == torch.float32 and not torch.is_autocast_enabled("cpu") else 5e-2
    for ours, theirs in zip(results, expected, strict=True):
        largest = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(ours.double(), theirs, rtol=close, atol=close * largest)


def compare(compute, *arguments):
    """Compare the tensors that a function returns for "triton" and for "reference"."""
    for ours, theirs in zip(compute("triton", *arguments), compute("reference", *arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# --- layouts


def shifted(tensor, numbers):
    """The same numbers at an address that is so many numbers behind a multiple of 512 bytes."""
    memory = torch.empty(tensor.numel() + numbers, dtype=tensor.dtype)[numbers:]
    return memory.view(tensor.shape).copy_(tensor)


LAYOUTS = {
    "heads inside": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda tensor: (
        torch.zeros(BATCH, N, 3, HEADS, DIM, dtype=tensor.dtype)[:, :, 1].transpose(1, 2).copy_(tensor)
    ),
    "one head for all": lambda tensor: tensor[:, :1].contiguous().expand(tensor.shape),
    "one item for all": lambda tensor: tensor[:1].contiguous().expand(tensor.shape),
    "columns": lambda tensor: tensor.mT.contiguous().mT,
    "in one piece": lambda tensor: tensor,
}


@pytest.mark.parametrize("shifted_input", [0, 2, 3, "d_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alignment(shifted_input, dtype):
    terms = bias if dtype == torch.float32 else vectors
    for numbers in (0, 1, 0, 4, 3):
        inputs, built, d_out = rows(dtype=dtype), terms(), random(BATCH, HEADS, N, DIM, dtype=dtype)
        if shifted_input == "d_out":
            d_out = shifted(d_out, numbers)
        elif shifted_input < 3:
            inputs[shifted_input] = shifted(inputs[shifted_input], numbers)
        else:
            built[0] = type(built[0])(shifted(built[0].table, numbers), -4)
        check(inputs, built, d_out)


def test_strides():
    for layout in ("in one piece", *LAYOUTS):
        check([LAYOUTS[layout](tensor) for tensor in rows()], bias())
        query, *key_value = rows()
        check([LAYOUTS[layout](query), *key_value], bias())


def test_strides_of_the_outputs_gradient():
    for layout in ("in one piece", *LAYOUTS):
        check(rows(), vectors(), LAYOUTS[layout](random(BATCH, HEADS, N, DIM)))
    check(rows(), vectors(), torch.ones(()).expand(BATCH, HEADS, N, DIM))


def test_inputs_share_memory(records):
    for _ in range(3):
        memory, table = random(1, HEADS, 60, DIM), random(HEADS, 300)
        check([memory[:, :, :20], memory[:, :, 10:30], memory[:, :, 20:40]], [OffsetBias(table[:, 7:200], -100)])
    assert records == [True, True]


@pytest.mark.parametrize("first", [(0, 0, 2), (0, 1, 2)])
def test_one_tensor_as_two(first):
    def compute(backend, inputs, d_out):
        return torch.autograd.grad(attention(*inputs, backend=backend), list(dict.fromkeys(inputs)), d_out)

    for order in (first, (0, 1, 2), (0, 1, 1), first):
        inputs = [tensor.requires_grad_() for tensor in rows(batch=1)]
        compare(compute, [inputs[index] for index in order], random(1, HEADS, N, DIM))


def test_the_outputs_gradient_is_an_input():
    for is_input in (False, True, False):
        inputs = rows(batch=1)
        check(inputs, bias(), inputs[2] if is_input else None)


# --- what is needed


def test_needs_that_differ():
    for needs in ((1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 0), (1, 1, 1, 1)):
        check(rows(batch=1), bias(), needs=needs)
    for needs in ((1, 1, 1, 1, 1), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1), (1, 0, 0, 1, 0), (1, 1, 1, 1, 1)):
        check(rows(batch=1), vectors(), needs=needs)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_share_a_plan_with_others(without, records):
    for gradients in (False, True, False, True):
        with contextlib.nullcontext() if gradients else without():
            check(rows(), vectors(), needs=[gradients] * 5)
    assert records == [True, True]


def test_nothing_is_needed():
    """As the dispatcher may ask."""
    call = make_call(*rows(), bias())
    leaf = call.query.clone().requires_grad_()
    out = attention(leaf, call.key, call.value, [OffsetBias(call.bias, -4)], backend="reference")
    (expected,) = torch.autograd.grad(out.sum(), leaf)
    for names in (("query",), (), ("query",), ()):
        output, state, _ = launch.operators.forward(*call.arguments())
        needed = [name in names for name in GRADIENTS]
        gradients = launch.operators.backward(torch.ones_like(output), None, output, state, needed, *call.arguments())
        torch.testing.assert_close(gradients, [expected] if names else [], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n_q", "n_k", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
def test_nothing_to_compute(n_q, n_k, batch):
    for _ in range(3):
        check(rows(n_q, n_k, batch), bias())


# --- what is around the call


def test_autocast():
    for on in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            check(rows(dtype=torch.bfloat16), vectors())
            check(rows(), bias())


def test_autocast_around_the_backward_alone(records):
    """Its function has operations of torch, such as products, that autocast would cast."""

    def compute(backend, leaves, d_out, on):
        query, key, value, table, factors = parts = [leaf.clone().requires_grad_() for leaf in leaves]
        out = attention(query, key, value, [OffsetKeys(table, -4, 1, factors)], backend=backend)
        with torch.autocast("cpu", torch.bfloat16, enabled=on and backend == "triton"):
            return torch.autograd.grad(out, parts, d_out)

    for on in (False, True, False, True):
        leaves = [*rows(), random(1, 9, DIM), random(1, HEADS, N, DIM)]
        compare(compute, leaves, random(BATCH, HEADS, N, DIM), on)
    assert records == [True, True]


def test_threads():
    errors = []

    def work(terms):
        try:
            for _ in range(3):
                check(rows(batch=1), terms())
        except BaseException as error:  # otherwise it would end with the thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(terms,)) for terms in (bias, vectors, bias, vectors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_streams_and_devices(records, monkeypatch):
    @contextlib.contextmanager
    def device(index):
        before, card.Card.device = card.Card.device, index
        try:
            yield
        finally:
            card.Card.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    check(rows(), bias())
    for stream in (7, 8, 9):
        for current in (0, 1):
            monkeypatch.setattr(card.Card, "stream", stream)
            monkeypatch.setattr(card.Card, "device", current)
            del card.launches[:]
            check(rows(), bias())
            assert {launch.stream for launch in card.launches} == {stream}
            assert card.Card.device == current
    assert records == [True, True]


def test_launch_hooks(records, monkeypatch):
    """None, a function, or a chain of functions. Those that watch launches see all of them, so no replay is used."""
    from triton import knobs

    watched = []

    def watch(metadata):
        watched.append(metadata.get())

    chain = knobs.HookChain()
    chain.add(watch)
    for first in (None, watch, knobs.HookChain()):
        remember(True)
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", first)
        check(rows(), bias())
        for hook, watches in ((knobs.HookChain(), False), (chain, True), (None, False), (watch, True)):
            monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
            del watched[:], records[:], card.launches[:]
            check(rows(), bias())
            assert (len(watched), len(card.launches), len(records)) == ((6, 6, 2) if watches else (0, 6, 0))


def test_deterministic_algorithms():
    for on in (False, True, False, True):
        torch.use_deterministic_algorithms(on)
        try:
            check(rows(), [*bias(), *vectors()])
        finally:
            torch.use_deterministic_algorithms(False)


@torch.no_grad()
def test_a_graph_of_launches():
    """As in a CUDA graph: the launches of a replay again, with the same addresses, after inputs have changed."""
    inputs, mask = rows(), torch.ones(BATCH, N, dtype=torch.bool)
    terms = [OffsetBias(random(HEADS, 79), -39)]
    for _ in range(2):
        attention(*inputs, terms, backend="triton", key_mask=mask)
    del card.launches[:]
    with card.keeping_memory():
        out = attention(*inputs, terms, backend="triton", key_mask=mask)
    launches = list(card.launches)
    for _ in range(2):
        for tensor in inputs:
            tensor.normal_()
        mask.bernoulli_(0.6)
        for captured in launches:
            captured.run()
        expected = attention(*inputs, terms, backend="reference", key_mask=mask)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


# --- what every backend is asked


@pytest.mark.parametrize("layout", ["parts of a projection", "one head for all"])
def test_saved_tensors_come_back_elsewhere(layout):
    test_backends.test_saved_tensors_may_come_back_elsewhere("triton", layout, torch.bfloat16)


def test_saved_tensors_come_back_as_others():
    test_backends.test_saved_tensors_that_come_back_as_others_are_refused("triton", torch.Tensor.bfloat16)


@pytest.mark.parametrize("first", [0, 1])
def test_positions_have_no_gradient(first, monkeypatch):
    test_backends.test_positions_have_no_gradient("triton", "triton", first, monkeypatch)


# --- what becomes a function


def test_replay_functions_keep_no_tensors():
    check(rows(), vectors())
    (kind,) = launch.operators.plans.values.values()
    replays = [kind._forward, *kind._backwards.values.values()]
    cells = [cell.cell_contents for replay in replays for cell in replay.__closure__ or ()]
    functions = [function for function in (*replays, *cells) if hasattr(function, "__globals__")]
    values = [*cells, *(value for function in functions for value in function.__globals__.values())]
    assert not any(isinstance(value, torch.Tensor) for value in values)


@pytest.mark.parametrize("reads", ["a number", "a tensor from elsewhere"])
def test_what_depends_on_more_than_the_inputs_is_not_recorded(reads):
    inputs, elsewhere = [random(5)], torch.ones(5)

    def compute():
        return [inputs[0] * inputs[0].sum().item() if reads == "a number" else inputs[0] + elsewhere]

    results, replay = plan.record(compute, inputs)
    assert torch.equal(results[0], compute()[0])
    assert replay is None


def test_the_page_shows_a_replay_function(caplog):
    page = Path(__file__).parents[3] / "docs" / "architecture" / "debugging.md"
    excerpt = re.search("```text\n(def replay.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    with caplog.at_level("DEBUG", plan.__name__):
        inputs = [random(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
        attention(*inputs, [OffsetBias(random(2, 511), -255)], backend="triton")
    assert re.search(re.escape(excerpt).replace(re.escape("..."), ".*"), caplog.text, re.DOTALL)
