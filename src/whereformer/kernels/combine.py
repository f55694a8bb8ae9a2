"""Attention in parts: ``merge_attention``, and calls that are computed as several or finished afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .call import Call
from .logsums import LogSums

if TYPE_CHECKING:
    from jaxtyping import Float

Attend = Callable[[Call], tuple[Tensor, LogSums | None]]
"""Computes a call: its output, and ``LogSums`` where ``Call.return_lse`` asks for it."""


def merge_attention(
    outputs: Sequence[Float[Tensor, "batch heads n_q value_dim"]], lses: Sequence[Float[Tensor, "batch heads n_q"]]
) -> tuple[Float[Tensor, "batch heads n_q value_dim"], Float[Tensor, "batch heads n_q"]]:
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
    # The second number is 0, and has the gradient.
    rest = torch.where(logs.isneginf(), 0.0, logs - logs.detach())
    output, lse = _merge(outputs, torch.stack([logs.detach(), rest]))
    return output, lse.sum(0)


def _merge(outputs: Sequence[Tensor], lses: LogSums) -> tuple[Tensor, LogSums]:
    """Merge parts, given their ``LogSums`` (2, parts, batch, heads, n_q)."""
    largest = lses[0].detach().amax(0)
    # A row without keys in any part has no weights.
    empty = largest.isneginf()
    logs = (lses[0].detach() - largest.masked_fill(empty, 0.0)).masked_fill(empty, 0.0) + lses[1]
    wide = torch.promote_types(outputs[0].dtype, torch.float32)
    weights = logs.softmax(0).to(wide).unsqueeze(-1)
    merged = sum(
        (weight * output.to(wide) for weight, output in zip(weights[1:], outputs[1:], strict=True)),
        weights[0] * outputs[0].to(wide),
    )
    log_sums = logs.logsumexp(0).masked_fill(empty, 0.0)
    return merged.masked_fill(empty.unsqueeze(-1), 0.0).to(outputs[0].dtype), torch.stack([largest, log_sums])


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, tensors in (("outputs", outputs), ("lses", lses)):
        if not isinstance(tensors, Sequence):
            raise TypeError(f"{name}: expected a sequence of tensors, got {type(tensors).__name__}")
        for each in tensors:
            if not isinstance(each, Tensor) or not each.is_floating_point():
                got = each.dtype if isinstance(each, Tensor) else type(each).__name__
                raise TypeError(f"{name}: expected floating-point tensors, got {got}")
            if each.device != tensors[0].device:
                raise ValueError(f"{name}: expected tensors on one device, got {tensors[0].device} and {each.device}")
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


def attend_in_parts(call: Call, attend: Attend) -> tuple[Tensor, LogSums | None]:
    """Compute a call by an ``attend`` that knows neither ``Call.always_within`` nor ``Call.sinks``."""
    if call.sinks is None and call.always_within is None:
        return attend(call)
    parts = [attend(part) for part in _calls_of(call)]
    output, lse = parts[0]
    if len(parts) > 1:
        output, lse = _merge(
            [output for output, _ in parts], torch.stack([lse for _, lse in parts if lse is not None], dim=1)
        )
    if call.sinks is not None and lse is not None:
        output, lse = _with_sinks(output, lse, call.sinks)
    return output, lse if call.return_lse else None


def _calls_of(call: Call) -> list[Call]:
    """Return the calls that make up one: that without sinks; with sink tokens, that within the window and theirs.

    They have the same dropout seed and the same rows and columns, so they drop the weights that the one call drops.
    """
    common = replace(call, sinks=None, always_within=None, return_lse=True)
    if call.always_within is None:
        return [common]
    always = call.always()
    masks = (~always, always) if call.key_mask is None else (call.key_mask & ~always, call.key_mask & always)
    near, sink_tokens = (replace(common, key_mask=mask.expand(len(call.value), -1)) for mask in masks)
    # Only the limit before a query does not hold for sink tokens.
    return [near, replace(sink_tokens, window=(None, call.window[1]))]


def _with_sinks(output: Tensor, lse: LogSums, sinks: Tensor) -> tuple[Tensor, LogSums]:
    """Add to the softmax one more term per head, which takes a share of each row's attention."""
    largest, log_sums = lse.detach()[0], lse[1]
    empty = largest.isneginf()
    # The logit of the sink from which a row's largest score is subtracted; a row without keys leaves all to its sink.
    relative = sinks.to(lse.dtype).unsqueeze(-1) - largest.masked_fill(empty, 0.0)
    share = (log_sums - relative).sigmoid().masked_fill(empty, 0.0)
    wide = torch.promote_types(output.dtype, torch.float32)
    output = (output.to(wide) * share.unsqueeze(-1)).to(output.dtype)
    whole = torch.where(empty, relative, torch.logaddexp(log_sums, relative))
    return output, torch.stack([largest.masked_fill(empty, 0.0), whole])
