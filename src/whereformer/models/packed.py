"""Rows of several texts without padding, as other programs describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from ..kernels.tracing import can_look
from ..kernels.varlen import check_seqlens
from ..positions import Position
from ..positions.counting import starts_of_runs

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""The arguments by which transformers' collators say where the texts of packed rows begin."""


def packed_texts(inputs: Mapping[str, Any], like: Tensor, n_q: int, n_k: int) -> Tensor | None:
    """Return the number of each token's text, (batch, n), by what collators say of packed rows; None without any.

    Args:
        inputs: may hold ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (texts + 1,) each, where the texts of one row begin
            and the last one ends, and ``seq_idx``, (batch, n), a number for each text.
        like: a tensor of the batch, (batch, ...), on its device.
        n_q, n_k: the number of queries and keys.

    Raises:
        InputError, TypeError, ValueError: unless they fit the tokens and one another, as far as looking is cheap.
    """
    ends, of_keys, texts = (inputs.get(name) for name in PACKED)
    for name, given in zip(PACKED, (ends, of_keys, texts), strict=True):
        if given is not None and not isinstance(given, Tensor):
            raise InputError(name, f"expected a tensor, got {shown(given)}")
    if texts is not None and (texts.is_floating_point() or texts.dtype is torch.bool):
        raise InputError("seq_idx", f"expected whole numbers, got {texts.dtype}")
    if ends is None and of_keys is not None:
        raise InputError("cu_seq_lens_k", "expected cu_seq_lens_q too, got None")
    if ends is not None:
        check_seqlens("cu_seq_lens_q", ends, "input_ids", n_k, like)
        if of_keys is not None and of_keys is not ends and can_look(ends) and not torch.equal(ends, of_keys):
            raise InputError("cu_seq_lens_k", f"expected those of the queries, got {shown(of_keys)}")
        told, texts = texts, torch.searchsorted(ends[1:], torch.arange(n_k, device=ends.device), right=True)[None]
        if told is not None and can_look(told) and not torch.equal(starts_of_runs(told), starts_of_runs(texts)):
            raise InputError("seq_idx", "expected the texts of cu_seq_lens_q, got others")
    if texts is not None and (n_q != n_k or texts.shape != (len(like), n_k)):
        name, expected = ("seq_idx", "(batch, n)") if ends is None else ("cu_seq_lens_q", "one row")
        got = f"{len(like)} rows, {n_q} queries and {n_k} keys"
        raise InputError(name, f"it needs {expected} and no cache, got {got}")
    return texts


def offsets_suffice(position: Position) -> bool:
    """Whether attention depends on offsets alone, so that packed texts may have their row's positions."""
    acting = [method for method in position.methods() if method.acts_in_attention()]
    return all(method.shift_invariant and not getattr(method, "reset_cls", False) for method in acting)
