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
from ..precision import autocast_dtype
from ..problem import Problem
from ..terms import OffsetBias, OffsetKeys, OffsetValues
from ..torch_private import intercepted, transforming
from .arguments import THREADS, Arguments, Kept
from .library import library

_MOST = 256
"""The kinds of calls that are remembered in a thread; the one that was used least recently is forgotten first."""

_CPU = torch.device("cpu")


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
        output, kept: the indices of the addresses of what the kernel writes.
        size, dtype: of the output, whose heads are the third axis in memory.
        sums: the numbers of ``Kept.whole``, whose first are ``LogSums``.
    """

    fields: array[int]
    addresses: tuple[tuple[int, int, int], ...]
    output: int
    kept: int
    size: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[int, torch.dtype]
    returns_lse: bool


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
            parts += (each.dtype, each.shape, each.stride())
            tensors.append(each)
        elif isinstance(each, Tensor):
            return None
        else:
            # 1, 1.0 and True are equal, but options tell them apart.
            parts += (kind, each)
    if transforming() or intercepted():
        return None
    parts.append(autocast_dtype(_CPU))
    return Kind(tuple(parts), tensors)


def attend_again(kind: Kind) -> tuple[Tensor, Tensor | None] | None:
    """Compute a call of a known kind: its output, and its log-sum-exp if it asks for one; None if it is not known."""
    try:
        known = _memory.known.get(kind.key)
    except TypeError:
        return None  # An option that is not hashable, which is probably wrong
    if known is None:
        return None
    _memory.known.move_to_end(kind.key)
    output = torch.empty_permuted(known.size, (0, 2, 1, 3), dtype=known.dtype)
    numbers, dtype = known.sums
    kept = torch.empty(numbers, dtype=dtype)
    fields = array("q", known.fields)
    for index, tensor, start in known.addresses:
        fields[index] = kind.tensors[tensor].data_ptr() + start
    fields[THREADS] = torch.get_num_threads()
    fields[known.output], fields[known.kept] = output.data_ptr(), kept.data_ptr()
    handle = library()
    if handle is None or handle.whereformer_attention(fields.buffer_info()[0]):
        return None
    if not known.returns_lse:
        return output, None
    return output, kept[: 2 * output[..., 0].numel()].view(2, *known.size[:3]).sum(0)


def remember(kind: Kind, call: Call, problem: Problem, arguments: Arguments, output: Tensor, kept: Kept) -> None:
    """Remember a kind of call, if all that the kernel reads lies in the call's own tensors."""
    places = _places(kind, call, problem, arguments)
    if places is None or problem.seed is not None:
        return
    fields = array("q", arguments.data)
    own = {output.data_ptr(): "output", kept.log_sums.data_ptr(): "kept"}
    found = {name: fields.index(address) for address, name in own.items()}
    addresses = [(index, *places[field]) for index, field in enumerate(fields) if field in places]
    _memory.known[kind.key] = _Known(
        fields,
        tuple(addresses),
        found["output"],
        found["kept"],
        tuple(output.shape),
        output.dtype,
        (len(kept.whole), kept.whole.dtype),
        call.return_lse,
    )
    if len(_memory.known) > _MOST:
        _memory.known.popitem(last=False)


def _places(kind: Kind, call: Call, problem: Problem, arguments: Arguments) -> dict[int, tuple[int, int]] | None:
    """Return where each address lies: in which of the call's tensors, and how far from its beginning.

    The result is None if one lies in a copy, or if an address does not tell which tensor is meant.
    """
    order = {id(tensor): place for place, tensor in enumerate(kind.tensors)}
    if len({tensor.data_ptr() for tensor in kind.tensors}) < len(kind.tensors):
        return None
    owners = {id(tensor): tensor for tensor in kind.tensors}
    for name, of in (("bias", OffsetBias), ("key_table", OffsetKeys), ("value_table", OffsetValues)):
        # A table may be a part of what was given.
        tables = [term.table for term in call.terms if isinstance(term, of)]
        part = getattr(problem, name)
        if len(tables) == 1 and part.untyped_storage().data_ptr() == tables[0].untyped_storage().data_ptr():
            owners[id(part)] = tables[0]
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
