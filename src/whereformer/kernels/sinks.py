"""Sinks, which are added to the result of a call: only the reference knows of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import LogSums


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
