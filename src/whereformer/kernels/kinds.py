"""Calls like one before: their arguments are the same but for the numbers in tensors.

Checking a call, merging its terms and choosing a backend takes several times as long as the attention of a few tokens.
All of it follows from the kinds, sizes and strides of what is given, so it is done once for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .dropout import draw_seed
from .fields import Call, LogSums
from .operators import Memory, Plan
from .terms import Positions, Term
from .torch_private import observed
from .tracing import layouts_of

_TENSORS = frozenset({Tensor, nn.Parameter})
_TYPES = _TENSORS | {type(None), bool, int, float, str, type, tuple, Positions}
"""The types of arguments; all but tensors never change. Calls with others, such as NumPy's, are not remembered."""
_PARTS = _TYPES - _TENSORS - {tuple}
"""The types of what tuples have."""


Kind: TypeAlias = tuple[tuple[Any, ...], list[Tensor]]
"""A kind of call: types, dtypes, sizes, strides and options; and the tensors of one of its calls in a fixed order."""

_Source: TypeAlias = tuple[int, Callable[[Tensor], Tensor] | None]
"""The place of one of a call's tensors, and the view of it that is meant; None for itself."""


class _Known(NamedTuple):
    """What is remembered of a kind of call.

    Args:
        plan: how it is computed.
        sources: for each tensor of the plan but dropout's seed, which of the call's it is.
        seed: the place of dropout's seed among the plan's tensors, which every call draws; None without dropout.
    """

    plan: Plan
    sources: list[_Source]
    seed: int | None


_known = Memory(1024)


def attend_again(
    given: tuple[Any, ...], terms: Any, names: tuple[str, ...]
) -> tuple[Kind | None, tuple[Tensor, LogSums | None] | None]:
    """Return the kind of a call, None if it is not one that can be remembered; and the call's results without its
    sinks, None if its kind is not known.

    Nothing has been checked yet; ``given`` are all arguments but ``terms``, of which the last have these names.
    """
    kind = _kind_of(given, terms, names)
    known: _Known | None = None if kind is None else _known.values.get(kind[0])
    if kind is None or known is None:
        return kind, None
    (plan, sources, seed), found = known, kind[1]
    tensors = [found[index] if view is None else view(found[index]) for index, view in sources]
    if seed is not None:
        tensors.insert(seed, draw_seed(found[0].device))
    return kind, plan.attend(tensors)


def _kind_of(given: tuple[Any, ...], terms: Any, names: tuple[str, ...]) -> Kind | None:
    if type(terms) not in (tuple, list) or torch.compiler.is_compiling() or observed():
        return None
    for term in terms:
        given += (type(term), *getattr(term, "__dict__", {}).values())
    # 1, 1.0 and True are equal, but options tell them apart.
    types = tuple(map(type, given))
    if tuple in types:
        parts = tuple([type(each) for some in given if type(some) is tuple for each in some])
        if not _PARTS.issuperset(parts):
            return None
        types += parts
    if not _TYPES.issuperset(types):
        return None
    tensors = [each for each in given if type(each) in _TENSORS]
    layouts = layouts_of(tensors)
    if not tensors or layouts is None:
        return None
    device = tensors[0].device.type
    if device == "meta":
        return None  # it has no autocast
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    values = tuple([each for each in given if type(each) not in _TENSORS])
    return (names, types, values, layouts, autocast), tensors


def remember(kind: Kind, terms: Sequence[Term], call: Call, plan: Plan, tensors: Sequence[Tensor]) -> None:
    """Remember a kind of call, if its plan's tensors are the call's own, or views of those of its terms."""
    key, given = kind
    order = {id(tensor): place for place, tensor in enumerate(given)}
    positions = call.query_positions, call.key_positions
    if len(order) < len(given) or any(each is not None and each.is_floating_point() for each in positions):
        # Which of two is meant cannot be told from a tensor that is both. Fractional positions are looked at each time.
        return
    sources: list[_Source] = []
    seed = None
    for place, (name, tensor) in enumerate(zip(plan.names, tensors, strict=True)):
        if name == "seed":
            seed = place
        elif id(tensor) in order:
            sources.append((order[id(tensor)], None))
        elif (found := _source_of(tensor, terms)) is not None:
            sources.append((order[id(found[0])], found[1]))
        else:
            return
    _known.put(key, _Known(plan, sources, seed))


def _source_of(part: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """Return the tensor of a term of which an input is a view, and what makes it that view; None if it is no such."""
    memory = part.untyped_storage().data_ptr()
    given: list[Tensor] = [getattr(term, field) for term in terms for field in term.axes]
    given = [each for each in given if each.untyped_storage().data_ptr() == memory and each.dtype == part.dtype]
    if len(given) != 1:
        return None
    (whole,) = given
    if whole.dim() < part.dim():
        view: Callable[[Tensor], Tensor] = methodcaller("unsqueeze", -1)  # levels are columns
    else:
        if whole.shape[1] < part.shape[1]:
            return None  # one number stands for several
        step = max(whole.stride(1), 1) * part.element_size()
        start = min(max((part.data_ptr() - whole.data_ptr()) // step, 0), whole.shape[1] - part.shape[1])
        view = partial(torch.narrow, dim=1, start=start, length=part.shape[1])
    found = view(whole)
    same = (found.data_ptr(), found.shape, found.stride()) == (part.data_ptr(), part.shape, part.stride())
    return (whole, view) if same else None
