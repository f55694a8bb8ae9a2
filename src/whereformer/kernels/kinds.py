"""Calls like one before: their arguments are the same but for the numbers in tensors.

Checking a call, merging its terms and choosing a backend takes several times as long as the attention of a few tokens.
All of it follows from the kinds, sizes and strides of the arguments, so it is done once for each kind. The first call
of a kind writes down the steps from its tensors to those of the backend, such as the cast of a table. Later calls take
the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .bounded_cache import BoundedCache
from .call import CallTemplate, LogSums
from .precision import without_autocast
from .terms import Positions
from .torch_private import leaves, observed
from .tracing import layouts_of

_TENSORS = frozenset({Tensor, nn.Parameter})
_TYPES = _TENSORS | {type(None), bool, int, float, str, type, tuple, Positions}
"""The types of arguments; all but tensors never change. Calls with others, such as NumPy's, are not remembered."""
_PARTS = _TYPES - _TENSORS - {tuple}
"""The types of what tuples have."""

_QUESTIONS = frozenset({"__get__", "__len__", "contiguous", "dim", "float", "is_floating_point", "to"})
"""The functions of tensors whose results follow from a kind, or are the tensor itself. ``__get__`` reads an attribute,
such as ``shape``."""


class Kind(NamedTuple):
    """A kind of call, and the tensors of one of its calls.

    Args:
        key: types, dtypes, sizes, strides, options, and which tensors are the same.
        tensors: in a fixed order.
        autocasts: whether autocast is on.
    """

    key: tuple[Any, ...]
    tensors: list[Tensor]
    autocasts: bool


class _Place(int):
    """The place of a tensor among those of a call and the results of its steps."""


_Step: TypeAlias = Callable[[list[Tensor]], Tensor]
"""A torch function of some of a call's tensors and the results of earlier steps."""


class _Known(NamedTuple):
    """How calls of a kind are computed: by an outline's ``attend``, with the tensors at these places after all
    steps."""

    outline: CallTemplate
    steps: list[_Step]
    places: list[int]


_known = BoundedCache(1024)


def kind_of(arguments: tuple[Any, ...], terms: Any, names: tuple[str, ...]) -> Kind | None:
    """Return the kind of a call; None if it is not one that can be remembered.

    Nothing has been checked yet; ``arguments`` are all but ``terms``, and the last of them have these names.
    """
    if type(terms) not in (tuple, list) or torch.compiler.is_compiling() or observed():
        return None
    for term in terms:
        arguments += (type(term), *getattr(term, "__dict__", {}).values())
    # 1, 1.0 and True are equal, but options tell them apart.
    types = tuple(map(type, arguments))
    if tuple in types:
        parts = tuple([type(part) for value in arguments if type(value) is tuple for part in value])
        if not _PARTS.issuperset(parts):
            return None
        types += parts
    if not _TYPES.issuperset(types):
        return None
    tensors = [value for value in arguments if type(value) in _TENSORS]
    layouts = layouts_of(tensors)
    if not tensors or layouts is None:
        return None
    device = tensors[0].device.type
    if device == "meta":
        return None  # it has no autocast
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    values = tuple([value for value in arguments if type(value) not in _TENSORS])
    same = None
    if len({*map(id, tensors)}) < len(tensors):
        ids = [id(tensor) for tensor in tensors]
        same = tuple([ids.index(number) for number in ids])
    return Kind((names, types, values, layouts, same, autocast), tensors, autocast is not None)


def attend_again(kind: Kind) -> tuple[Tensor, LogSums | None] | None:
    """Return the results of a call without its sinks; None if its kind is not known."""
    known: _Known | None = _known.values.get(kind.key)
    if known is None:
        return None
    outline, steps, places = known
    tensors = kind.tensors
    if steps:
        tensors = [*tensors]
        with without_autocast(tensors[0].device) if kind.autocasts else nullcontext():
            for step in steps:
                tensors.append(step(tensors))
    return outline.attend([tensors[place] for place in places])


def _step(function: Callable[..., Tensor], arguments: list[Any], options: dict[str, Any]) -> _Step:
    """Return a function of tensors that stand at the places among these arguments."""
    place, rest = next(iter(arguments), None), arguments[1:]
    if type(place) is _Place and not any(type(value) in (_Place, list, tuple) for value in rest):
        return lambda tensors: function(tensors[place], *rest, **options)  # the usual way, in less time
    return lambda tensors: function(*_filled(arguments, tensors), **options)


def _filled(values: Sequence[Any], tensors: list[Tensor]) -> list[Any]:
    """Return arguments of a step with tensors at their places."""
    return [
        tensors[value]
        if type(value) is _Place
        else type(value)(_filled(value, tensors))
        if type(value) in (list, tuple)
        else value
        for value in values
    ]


class FirstCall(TorchFunctionMode):
    """A context that writes down, in the first call of a kind, what torch functions do to the call's tensors."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._key = kind.key
        # An id is unique while its object lives.
        self._tensors = [*kind.tensors]
        self._places = {id(tensor): _Place(place) for place, tensor in enumerate(kind.tensors)}
        self._steps: list[_Step] = []
        self._works = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        if isinstance(result, Tensor) and id(result) not in self._places:
            self._steps.append(_step(function, self._described(list(args)), options))
            self._works &= not any(isinstance(value, Tensor) for value in leaves(options))
            self._places[id(result)] = _Place(len(self._tensors))
            self._tensors.append(result)
        else:
            # Others may read numbers, or change a tensor in place.
            self._works &= function.__name__ in _QUESTIONS
        return result

    def _described(self, value: Any) -> Any:
        """Return an argument with places instead of tensors."""
        if isinstance(value, Tensor):
            self._works &= id(value) in self._places
            return self._places.get(id(value))
        return type(value)([self._described(part) for part in value]) if type(value) in (list, tuple) else value

    def remember(self, outline: CallTemplate, tensors: Sequence[Tensor]) -> None:
        """Remember that calls of the kind are computed by an outline's ``attend`` of these tensors, unless something
        happened that is not written down."""
        places = [self._places.get(id(tensor)) for tensor in tensors]
        known = [place for place in places if place is not None]
        if self._works and len(known) == len(places):
            _known.put(self._key, _Known(outline, self._steps, [int(place) for place in known]))
