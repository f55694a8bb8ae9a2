"""The fields of a call: every call has the shapes and dtypes that they declare, and the compiled kernel their order."""

import re
from pathlib import Path

import pytest
import torch

import whereformer.kernels
from tests.kernels.cases import BATCH, HEADS, TERMS, content, terms_of
from whereformer.kernels.call import AXES, TENSOR_SPECS
from whereformer.kernels.make_call import make_call
from whereformer.kernels.native import Struct

IDS = {f"{side}_positions": torch.arange(n) for side, n in (("query", 7), ("key", 9))}
IDS |= {f"{side}_documents": torch.zeros(BATCH, n, dtype=torch.uint8) for side, n in (("query", 7), ("key", 9))}
IDS["key_mask"] = torch.ones(BATCH, 9, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, IDS], ids=["plain", "ids"])
@pytest.mark.parametrize("twice", [False, True])
def test_calls_have_the_shapes_and_dtypes_that_their_fields_declare(twice, options, dtype):
    for case in TERMS:
        inputs = [tensor.to(dtype) for tensor in content(7, 9, key_heads=1)]
        terms = [
            kind(*(tensor.to(dtype) for tensor in tensors), *(() if first is None else (first,)))
            for kind, tensors, first in terms_of([case] * (1 + twice), 7, 9)
        ]
        call = make_call(*inputs, terms, **options)
        sizes = {"batch": BATCH, "heads": HEADS, "key_heads": 1, "n_q": 7, "n_k": 9}
        for field in (name for name in AXES if getattr(call, name) is not None):
            tensor = getattr(call, field)
            axes = AXES[field][-tensor.dim() if field.endswith("positions") else 0 :]
            for axis, size in zip(axes, tensor.shape, strict=True):
                either = {"items": (1, BATCH), "table_heads": (1, HEADS)}.get(axis)
                assert size in (either or (sizes.setdefault(axis, size),)), (case, field, axis)
            declared = TENSOR_SPECS[field].dtype
            dtypes = {"value": dtype, "score": call.score_dtype, "bool": torch.bool}
            real = tensor.dtype.is_floating_point == (declared == "float") or declared == "number"
            assert tensor.dtype == dtypes[declared] if declared in dtypes else real, (case, field)


def test_the_compiled_kernel_has_the_same_fields_in_their_order():
    header = Path(whereformer.kernels.__file__).parent / "native" / "call.h"
    struct = header.read_text(encoding="utf-8").partition("struct Call {")[2].partition("};")[0]
    names = re.findall(r"\*?(\w+)(?:\[\d\])?\s*[,;]", re.sub(r"//.*", "", struct))
    assert names == [name for name, _ in Struct._fields_]
