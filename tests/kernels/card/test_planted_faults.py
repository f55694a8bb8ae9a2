"""Faults that are planted in the package: other tests on the card have to see every one of them."""

import inspect
import textwrap

import pytest
import torch

from tests.kernels.card import card, test_cases, test_replays
from whereformer.kernels.backend import Plan
from whereformer.kernels.tracing import tensor_layouts
from whereformer.kernels.triton import launch, plan

write, share, add = plan._Recorder.build_function, plan._Recorder._share_memory, plan._Recorder.add_launch
finish = plan._Recorder._compile


def case(name):
    return lambda records, patch: test_cases.test_plans_compute_what_was_recorded(name, records)


def replay(test, *arguments):
    return lambda records, patch: test(*arguments)


bias, vectors, none = case("bias"), case("vectors"), case("none")
gradients, strides = test_replays.test_strides_of_the_outputs_gradient, test_replays.test_strides
streams, hooks = test_replays.test_streams_and_devices, test_replays.test_launch_hooks

# The function, a part of its source, the code that takes its place, and a test that has to fail then.
FAULTS = {
    "scratch memory is freed before it is used": (
        write,
        'body.append("".join(',
        'body += [f"{name} = None" for name in pointers if name[0] == "s"]; body.append("".join(',
        bias,
    ),
    "scratch memory is freed before its last use": (share, "max([last[name] for", "min([last[name] for", vectors),
    "parts of scratch memory overlap": (share, "zip(parts, starts,", "zip(parts, [0] * len(parts),", vectors),
    "parts of scratch memory begin anywhere": (share, "num_bytes // 512) * 512", "num_bytes // 4) * 4 + 4", vectors),
    "scratch memory is too small": (launch._prepare_terms, "n, length, dtype", "n, length - 1, dtype", vectors),
    "views begin where their base does": (plan._Address.render, "start += self.start", "pass", bias),
    "addresses are those of the first call": (add, "self._address(value) if", "str(value.data_ptr()) if", bias),
    "numbers of 64 bits have 32": (
        add,
        "append(type_name)",
        'append(type_name.replace("i64", "i32"))',
        case("none, of everything"),
    ),
    "a number is another": (add, "repr(value)", "repr(value + 1 if type_name == 'i32' else value)", none),
    "a program is missing": (plan.launch, "compiled, programs,", "compiled, programs - 1,", none),
    "products and sums are not fused": (plan.launch, "fusion=True", "fusion=False", none),
    "the stream is that of the first call": (finish, "= get_stream({index})", "= 7", streams),
    "the device is the current one": (finish, 'f"if get_device() != {index}:"', '"if False:"', streams),
    "launch hooks see nothing": (finish, "if is_profiled(): return None", "pass", hooks),
    "autocast casts in a replay": (
        finish,
        "self.has_operations",
        "False",
        lambda records, patch: test_replays.test_autocast_around_the_backward_alone(records),
    ),
    "alignment is forgotten": (
        tensor_layouts,
        "address & 15",
        "0",
        replay(test_replays.test_alignment, 0, torch.float32),
    ),
    "strides are forgotten": (tensor_layouts, "tensor.stride(), ", "", replay(strides)),
    "the layout of the output's gradient is forgotten": (
        Plan.backward,
        "tensor_layouts(all_tensors)",
        "tensor_layouts([*tensors, inputs.output, inputs.buffer])",
        replay(gradients),
    ),
    "the layouts of saved tensors are forgotten": (
        Plan.backward,
        "tensor_layouts(all_tensors)",
        "tensor_layouts(all_tensors[len(tensors) :])",
        replay(test_replays.test_saved_tensors_come_back_elsewhere, "parts of a projection"),
    ),
    "needs are forgotten": (Plan.backward, "(*needs, ", "(sum(needs), ", replay(test_replays.test_needs_that_differ)),
}


def plant(monkeypatch, function, part, replacement):
    """Give a function the code of a source in which a part is another."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(part) == 1
    namespace = dict(function.__globals__)
    exec("from __future__ import annotations\n" + source.replace(part, replacement), namespace)
    monkeypatch.setattr(function, "__code__", namespace[function.__name__].__code__)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault, records, monkeypatch):
    from triton.runtime.errors import InterpreterError  # such as an overflow where numbers are wrong

    *where, test = FAULTS[fault]
    plant(monkeypatch, *where)
    with pytest.raises((AssertionError, card.GpuError, InterpreterError)):
        test(records, monkeypatch)
