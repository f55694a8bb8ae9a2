"""A cache for repeated calls: calls that differ only in the values of tensors.

Checking a call, merging its terms and choosing a backend takes several times as long as the attention of a few tokens.
All of it follows from the types, sizes and strides of the arguments: the call's signature. So it is done once for each
signature. While the first call with a signature is checked, a :class:`StepRecorder` records the steps from its tensors
to the tensors of the backend, such as the cast of a table. Later calls take the same steps.
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
from .torch_private import flatten_tree, has_active_mode
from .tracing import tensor_layouts

_TENSOR_TYPES = frozenset({Tensor, nn.Parameter})
_ARGUMENT_TYPES = _TENSOR_TYPES | {type(None), bool, int, float, str, type, tuple, Positions}
"""The types of arguments. Their values, except those in tensors, never change. Plans of calls with other types, such as
NumPy's, are not cached."""
_ELEMENT_TYPES = _ARGUMENT_TYPES - _TENSOR_TYPES - {tuple}
"""The types of the elements of tuples."""

_HARMLESS_FUNCTIONS = frozenset({"__len__", "contiguous", "dim", "float", "is_floating_point", "to"})
_HARMLESS_ATTRIBUTES = frozenset({"device", "dtype", "is_nested", "shape"})
"""What follows from a signature, or is the tensor itself. Others, such as ``requires_grad``, are not part of it."""


class CallSignature(NamedTuple):
    """The signature of a call, and its tensors."""

    key: tuple[object, ...]  # types, dtypes, sizes, strides, options, and which tensors are the same
    tensors: list[Tensor]  # in a fixed order
    autocasts: bool  # whether autocast is on


class _TensorIndex(int):
    """The index of a tensor in the list of a call's tensors and the results of its steps."""


_Step: TypeAlias = Callable[[list[Tensor]], Tensor]
"""A torch function of some of a call's tensors and the results of earlier steps."""


class _CachedCall(NamedTuple):
    """The steps of calls with one signature, and the plan that computes them from the tensors at these indices."""

    plan: CallTemplate
    steps: list[_Step]
    indices: list[int]


_plans = BoundedCache(1024)


def make_signature(arguments: tuple[Any, ...], terms: Any, names: tuple[str, ...]) -> CallSignature | None:
    """Return the signature of a call that is not checked yet; None if its plan cannot be cached.

    ``arguments`` are all arguments except ``terms``; ``names`` are the names of the last of them.
    """
    if type(terms) not in (tuple, list) or torch.compiler.is_compiling() or has_active_mode():
        return None
    for term in terms:
        arguments += (type(term), *getattr(term, "__dict__", {}).values())
    # 1, 1.0 and True are equal, but not the same option.
    types = tuple(map(type, arguments))
    if tuple in types:
        element_types = tuple([type(element) for value in arguments if type(value) is tuple for element in value])
        if not _ELEMENT_TYPES.issuperset(element_types):
            return None
        types += element_types
    if not _ARGUMENT_TYPES.issuperset(types):
        return None
    tensors = [value for value in arguments if type(value) in _TENSOR_TYPES]
    layouts = tensor_layouts(tensors)
    if not tensors or layouts is None:
        return None
    device = tensors[0].device.type
    if device == "meta":
        return None  # it has no autocast
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    values = tuple([value for value in arguments if type(value) not in _TENSOR_TYPES])
    same = None
    if len({*map(id, tensors)}) < len(tensors):
        ids = [id(tensor) for tensor in tensors]
        same = tuple([ids.index(number) for number in ids])
    return CallSignature((names, types, values, layouts, same, autocast), tensors, autocast is not None)


def attend_from_cache(signature: CallSignature) -> tuple[Tensor, LogSums | None] | None:
    """Return the results of a call without its sinks; None if no plan is cached for its signature."""
    cached: _CachedCall | None = _plans.values.get(signature.key)
    if cached is None:
        return None
    plan, steps, indices = cached
    tensors = signature.tensors
    if steps:
        tensors = [*tensors]
        with without_autocast(tensors[0].device) if signature.autocasts else nullcontext():
            for step in steps:
                tensors.append(step(tensors))
    return plan.attend([tensors[index] for index in indices])


def _make_step(function: Callable[..., Tensor], arguments: list[object], options: dict[str, object]) -> _Step:
    """Return a torch function of these arguments, with tensors instead of their indices, as a step."""
    index, rest = next(iter(arguments), None), arguments[1:]
    if type(index) is _TensorIndex and not any(type(value) in (_TensorIndex, list, tuple) for value in rest):
        return lambda tensors: function(tensors[index], *rest, **options)  # the most frequent form, in less time
    return lambda tensors: function(*_with_tensors(arguments, tensors), **options)


def _with_tensors(values: Sequence[Any], tensors: list[Tensor]) -> list[Any]:
    """Return the arguments of a step with tensors instead of their indices."""
    return [
        tensors[value]
        if type(value) is _TensorIndex
        else type(value)(_with_tensors(value, tensors))
        if type(value) in (list, tuple)
        else value
        for value in values
    ]


class StepRecorder(TorchFunctionMode):
    """A context that records, in the first call with a signature, the torch functions of the call's tensors."""

    def __init__(self, signature: CallSignature) -> None:
        super().__init__()
        self._key = signature.key
        # An id is unique while its object lives.
        self._tensors = [*signature.tensors]
        self._indices = {id(tensor): _TensorIndex(index) for index, tensor in enumerate(signature.tensors)}
        self._steps: list[_Step] = []
        self._can_replay = True

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        if isinstance(result, Tensor) and id(result) not in self._indices:
            self._steps.append(_make_step(function, self._with_indices(list(args)), options))
            # Steps put tensors only in place of indices, which options do not have.
            self._can_replay &= not any(isinstance(value, Tensor) for value in flatten_tree(options))
            self._indices[id(result)] = _TensorIndex(len(self._tensors))
            self._tensors.append(result)
        else:
            # Other functions may read numbers, or change a tensor in place.
            is_attribute = function.__name__ == "__get__" and function.__self__.__name__ in _HARMLESS_ATTRIBUTES
            self._can_replay &= is_attribute or function.__name__ in _HARMLESS_FUNCTIONS
        return result

    def _with_indices(self, value: Any) -> Any:
        """Return an argument with indices instead of tensors."""
        if isinstance(value, Tensor):
            self._can_replay &= id(value) in self._indices
            return self._indices.get(id(value))
        is_sequence = type(value) in (list, tuple)
        return type(value)([self._with_indices(element) for element in value]) if is_sequence else value

    def cache_plan(self, plan: CallTemplate, tensors: Sequence[Tensor]) -> None:
        """Cache a plan that computes calls with the signature from these tensors, unless the recorder saw an operation
        that it cannot replay."""
        indices = [self._indices.get(id(tensor)) for tensor in tensors]
        known = [int(index) for index in indices if index is not None]
        if self._can_replay and len(known) == len(indices):
            _plans.put(self._key, _CachedCall(plan, self._steps, known))
