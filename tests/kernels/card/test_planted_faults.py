"""Faults that are planted in the package: other tests on the card have to see every one of them."""

import inspect
import textwrap

import pytest
import torch

from tests.kernels.card import card, test_cases, test_replays
from whereformer.kernels.operators import Plan
from whereformer.kernels.tracing import layouts_of
from whereformer.kernels.triton import launch, plan

recorder = plan._Recorder


def case(name):
    return lambda records, monkeypatch: test_cases.test_plans_compute_what_was_recorded(name, records)


def replay(test, *arguments):
    return lambda records, monkeypatch: test(*arguments)


def replay_with_fixtures(test):
    return lambda records, monkeypatch: test(records, monkeypatch)


# The function, a part of its source, what stands in its place, and a test that has to fail then.
FAULTS = {
    "scratch memory is freed before it is used": (
        recorder.function,
        "body.append(text.format_map(texts))",
        'body += [f"{name} = None" for name in wholes if name[0] == "m"]; body.append(text.format_map(texts))',
        case("bias"),
    ),
    "scratch memory is freed before its last use": (
        recorder.function,
        "max([last[name] for name in small], default=0)",
        "min([last[name] for name in small], default=0)",
        case("vectors"),
    ),
    "parts of scratch memory overlap": (
        recorder.function,
        "zip(parts, starts,",
        "zip(parts, [0] * len(parts),",
        case("vectors"),
    ),
    "parts of scratch memory begin anywhere": (
        recorder.function,
        "-(-self.allocations[name][1] // 512) * 512",
        "self.allocations[name][1] // 4 * 4 + 4",
        case("vectors"),
    ),
    "scratch memory is too small": (
        launch._terms,
        "heads, n, length, dtype",
        "heads, n, length - 1, dtype",
        case("vectors"),
    ),
    "views begin where their base does": (recorder.add_launch, " + {start}", "", case("bias")),
    "addresses are those of the first call": (
        recorder.add_launch,
        'text = f"{{{root}}} + {start}" if start',
        'text = str(value.data_ptr()) if root in self.allocations else f"{{{root}}} + {start}" if start',
        case("bias"),
    ),
    "numbers of 64 bits have 32": (
        recorder.add_launch,
        "kinds.append(kind)",
        'kinds.append(kind.replace("i64", "i32"))',
        case("none, of everything"),
    ),
    "a number is another": (
        recorder.add_launch,
        "text = repr(value)",
        "text = repr(value + 1 if kind == 'i32' else value)",
        case("none"),
    ),
    "a program is missing": (plan.launch, "compiled, programs,", "compiled, max(programs - 1, 1),", case("none")),
    "products and sums are not fused": (plan.launch, "fusion=True", "fusion=False", case("none")),
    "the stream is that of the first call": (
        recorder._compiled,
        'f"stream = current_stream({index})"',
        'f"stream = {driver.active.get_current_stream(index)}"',
        replay_with_fixtures(test_replays.test_streams_and_devices),
    ),
    "the device is the current one": (
        recorder._compiled,
        'f"if current_device() != {index}:"',
        '"if False:"',
        replay_with_fixtures(test_replays.test_streams_and_devices),
    ),
    "launch hooks see nothing": (
        recorder._compiled,
        '"if watched(): return None",',
        "",
        replay_with_fixtures(test_replays.test_launch_hooks),
    ),
    "autocast casts in a plan": (
        recorder._compiled,
        "if not self.computes:",
        "if True:",
        lambda records, monkeypatch: test_replays.test_autocast_around_the_backward_alone(records),
    ),
    "alignment is forgotten": (layouts_of, "address & 15", "0", replay(test_replays.test_alignment, 0, torch.float32)),
    "strides are forgotten": (layouts_of, "tensor.stride(), ", "", replay(test_replays.test_strides)),
    "the layout of the output's gradient is forgotten": (
        Plan.backward,
        "layouts_of(whole)",
        "layouts_of([*tensors, given.output, given.kept])",
        replay(test_replays.test_strides_of_the_outputs_gradient),
    ),
    "the layouts of saved tensors are forgotten": (
        Plan.backward,
        "layouts_of(whole)",
        "layouts_of(whole[len(tensors) :])",
        replay(test_replays.test_saved_tensors_come_back_elsewhere, "parts of a projection"),
    ),
    "it is forgotten which gradients are needed": (
        Plan.backward,
        "(*needs, layouts,",
        "(sum(needs), layouts,",
        replay(test_replays.test_needs_that_differ),
    ),
}


def plant(monkeypatch, function, part, other):
    """Give a function the code of a source in which a part is another."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(part) == 1
    namespace = dict(function.__globals__)
    exec("from __future__ import annotations\n" + source.replace(part, other), namespace)
    monkeypatch.setattr(function, "__code__", namespace[function.__name__].__code__)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault, records, monkeypatch):
    from triton.runtime.errors import InterpreterError  # such as an overflow where numbers are wrong

    *where, test = FAULTS[fault]
    plant(monkeypatch, *where)
    with pytest.raises((AssertionError, card.GpuError, InterpreterError)):
        test(records, monkeypatch)
