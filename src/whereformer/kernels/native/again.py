"""Calls like one before: their arguments are the same but for the addresses of tensors.

Checking a call, merging its terms and choosing a backend takes several times as long as the attention of a few tokens.
All of it follows from the kinds and sizes of what is given, so it is done once for each. Calls without gradients
profit; those with gradients have to tell autograd about every tensor anyway.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from ..call import Call
from ..logsums import LogSums
from ..problem import Problem
from ..terms import DistanceDecay, OffsetBias, OffsetKeys, OffsetQueries, OffsetValues, Positions
from ..torch_private import intercepted, transforming, zeros_without_memory
from .arguments import THREADS, Arguments, Kept
from .library import library

_MOST = 256
"""The kinds of calls that are remembered in a thread; the one that was used least recently is forgotten first."""

_FEW = 4096
"""Numbers few enough to keep memory for; to allocate more takes no time beside their call."""

_CPU = torch.device("cpu")

_VALUES = frozenset({type(None), bool, int, float, str, Positions})
"""The types of options and of terms' numbers that never change; calls with others, such as NumPy's, are not
remembered."""


_PARTS: tuple[tuple[str, type, str], ...] = (
    ("bias", OffsetBias, "table"),
    ("key_table", OffsetKeys, "table"),
    ("query_table", OffsetQueries, "table"),
    ("value_table", OffsetValues, "table"),
    ("query_levels", DistanceDecay, "query_levels"),
    ("key_levels", DistanceDecay, "key_levels"),
)
"""Tensors of a problem, the terms that they come from, and the names there."""


@dataclass(frozen=True)
class Kind:
    """A kind of call: all but the numbers in its tensors.

    Args:
        key: types, dtypes, sizes, strides and options.
        tensors: the call's tensors in a fixed order.
    """

    key: tuple[Any, ...]
    tensors: list[Tensor]


@dataclass(frozen=True)
class _Known:
    """What is remembered of a kind of call.

    Args:
        fields: the kernel's arguments, with the addresses of another call.
        addresses: of each address among them: its index, the tensor it is in, and how many bytes from its beginning.
        output, log_sums: the indices of the addresses of what the kernel writes.
        size, dtype: of the output, whose heads are the third axis in memory.
        sums: the dtype of ``LogSums``.
        unread: where the kernel writes them if nobody asks for few of them; a thread computes one call at a time.
    """

    fields: array[int]
    addresses: tuple[tuple[int, int, int], ...]
    output: int
    log_sums: int
    size: tuple[int, ...]
    dtype: torch.dtype
    sums: torch.dtype
    unread: Tensor | None


class _Memory(local):
    """The known kinds of calls, in each thread's own dictionary."""

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[Any, ...], _Known | None] = OrderedDict()


_memory = _Memory()


def kind_of(content: tuple[Any, ...], terms: Any, options: tuple[Any, ...]) -> Kind | None:
    """Return the kind of a call that needs no gradient; None if it is not one that can be remembered.

    Nothing has been checked yet: ``content`` is query, key and value, and ``options`` are in a fixed order.
    """
    if type(terms) not in (tuple, list) or torch.compiler.is_compiling():
        return None
    tensors: list[Tensor] = []
    parts: list[Any] = []
    given = [*content, *options]
    for term in terms:
        parts.append(type(term))
        given.extend(getattr(term, "__dict__", {}).values())
    records = torch.is_grad_enabled()
    for each in given:
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            if each.device != _CPU or each.layout != torch.strided or (records and each.requires_grad):
                return None
            if each.is_nested or each.is_neg() or zeros_without_memory(each):
                # Its memory does not have its numbers, or not in rows.
                return None
            parts += (each.dtype, each.shape, each.stride())
            tensors.append(each)
        elif kind in _VALUES:
            # 1, 1.0 and True are equal, but options tell them apart.
            parts += (kind, each)
        elif kind is tuple and all(type(side) in _VALUES for side in each):
            # A window
            parts += (len(each), *((type(side), side) for side in each))
        else:
            return None
    if transforming() or intercepted():
        return None
    parts.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
    return Kind(tuple(parts), tensors)


def attend_again(kind: Kind) -> tuple[Tensor, LogSums] | None:
    """Compute a call of a known kind without its sinks; None if it is not known.

    ``LogSums`` may change with the next call, unless the call asks for them or has sinks.
    """
    known = _memory.known.get(kind.key)
    if known is None:
        return None
    _memory.known.move_to_end(kind.key)
    output = torch.empty_permuted(known.size, (0, 2, 1, 3), dtype=known.dtype, device=_CPU)
    log_sums = known.unread
    if log_sums is None:
        log_sums = torch.empty((2, *known.size[:3]), dtype=known.sums, device=_CPU)
    fields = array("q", known.fields)
    for index, tensor, start in known.addresses:
        fields[index] = kind.tensors[tensor].data_ptr() + start
    fields[THREADS] = torch.get_num_threads()
    fields[known.output], fields[known.log_sums] = output.data_ptr(), log_sums.data_ptr()
    handle = library()
    if handle is None or handle.whereformer_attention(fields.buffer_info()[0]):
        return None
    return output, log_sums


def remember(kind: Kind, call: Call, problem: Problem, arguments: Arguments, output: Tensor, kept: Kept) -> None:
    """Remember a kind of call, if all that the kernel reads lies in the call's own tensors."""
    given = (call.given_query_positions, call.given_key_positions)
    if problem.seed is not None or any(isinstance(each, Tensor) and each.is_floating_point() for each in given):
        # Every call draws a seed of its own, and every call's fractional positions have to be looked at.
        return
    places = _places(kind, call, problem, arguments)
    if places is None:
        return
    fields = array("q", arguments.data)
    addresses = [(index, *places[field]) for index, field in enumerate(fields) if field in places]
    _memory.known[kind.key] = _Known(
        fields,
        tuple(addresses),
        fields.index(output.data_ptr()),
        fields.index(kept.log_sums.data_ptr()),
        tuple(output.shape),
        output.dtype,
        kept.log_sums.dtype,
        None if call.return_lse or kept.log_sums.numel() > _FEW else kept.log_sums,
    )
    if len(_memory.known) > _MOST:
        _memory.known.popitem(last=False)


def _places(kind: Kind, call: Call, problem: Problem, arguments: Arguments) -> dict[int, tuple[int, int]] | None:
    """Return where each address lies: in which of the call's tensors, and how far from its beginning.

    The result is None if one lies in a copy, or if an address does not tell which tensor is meant, as that of an empty
    one, which is 0.
    """
    order = {id(tensor): place for place, tensor in enumerate(kind.tensors)}
    if len({0, *(tensor.data_ptr() for tensor in kind.tensors)}) <= len(kind.tensors):
        return None
    owners = {id(tensor): tensor for tensor in kind.tensors}
    for name, of, field in _PARTS:
        # What is read may be a part of what was given.
        given = [getattr(term, field) for term in call.terms if isinstance(term, of)]
        part = getattr(problem, name)
        if len(given) == 1 and part.untyped_storage().data_ptr() == given[0].untyped_storage().data_ptr():
            owners[id(part)] = given[0]
    places: dict[int, tuple[int, int]] = {}
    for tensor in arguments.read:
        owner = owners.get(id(tensor))
        if owner is None or id(owner) not in order:
            return None
        address = tensor.data_ptr()
        place = order[id(owner)], address - owner.data_ptr()
        if places.setdefault(address, place) != place:
            return None
    return places
