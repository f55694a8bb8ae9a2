"""Attention in parts: ``merge_attention``, and calls that are computed as several or finished afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .call import Call

Attend = Callable[[Call], tuple[Tensor, Tensor | None]]
"""Computes a call: its output, and the log of its rows' sums of exponentials where ``Call.return_lse`` asks for it."""


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries to different keys into that to all of them; differentiable.

    This is how attention is divided among devices (ring attention), between a shared prefix and the rest (cascades), or
    between chunks of a long prompt.

    Args:
        outputs: what :func:`whereformer.attention` returned for each part of the keys, (batch, heads, n_q, value_dim).
        lses: what it returned with ``return_lse=True`` beside them, (batch, heads, n_q).

    Returns:
        The output for all keys, in the dtype of the first, and its log of sums of exponentials.

    Raises:
        TypeError, ValueError: if the parts do not fit one another.
    """
    _check_parts(outputs, lses)
    logs = torch.stack(list(lses))
    # A row without keys in any part has no weights; its placeholder, and the gradient of that, is masked again.
    empty = logs.isneginf().all(0)
    logs = logs.masked_fill(empty, 0.0)
    weights = logs.softmax(0).unsqueeze(-1)
    merged = sum(
        (weight * output.to(weight.dtype) for weight, output in zip(weights[1:], outputs[1:], strict=True)),
        weights[0] * outputs[0].to(weights.dtype),
    )
    return (
        merged.masked_fill(empty.unsqueeze(-1), 0.0).to(outputs[0].dtype),
        logs.logsumexp(0).masked_fill(empty, -torch.inf),
    )


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, tensors in (("outputs", outputs), ("lses", lses)):
        if isinstance(tensors, Tensor) or not all(isinstance(each, Tensor) for each in tensors):
            raise TypeError(f"{name}: expected a sequence of tensors, got {type(tensors).__name__}")
    if len(outputs) == 0:
        raise ValueError("outputs: expected at least one part, got none")
    if len(lses) != len(outputs):
        raise ValueError(f"lses: expected one for each of {len(outputs)} outputs, got {len(lses)}")
    for output, lse in zip(outputs, lses, strict=True):
        if output.dim() != 4 or output.shape != outputs[0].shape:
            wanted = tuple(outputs[0].shape) if outputs[0].dim() == 4 else "(batch, heads, n_q, value_dim)"
            raise ValueError(f"outputs: expected shape {wanted} in every part, got {tuple(output.shape)}")
        if lse.shape != output.shape[:3]:
            raise ValueError(f"lses: expected shape {tuple(output.shape[:3])} as in outputs, got {tuple(lse.shape)}")


def attend_in_parts(call: Call, attend: Attend) -> tuple[Tensor, Tensor | None]:
    """Compute a call by an ``attend`` that knows neither ``Call.always_below`` nor ``Call.sinks``."""
    if call.sinks is not None:
        return _with_sinks(call, call.sinks, attend)
    if call.always_below is None:
        return attend(call)
    always = call.always()
    masks = (always, ~always) if call.key_mask is None else (call.key_mask & always, call.key_mask & ~always)
    common = replace(call, always_below=None, return_lse=True)
    parts = [
        attend(replace(common, key_mask=masks[0].expand(len(call.value), -1), window=(None, None))),
        attend(replace(common, key_mask=masks[1].expand(len(call.value), -1))),
    ]
    output, lse = merge_attention([output for output, _ in parts], [lse for _, lse in parts if lse is not None])
    return output, lse if call.return_lse else None


def _with_sinks(call: Call, sinks: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
    """Compute a call whose softmax has one more term per head, which takes a share of each row's attention."""
    output, lse = attend_in_parts(replace(call, sinks=None, return_lse=True), attend)
    assert lse is not None
    logits = sinks.to(lse.dtype).unsqueeze(-1)
    # A row that may not attend to anything leaves everything to its sink.
    empty = lse.isneginf()
    lse = lse.masked_fill(empty, 0.0)
    share = (lse - logits).sigmoid().masked_fill(empty, 0.0)
    output = (output.to(lse.dtype) * share.unsqueeze(-1)).to(output.dtype)
    return output, torch.where(empty, logits, torch.logaddexp(lse, logits)) if call.return_lse else None
