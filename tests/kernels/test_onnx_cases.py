"""The ONNX specification's own cases of attention, from the onnx package: every backend computes what they expect."""

import importlib

import numpy as np
import pytest
import torch

from whereformer import DenseBias, attention

from .cases import need_native

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The cases' own numbers are computed in the inputs' dtype, and these are a few of its roundings."""


@pytest.fixture(scope="module")
def cases():
    """The cases by name: an operator's node, its inputs by name, and the output that is expected."""
    module = importlib.import_module("onnx.backend.test.case.node.attention")
    cases = {}

    def expect(node, inputs, outputs, name, **_):
        tensors = dict(zip((entry for entry in node.input if entry), map(tensor_of, inputs), strict=True))
        cases[name] = node, tensors, tensor_of(outputs[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "expect", expect)
        np.random.seed(0)
        for name in dir(module.Attention):
            if name.startswith("export_"):
                getattr(module.Attention, name)()
    return cases


def tensor_of(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(array))


def by_head(tensor, heads):
    """Return (batch, heads, length, width), of that or of (batch, length, heads * width)."""
    return tensor if tensor.dim() == 4 else tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def computed(node, inputs, backend):
    """Compute an ONNX attention node with this library."""
    options = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    query = by_head(inputs["Q"], options.get("q_num_heads"))
    key, value = (by_head(inputs[name], options.get("kv_num_heads")) for name in "KV")
    n_q, before = query.shape[2], torch.tensor([0])
    if "past_key" in inputs:
        before = torch.tensor([inputs["past_key"].shape[2]])
        key, value = torch.cat([inputs["past_key"], key], 2), torch.cat([inputs["past_value"], value], 2)
    n_k, filled = key.shape[2], inputs.get("nonpad_kv_seqlen")
    if filled is not None:
        before = filled - n_q
    terms = []
    if (mask := inputs.get("attn_mask")) is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        mask = torch.nn.functional.pad(mask.to(query.dtype), (0, n_k - mask.shape[-1]), value=-torch.inf)
        mask = mask.expand(torch.broadcast_shapes(mask.shape, (1, 1, n_q, n_k)))
        terms.append(DenseBias(mask))
    left, right = (options.get(f"{side}_window_size", -1) for side in ("left", "right"))
    out = attention(
        query,
        key,
        value,
        terms,
        key_mask=None if filled is None else torch.arange(n_k) < filled[:, None],
        causal=bool(options.get("is_causal")),
        window=(left if left >= 0 else None, right if right >= 0 else None),
        scale=options.get("scale"),
        softcap=options.get("softcap") or None,
        query_positions=before[:, None] + torch.arange(n_q),
        backend=backend,
    )
    return out if inputs["Q"].dim() == 4 else out.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "native"])
def test_every_case_of_the_onnx_specification(cases, backend):
    if backend == "native":
        need_native()
    assert len(cases) > 50
    wrong = {}
    for name, (node, inputs, expected) in cases.items():
        if backend == "native" and expected.dtype == torch.float16:
            continue  # which it leaves to "blockwise"
        actual = computed(node, inputs, backend)
        error = (actual.double() - expected.double()).abs().max().item()
        if actual.shape != expected.shape or not error <= ERRORS[expected.dtype]:
            wrong[name] = error
    assert not wrong
