"""``remembered``: what a method computes of its weights, once for as long as they stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..kernels.memory import Memory
from ..kernels.precision import autocast_dtype
from ..kernels.torch_private import version_of
from ..kernels.tracing import is_eager

Result = TypeVar("Result")

_MAX_RESULTS = 1024
"""Results of a module; a method has about one for each layer."""


class _Remembered(NamedTuple):
    """A result and what it was computed from.

    Args:
        state: its key, the state of torch, and the addresses and versions of sources.
        sources: they may die.
        aliases: tensors with the memory of sources, so that no other tensor gets their addresses.
    """

    state: tuple[Any, ...]
    sources: list[weakref.ref[Tensor]]
    aliases: list[Tensor]
    result: Any


_results: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


def remembered(
    module: nn.Module, name: Hashable, key: Hashable, compute: Callable[[], Result], *sources: Tensor
) -> Result:
    """Return what ``compute`` returns: on the CPU, unless gradients of ``sources`` may be wanted, from an earlier time.

    It is computed again after any change of a source that torch counts, such as an optimizer's step or
    ``load_state_dict``, and after a forward with gradients. Torch does not count what is written into ``source.data``.

    Args:
        module: that it belongs to; it is forgotten with the module.
        name: tells results of the module apart; each has one value.
        key: all else that ``compute`` depends on, such as a length.
        compute: a function of sources and key. Nobody changes what it returns.
        sources: tensors, at least one.
    """
    if not is_eager(*sources) or torch.jit.is_tracing() or any(map(Tensor.is_inference, sources)):
        return compute()
    device = sources[0].device
    memory = _results.get(module) or _results.setdefault(module, Memory(_MAX_RESULTS))
    # On a GPU, streams and graphs would have to be told apart.
    if device.type != "cpu" or (torch.is_grad_enabled() and any(source.requires_grad for source in sources)):
        memory.values.pop(name, None)
        return compute()
    versions = [
        (source.data_ptr(), version_of(source), source.dtype, source.shape, source.stride()) for source in sources
    ]
    state = (key, torch.is_inference_mode_enabled(), autocast_dtype(device), *versions)
    found: _Remembered | None = memory.values.get(name)
    if found is not None and found.state == state:
        pairs = zip(found.sources, sources, strict=True)
        if all(reference() is source for reference, source in pairs):
            return found.result  # type: ignore[no-any-return]
    result = compute()
    references = [weakref.ref(source) for source in sources]
    memory.put(name, _Remembered(state, references, [source.detach() for source in sources], result))
    return result
