"""Sinks, which are added to the result of a call: only the reference computes with them.

A sink with logit s is one more key with value 0. With L the log of a row's sum of exponentials, the keys keep the share
``exp(L) / (exp(L) + exp(s)) = sigmoid(L - s)`` of the row's attention, and the new L is ``log(exp(L) + exp(s))``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import LogSums


def add_sinks(output: Tensor, lse: LogSums | None, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp of each row with sinks, (heads,) or (batch, heads, n_q), in the softmax."""
    if lse is None or sinks is None:
        return output, None if lse is None else lse.sum(0)
    largest, log_sums = lse.detach()[0], lse[1]
    empty = largest.isneginf()
    # The logit of the sink minus the row's largest score. In a row without keys, the sink takes the whole attention.
    sinks = sinks.unsqueeze(-1) if sinks.dim() == 1 else sinks
    relative = sinks.to(lse.dtype) - largest.masked_fill(empty, 0.0)
    share = (log_sums - relative).sigmoid().masked_fill(empty, 0.0)
    # The product is in the share's dtype. It saves no other large tensor for the backward than the backend does.
    output = (output * share.unsqueeze(-1)).to(output.dtype)
    totals = torch.where(empty, relative, torch.logaddexp(log_sums, relative))
    return output, largest.masked_fill(empty, 0.0) + totals
