"""``Sources``: the tensors that tables are computed from; tables are remembered while these do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..kernels.bounded_cache import BoundedCache
from ..kernels.precision import autocast_dtype
from ..kernels.torch_private import get_version
from ..kernels.tracing import is_eager

Result = TypeVar("Result")

Layers: TypeAlias = Sequence[Tensor] | Tensor
"""What has the part of each layer at its number."""

MAX_TABLES = 1024
"""The largest number of results of a module; a method has about one for each layer."""

_memories: weakref.WeakKeyDictionary[nn.Module, BoundedCache] = weakref.WeakKeyDictionary()


def split_layers(parameter: Tensor) -> Layers:
    """Split a parameter into the parts of its layers, (layers, ...).

    All parts are taken at once where gradients are wanted: the gradient of a single part has the size of the whole.
    """
    return parameter.unbind() if torch.is_grad_enabled() else parameter


class _Remembered(NamedTuple):
    """A result with its key, and the state and identity of its sources."""

    key: Hashable
    state: tuple[object, ...]
    sources: list[weakref.ref[Tensor]]
    aliases: list[Tensor]
    """Tensors that keep the memory of the sources, so that no other tensor gets their addresses."""
    result: Any


class Sources:
    """The current state of tensors of a module, for results that are computed from them.

    Results are remembered on the CPU in eager code, unless a source may need gradients. Torch counts the changes of a
    tensor, such as an optimizer's step or ``load_state_dict``; after a change, results are computed again. It does not
    count changes of ``tensor.data``, so a forward with gradients forgets results, too.

    Args:
        module: the owner of the results, which are forgotten with it.
        tensors: the sources. Without any, nothing is remembered.
    """

    def __init__(self, module: nn.Module, *tensors: Tensor) -> None:
        self._memory: BoundedCache | None = None
        if not tensors:
            return
        # On a GPU, a result would be valid only for one stream or graph.
        is_plain = is_eager(*tensors) and not torch.jit.is_tracing() and tensors[0].device.type == "cpu"
        if not is_plain or any(map(Tensor.is_inference, tensors)):
            return
        memory = _memories.get(module) or _memories.setdefault(module, BoundedCache(MAX_TABLES))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            for name, remembered in list(memory.values.items()):
                if any(alias.data_ptr() == tensors[0].data_ptr() for alias in remembered.aliases):
                    memory.values.pop(name, None)
            return
        self._memory, self._tensors = memory, tensors
        versions = [
            (tensor.data_ptr(), get_version(tensor), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors
        ]
        self._state = (torch.is_inference_mode_enabled(), autocast_dtype(tensors[0].device), *versions)

    def get_or_compute(self, name: Hashable, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, from an earlier call if the sources and the key are the same.

        Args:
            name: identifies a result of the module; only its last value is remembered.
            key: everything besides the sources that ``compute`` depends on, such as a length.
            compute: a function of the sources and of the key. Callers must not change its result.
        """
        if self._memory is None:
            return compute()
        remembered: _Remembered | None = self._memory.values.get(name)
        if remembered is not None and remembered.key == key and remembered.state == self._state:
            pairs = zip(remembered.sources, self._tensors, strict=True)
            if all(reference() is tensor for reference, tensor in pairs):
                result: Result = remembered.result
                return result
        result = compute()
        references, aliases = map(weakref.ref, self._tensors), [tensor.detach() for tensor in self._tensors]
        self._memory.put(name, _Remembered(key, self._state, list(references), aliases, result))
        return result
