"""``merge_attention``, and sinks, of which only the reference knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .fields import LogSums

if TYPE_CHECKING:
    from jaxtyping import Float


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
    largest = logs.detach().amax(0)
    # A row without keys in any part has no weights.
    empty = largest.isneginf()
    # Without the largest; a part without keys stays at -inf, but has no gradient.
    rest = torch.where(logs.isneginf(), 0.0, logs - logs.detach())
    logs = (logs.detach() - largest.masked_fill(empty, 0.0)).masked_fill(empty, 0.0) + rest
    wide = torch.promote_types(outputs[0].dtype, torch.float32)
    weights = logs.softmax(0).to(wide).unsqueeze(-1)
    merged = sum(
        (weight * output.to(wide) for weight, output in zip(weights[1:], outputs[1:], strict=True)),
        weights[0] * outputs[0].to(wide),
    )
    log_sums = logs.logsumexp(0).masked_fill(empty, 0.0)
    return merged.masked_fill(empty.unsqueeze(-1), 0.0).to(outputs[0].dtype), largest + log_sums


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


def add_sinks(output: Tensor, lse: LogSums, sinks: Tensor) -> tuple[Tensor, LogSums]:
    """Add to the softmax one more term per row, which takes a share of its attention."""
    largest, log_sums = lse.detach()[0], lse[1]
    empty = largest.isneginf()
    # The logit of the sink from which a row's largest score is subtracted; a row without keys leaves all to its sink.
    sinks = sinks.unsqueeze(-1) if sinks.dim() == 1 else sinks
    relative = sinks.to(lse.dtype) - largest.masked_fill(empty, 0.0)
    share = (log_sums - relative).sigmoid().masked_fill(empty, 0.0)
    # The product is in the share's dtype, and keeps no more for the backward than the backend keeps.
    output = (output * share.unsqueeze(-1)).to(output.dtype)
    whole = torch.where(empty, relative, torch.logaddexp(log_sums, relative))
    return output, torch.stack([largest.masked_fill(empty, 0.0), whole])
