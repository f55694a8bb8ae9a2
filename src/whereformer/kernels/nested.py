"""Torch's nested tensors with ``layout=torch.jagged`` as query, key and value of ``attention``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import can_share
from .tracing import can_look


class Jagged(NamedTuple):
    """Nested tensors as arguments of :func:`whereformer.attention_varlen`."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: tuple[Tensor, Tensor]
    """Where the queries' and the keys' sequences begin."""


def is_nested(*tensors: Any) -> bool:
    """Whether one of the arguments is a nested tensor."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


def unnest(query: Any, key: Any, value: Any) -> Jagged:
    """Take nested tensors, (batch, heads, ragged, head_dim), apart.

    Raises:
        TypeError, ValueError: if they are not all nested, are not jagged, or do not fit one another.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not is_nested(tensor):
            got = "a dense tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a nested tensor like the others, got {got}")
        if tensor.layout != torch.jagged:
            raise ValueError(f"{name}: expected a nested tensor with layout=torch.jagged, got {tensor.layout}")
        if tensor.dim() != 4 or isinstance(tensor.shape[1], torch.SymInt):
            shape = tuple(tensor.shape)
            raise ValueError(f"{name}: expected (batch, heads, ragged length, head_dim), got {shape}; transpose(1, 2)?")
        if tensor.lengths() is not None:
            raise ValueError(
                f"{name}: expected a nested tensor without gaps between sequences; call contiguous() before "
                "transpose(1, 2)"
            )
    for name in ("key", "value"):
        if len(tensors[name]) != len(query):
            raise ValueError(f"{name}: expected a batch of {len(query)} as in query, got {len(tensors[name])}")
    heads, head_dim = value.shape[1], query.shape[3]
    if not can_share(query.shape[1], heads):
        raise ValueError(f"query: expected {heads} heads or a multiple as in value, got {query.shape[1]}")
    if key.shape[1] != heads or key.shape[3] != head_dim:
        raise ValueError(
            f"key: expected {heads} heads of {head_dim} numbers as in value and query, got {key.shape[1]} of "
            f"{key.shape[3]}"
        )
    of_keys, of_values = key.offsets(), value.offsets()
    if key.shape[2] != value.shape[2] and not (can_look(of_keys) and torch.equal(of_keys, of_values)):
        raise ValueError("value: expected sequences as long as those of key, got other lengths")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return Jagged(query.values(), key.values(), value.values(), (query.offsets(), key.offsets()))


def nest(rows: Tensor, like: Jagged) -> Tensor:
    """Return rows (total, heads, ...) as a nested tensor, (batch, heads, ragged, ...), with the queries' lengths."""
    return torch.nested.nested_tensor_from_jagged(rows, like.cu_seqlens[0]).transpose(1, 2)
