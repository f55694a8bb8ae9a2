"""The "triton" backend: flash attention with all terms fused in, in O(n) memory, on NVIDIA GPUs.

This module launches the forward kernel; ``backward`` launches the gradient kernels. Torch computes what is cheap as
matrix products over whole rows. The kernels are in ``jit``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..fields import Call
from ..logsums import LogSums
from ..operators import Backend, Operators, Results
from ..precision import without_autocast
from ..terms import position_values
from . import available
from .arguments import (
    at_rows,
    dropout_seeds_of,
    inputs_of,
    new_norm,
    new_rows,
    norm_of,
    pairs_of,
    parts_of,
    row_matrix,
    terms_of,
)
from .backward import Backward
from .blocks import blocks_of, cdiv


class Triton(Backend):
    """What is kept is the kernels' ``Norm``, (1 or 2, batch, heads, n_q)."""

    name = "triton"

    def why_not(self, call: Call, device: torch.device) -> str | None:
        return available.why_not(call, device) or super().why_not(call, device)

    def adapted(self, call: Call) -> Call:
        changes: dict[str, Any] = {}
        if call.scale <= 0:
            # The kernels take the largest product of a row for that of its largest score.
            changes["scale"] = -call.scale or 1.0
            changes["query"] = None if call.query is None else call.query * (-1 if call.scale else 0)
        if call.query_positions is not None or call.key_positions is not None:
            # The kernels take both sequences' positions as affine, or both as tensors.
            matter = call.limits_offsets or any(table is not None for table in call.tables)
            for name, positions in zip(("query_positions", "key_positions"), call.positions(), strict=True):
                changes[name] = position_values(positions, call.value.device) if matter else None
        if call.shared > 1 and any(each is not None for each in (call.key_factors, call.key_levels, call.query_table)):
            # What else keys have differs from head to head.
            changes["value"] = call.value.repeat_interleave(call.shared, 1)
            changes["key"] = None if call.key is None else call.key.repeat_interleave(call.shared, 1)
        if call.query_table is not None and call.query_table_factors is None:
            # By the call's own scale, whatever its sign.
            key: Any = changes.get("key", call.key)
            changes["query_table_factors"] = key.float() * call.scale
        if call.query_factors is not None and call.query_factors.shape[3] == 0:
            changes["query_factors"] = changes["key_factors"] = None
        return replace(call, **changes) if changes else call

    def new_kept(self, call: Call) -> Tensor:
        may_be_large = any(each is not None for each in (call.bias, call.query_factors, call.query_levels, call.dense))
        return new_norm(call.value, 2 if may_be_large else 1, call.heads, call.n_q)

    def forward(self, call: Call) -> Results:
        out, norm = call.new_output(), self.new_kept(call)
        if out.numel() == 0 or call.n_k == 0:
            norm.fill_(math.inf)
            return out.zero_(), norm, _lse_of(norm) if call.wants_lse else None
        with torch.no_grad(), without_autocast(out.device), _on(out.device):
            dropout_seeds = dropout_seeds_of(call)
            for part, rows in parts_of(call):
                seeds_of_part = None if dropout_seeds is None else dropout_seeds[:, :, rows].contiguous()
                part_norm = norm if part is call else new_norm(out, len(norm), call.heads, part.n_q)
                _fill(part, seeds_of_part, at_rows(out, rows), part_norm)
                if part is not call:
                    norm[..., rows] = part_norm
        return out, norm, _lse_of(norm) if call.wants_lse else None

    def backward(
        self, call: Call, needed: Sequence[str], d_output: Tensor, d_lse: Tensor | None, output: Tensor, kept: Tensor
    ) -> list[Tensor]:
        gradients = {name: call.new_gradient(name) for name in needed}
        if output.numel() == 0 or call.n_k == 0:
            return [gradient.zero_() for gradient in gradients.values()]
        with torch.no_grad(), without_autocast(output.device), _on(output.device):
            Backward(call, d_output, d_lse, output, kept, gradients).run()
        return list(gradients.values())


def _lse_of(norm: Tensor) -> LogSums:
    """Return the logs of the rows' sums of exponentials, whose norm is in units of log2."""
    shift = norm[0] * math.log(2)
    empty = shift.isposinf()
    log_sum = norm[1] * math.log(2) if len(norm) > 1 else torch.zeros_like(shift)
    return torch.stack([shift.masked_fill(empty, -math.inf), log_sum.masked_fill(empty, 0.0)])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device, because Triton launches on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _fill(call: Call, dropout_seeds: Tensor | None, out: Tensor, norm: Tensor) -> None:
    """Fill ``out``, (batch, heads, n_q, value_dim) with any strides, and a norm of :func:`new_norm`."""
    # Imported here, because it imports Triton.
    from .jit.forward import forward

    batch, heads = call.value.shape[0], call.heads
    blocks = blocks_of("forward", call)
    at_offset = values = None
    if call.value_table is not None:
        at_offset = new_rows(out, heads, call.n_q, call.value_table.shape[1])
        # Weights are rounded to the values' dtype too, so that tensor cores multiply them.
        values = call.value_table.to(call.value.dtype).unsqueeze(0).expand(batch, heads, -1, -1)
    forward[(batch * heads * cdiv(call.n_q, blocks.rows),)](
        inputs_of(call),
        row_matrix(out),
        norm_of(norm),
        row_matrix(values),
        at_offset,
        terms_of(call),
        pairs_of(call, dropout_seeds),
        **blocks.launch,
    )


backend = Triton()
operators = Operators(backend)
