"""``Sources``: tensors that tables are computed from; while they stay the same, tables are remembered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..kernels.memory import Memory
from ..kernels.precision import autocast_dtype
from ..kernels.torch_private import version_of
from ..kernels.tracing import is_eager

Result = TypeVar("Result")

Layers: TypeAlias = Sequence[Tensor] | Tensor
"""What has the part of each layer at its number."""

MAX_TABLES = 1024
"""Results of a module; a method has about one for each layer."""

_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


def split_layers(parameter: Tensor) -> Layers:
    """Split a parameter into the parts of its layers, (layers, ...).

    All parts are taken at once where gradients are wanted: the gradient of a single part has the size of the whole.
    """
    return parameter.unbind() if torch.is_grad_enabled() else parameter


class _Remembered(NamedTuple):
    """A result with its key, and the state and the identity of its sources."""

    key: Hashable
    state: tuple[Any, ...]
    sources: list[weakref.ref[Tensor]]
    aliases: list[Tensor]
    """They hold the memory of sources, so that no other tensor gets their addresses."""
    result: Any


class Sources:
    """Tensors of a module as they are now, for results that follow from them.

    Results are remembered on the CPU in eager code, unless gradients of a source may be wanted. Torch counts the
    changes of a tensor, such as an optimizer's step or ``load_state_dict``; after one, results are computed again. It
    does not count what is written into ``tensor.data``, so a forward with gradients forgets results, too.

    Args:
        module: the owner of the results, which are forgotten with it.
        tensors: at least one.
    """

    def __init__(self, module: nn.Module, *tensors: Tensor) -> None:
        self._memory: Memory | None = None
        # On a GPU, streams and graphs would have to be told apart.
        watched = not is_eager(*tensors) or torch.jit.is_tracing() or tensors[0].device.type != "cpu"
        if watched or any(map(Tensor.is_inference, tensors)):
            return
        memory = _memories.get(module) or _memories.setdefault(module, Memory(MAX_TABLES))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            for name, last in list(memory.values.items()):
                if any(alias.data_ptr() == tensors[0].data_ptr() for alias in last.aliases):
                    memory.values.pop(name, None)
            return
        self._memory, self._tensors = memory, tensors
        versions = [(each.data_ptr(), version_of(each), each.dtype, each.shape, each.stride()) for each in tensors]
        self._state = (torch.is_inference_mode_enabled(), autocast_dtype(tensors[0].device), *versions)

    def remembered(self, name: Hashable, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return what ``compute`` returns, maybe from an earlier time.

        Args:
            name: tells results of the module apart; each has one value.
            key: all else that ``compute`` depends on, such as a length.
            compute: a function of the sources and of the key. Nobody changes what it returns.
        """
        if self._memory is None:
            return compute()
        last: _Remembered | None = self._memory.values.get(name)
        if last is not None and last.key == key and last.state == self._state:
            pairs = zip(last.sources, self._tensors, strict=True)
            if all(reference() is tensor for reference, tensor in pairs):
                result: Result = last.result
                return result
        result = compute()
        references, aliases = map(weakref.ref, self._tensors), [tensor.detach() for tensor in self._tensors]
        self._memory.put(name, _Remembered(key, self._state, list(references), aliases, result))
        return result
