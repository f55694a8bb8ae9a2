"""How attention computes a call in training, and how many bytes it keeps for the backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import DistanceDecay, OffsetKeys, OffsetQueries, OffsetValues
from ...kernels.call import Call
from ...kernels.choose import choose
from ...kernels.problem import GRADIENTS, Problem
from ...kernels.terms import TABLES


class Training(NamedTuple):
    """A call in training: what computes it, and what is kept of its terms for the backward.

    Args:
        backend: the backend that computes the call.
        read: the tensors of the terms that the backward reads.
        bytes: further memory, outside the tensors of the terms.
    """

    backend: str
    read: list[Tensor]
    bytes: int


def training(call: Call, backend: str, device: torch.device) -> Training:
    """Return how attention would train a call on ``device``; the call's tensors may be on the meta device."""
    chosen = choose(call, backend, device)
    if chosen == "reference":
        read = [value for term in call.terms for value in vars(term).values() if isinstance(value, Tensor)]
        return Training(chosen, read, _written_out(call))
    # The other backends merge terms and read the merged ones.
    problem = Problem.of(call)
    found = (getattr(problem, name) for name in GRADIENTS if name not in ("query", "key", "value"))
    return Training(chosen, [tensor for tensor in found if tensor is not None], 0)


def _written_out(call: Call) -> int:
    """Return the bytes that the reference keeps for tables over offsets, besides the tables."""
    batch, heads = call.value.shape[:2]
    size = max(4, call.value.element_size())
    kept = 0
    for term in call.terms:
        if isinstance(term, TABLES):
            # The column that each pair reads
            kept += call.n_q * call.n_k * torch.int64.itemsize
        elif isinstance(term, DistanceDecay):
            # The difference of every pair
            kept += max(len(term.query_levels), len(term.key_levels)) * heads * call.n_q * call.n_k * size
        if isinstance(term, OffsetKeys | OffsetQueries | OffsetValues):
            # A number per row and offset, and a second copy of the rows besides that for content
            width = term.table.shape[1] if isinstance(term, OffsetValues) else sum(term.table.shape[1:])
            rows = call.n_k if isinstance(term, OffsetQueries) else call.n_q
            kept += batch * heads * rows * width * size
            if len(term.table) > 1:
                # To multiply it in batches, torch copies each head's vectors for every item.
                kept += batch * term.table.numel() * size
    return kept


class Keeps(NamedTuple):
    """What a backend keeps for the backward, besides the terms, query, key, value and output.

    Args:
        score_bytes: bytes per head, query and key.
        row_numbers: numbers per head and query.
        widens: whether it computes in float32 or wider, and keeps query, key and value so.
    """

    score_bytes: int = 0
    row_numbers: int = 0
    widens: bool = False


def kept_by(backend: str, drops: bool, windowed: bool, dtype: torch.dtype, device: torch.device) -> Keeps:
    """Return what attention by this backend keeps in training.

    ``drops`` says whether it drops weights, and ``windowed`` whether it has a window.
    """
    wide = max(4, dtype.itemsize)
    match backend:
        case "reference":
            # The weights; with dropout also a mask, and the weights that are left. With a window, which may leave rows
            # empty, the weights before and after these are zeroed.
            return Keeps(score_bytes=wide + (wide + 1 if drops else wide if windowed else 0), widens=True)
        case "fused" if drops and device.type == "cpu":
            # Torch keeps the same, but its mask consists of numbers.
            return Keeps(score_bytes=3 * wide)
        case "blockwise":
            return Keeps()
        case "native":
            # The log of a row's sum of exponentials, in two numbers
            return Keeps(row_numbers=2)
        case _:
            return Keeps(row_numbers=1)
