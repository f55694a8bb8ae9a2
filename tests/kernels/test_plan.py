"""Plans: functions that do what was recorded, with other tensors. Kernels and the GPU's driver are made up here."""

import contextlib
import ctypes
import importlib
from types import SimpleNamespace

import pytest
import torch

from whereformer.kernels.call import make_call
from whereformer.kernels.operators import Backend, Given, Plan, _apart

pytest.importorskip("triton")
plan = importlib.import_module("whereformer.kernels.triton.plan")


def double(given, out, number):
    """What the kernel does, with addresses of float32."""
    given, out = ((ctypes.c_float * number).from_address(address) for address in (given, out))
    for index in range(number):
        out[index] = 2 * given[index]


class Kernel:
    arg_names = ("given", "out", "number")

    def __getitem__(self, grid):
        def run(given, out, number, **options):
            double(given[0].data_ptr(), out.data_ptr(), number)
            source = SimpleNamespace(signature={"given": ("*fp32", "constexpr"), "out": "*fp32", "number": "i32"}, fn=0)
            return Compiled(source)

        return run


class Compiled(SimpleNamespace):
    function, packed_metadata, metadata = 1, 2, 3

    def __init__(self, source):
        super().__init__(src=source)

    __hash__ = object.__hash__


@pytest.fixture
def launches(monkeypatch):
    """The streams and programs of launches by plans."""
    from triton.runtime import driver

    found = []

    def launcher_cls(source, metadata):
        assert list(source.signature.values()) == ["*fp32", "*fp32", "i32"]

        def run(x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
            found.append((x, stream))
            double(*arguments)

        return run

    active = SimpleNamespace(
        launcher_cls=launcher_cls, get_current_device=lambda: 0, get_current_stream=lambda device: 7
    )
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    return found


def compute(x, y):
    """Memory, views, operations and launches, of which one is for nothing, and a question about dtypes."""
    unused = torch.empty(5)
    unused[1:].zero_()
    out, third = x.new_empty(2, 6), torch.zeros(3, 5)
    first, second = out.unbind()
    plan.launch(Kernel(), 3, (x[2:], 16), first, 4)
    plan.launch(Kernel(), 1, (y, 16), second[1:], 5)
    first[4:].copy_(torch.stack([x.sum(), y.amax()]).to(torch.promote_types(x.dtype, y.dtype)))
    second[:1].fill_(1.5)
    # Memory that launches alone use, freed together: it lies in one piece, and each part has its own.
    small, middle, large = torch.empty(3), torch.empty(2, 2), torch.empty(200)
    for made, part in ((small, 3), (middle.view(4), 4), (large[100:], 5)):
        plan.launch(Kernel(), 1, (y, 16), made, part)
    for made, part in ((small, 3), (middle, 4), (large[100:], 5)):
        plan.launch(Kernel(), 1, (made, 16), third[part - 3], part)
    return [out, None, x.view(2, 4) @ y[:4], third]


def test_a_plan_does_what_was_recorded_with_other_tensors(launches):
    tensors = torch.randn(8), torch.randn(5)
    found, again = plan.record(lambda: compute(*tensors), tensors)
    for _ in range(2):
        others = torch.randn(8), torch.randn(5)
        wanted, launches[:] = compute(*others), []
        with torch.autocast("cpu", torch.bfloat16):
            got = again(*others)
        assert launches == [(3, 7), *[(1, 7)] * 7]
        for ours, theirs in zip(got, wanted, strict=True):
            assert (ours is None) if theirs is None else torch.equal(ours, theirs)
    assert not torch.equal(found[0], got[0])


def test_plans_keep_no_tensors(launches):
    tensors = torch.randn(8), torch.randn(5)
    _, again = plan.record(lambda: compute(*tensors), tensors)
    held = [cell.cell_contents for cell in again.__closure__ or ()]
    values = [value for each in held if hasattr(each, "__globals__") for value in each.__globals__.values()]
    assert not any(isinstance(value, torch.Tensor) for value in [*held, *values])


def test_a_profiler_that_watches_launches_sees_them(launches, monkeypatch):
    from triton import knobs

    tensors = torch.randn(8), torch.randn(5)
    for first in (None, knobs.HookChain()):
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", first)
        _, again = plan.record(lambda: compute(*tensors), tensors)
        chain = knobs.HookChain()
        chain.add(lambda metadata: None)
        for hook, watches in ((None, False), (knobs.HookChain(), False), (chain, True), (lambda metadata: None, True)):
            monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
            assert (again(*tensors) is None) == watches


def test_a_plan_may_have_no_results(launches):
    tensors = torch.randn(8), torch.randn(5)
    _, again = plan.record(lambda: compute(*tensors)[:0], tensors)
    assert again(*tensors) == []


def test_launches_go_to_the_tensors_device(launches, monkeypatch):
    from triton.runtime import driver

    tensors, current = (torch.randn(8), torch.randn(5)), [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(driver.active, "get_current_device", lambda: current[-1])
    monkeypatch.setattr(driver.active, "get_current_stream", lambda index: (index, current[-1]))
    _, again = plan.record(lambda: compute(*tensors), tensors)
    current[:], launches[:] = [1], []
    again(*tensors)
    assert launches == [(3, (0, 0)), *[(1, (0, 0))] * 7]
    assert current == [1]


def test_a_call_of_one_tensor_is_a_pattern_for_those_of_several(launches):
    first, second = _apart([torch.randn(8)] * 2)
    results, again = plan.record(lambda: [first * 2 + second], [first, second])
    assert torch.equal(results[0], first * 3)
    others = torch.randn(8), torch.randn(8)
    assert torch.equal(again(*others)[0], others[0] * 2 + others[1])


class Counting(Backend):
    """Its results are those of no attention; ``usable`` says whether what it recorded may be used."""

    name, usable, computed = "counting", True, 0

    def again(self, *tensors):
        return tensors if self.usable else None

    def forward(self, call, tensors):
        self.computed += 1
        return tensors, self.again

    def backward(self, call, given, needed, tensors):
        self.computed += 1
        return tensors, self.again


def test_what_must_not_be_used_is_computed_anew_and_few_plans_are_kept():
    rows, backend = torch.randn(3, 1, 2, 4, 16).unbind(), Counting()
    kind = Plan(make_call(*rows), backend)
    given = Given(rows[0], None, rows[1], rows[2])
    for usable, computed in ((True, 2), (True, 2), (False, 4), (False, 6), (True, 6)):
        backend.usable = usable
        assert all(map(torch.equal, kind.forward(rows), rows))
        assert all(map(torch.equal, kind.backward(rows, [True] * 3, given), [*rows, *given[:1], *given[2:]]))
        assert backend.computed == computed
    for stride in range(16, 40):
        d_output = torch.empty(8 * stride).as_strided((1, 2, 4, 16), (8 * stride, 4 * stride, stride, 1))
        kind.backward(rows, [True] * 3, given._replace(d_output=d_output))
    assert len(kind._backwards.values) == 8


@pytest.mark.parametrize("reads", ["a number", "a tensor from elsewhere"])
def test_what_depends_on_more_than_the_inputs_is_not_recorded(launches, reads):
    elsewhere = torch.ones(5)

    def compute(x):
        return [x * x.sum().item() if reads == "a number" else x + elsewhere]

    x = torch.randn(5)
    found, again = plan.record(lambda: compute(x), [x])
    assert torch.equal(found[0], compute(x)[0])
    assert again is None
