"""The fields of a call: every call has the shapes and dtypes that they declare, and the compiled kernel their order."""

import re
from pathlib import Path

import pytest
import torch

import whereformer.kernels
from tests.kernels.cases import BATCH, HEADS, TERMS, content, need_native, random, terms_of
from whereformer import OffsetBias, Positions
from whereformer.kernels import native
from whereformer.kernels.call import make_call
from whereformer.kernels.choose import choose
from whereformer.kernels.fields import AXES, GRADIENTS, TENSORS
from whereformer.kernels.native.arguments import INPUTS

IDS = {
    "query_positions": torch.arange(7),
    "key_positions": torch.arange(18).view(2, 9),
    "query_documents": torch.zeros(BATCH, 7, dtype=torch.uint16),
    "key_documents": torch.zeros(BATCH, 9, dtype=torch.int32),
    "key_mask": torch.ones(BATCH, 9, dtype=torch.bool),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, IDS], ids=["plain", "ids"])
@pytest.mark.parametrize("twice", [False, True])
def test_calls_have_the_shapes_and_dtypes_that_their_fields_declare(twice, options, dtype):
    for name in TERMS:
        inputs = [tensor.to(dtype) for tensor in content(7, 9, key_heads=1)]
        terms = [
            kind(*(tensor.to(dtype) for tensor in tensors), *(() if first is None else (first,)))
            for kind, tensors, first in terms_of([name] * (1 + twice), 7, 9)
        ]
        call = make_call(*inputs, terms, **options)
        sizes = {"batch": BATCH, "heads": HEADS, "key_heads": 1, "n_q": 7, "n_k": 9}
        for field in (each for each in AXES if getattr(call, each) is not None):
            tensor = getattr(call, field)
            axes = AXES[field][-tensor.dim() if field.endswith("positions") else 0 :]
            for axis, size in zip(axes, tensor.shape, strict=True):
                some = {"items": (1, BATCH), "table_heads": (1, HEADS)}.get(axis)
                assert size in (some or (sizes.setdefault(axis, size),)), (name, field, axis)
            assert fits(tensor.dtype, TENSORS[field].dtype, call), (name, field)


def fits(dtype, declared, call):
    exact = {"value": call.value.dtype, "wide": call.wide, "bool": torch.bool}
    if declared in exact:
        return dtype == exact[declared]
    return declared == "number" or dtype.is_floating_point == (declared == "float")


def test_the_compiled_kernel_has_the_inputs_and_gradients_in_their_order():
    header = Path(whereformer.kernels.__file__).parent / "native" / "call.h"
    struct = header.read_text(encoding="utf-8").partition("struct Call {")[2].partition("};")[0]
    code = re.sub(r"//.*", "", struct)
    names = re.findall(r"\*?(\w+)(?:\[\d\])?\s*[,;]", code)
    for prefix in ("", "d_"):
        wanted = [prefix + name for name in INPUTS]
        assert [name for name in names if name in wanted] == wanted
    assert set(INPUTS) <= set(GRADIENTS)


def test_a_backend_refuses_inputs_that_it_does_not_know(monkeypatch):
    """As a new term's are at first, which the reference and blockwise take."""
    need_native()
    monkeypatch.setattr(native.backend, "inputs", ("query", "key", "value"))
    call = make_call(*content(7, 9), [OffsetBias(random(HEADS, 9), -4)])
    assert native.backend.why_not(call, call.value.device) == "knows no bias"
    assert choose(call, "auto") == "blockwise"


def test_a_part_of_a_call_is_the_call_of_some_rows():
    query, key, value = content(7, 9)
    part = make_call(query, key, value, query_positions=Positions(3, 2, 7)).part(range(2, 5), range(1, 8))
    rows = query[:, :, 2:5], key[:, :, 1:8], value[:, :, 1:8]
    wanted = make_call(*rows, query_positions=Positions(7, 2, 3), key_positions=Positions(1, 1, 7))
    for ours, theirs in zip(part.arguments(), wanted.arguments(), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
