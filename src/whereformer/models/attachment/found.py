"""Finds a model's attention calls by running one small forward, and groups them by encoder and decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .configs import configs_of
from .hooks import NAME, LayerInput, Undo
from .interface import attend, requested
from .kinds import serve
from .masks import mask, seen
from .served import is_served
from .trial import owners_of, packed_examples, parts_of, run_any, trial, twins

PROBE = f"{NAME}_probe"
"""The name of the attention implementation that records its calls."""

IMPLEMENTATION = "_attn_implementation_internal"
"""The field of a configuration for it; the public one also changes the configurations inside, or refuses our names."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        module: the layer that calls it.
        n_q, n_k: the numbers of queries and keys.
        num_heads, head_dim: the number of heads, and the width of one.
        received: what the hooks of an attached method passed on; None without a method.
        causal: whether no query sees a later key, with a mask of padding and without one.
        mixed: whether a mask of padding decides on that.
        packed: whether texts in a row are kept apart.
        dead: (batch, n_q), whose outputs mean nothing: tokens with no key to see, or padding themselves.
    """

    module: nn.Module
    n_q: int
    n_k: int
    num_heads: int
    head_dim: int
    received: LayerInput | None
    causal: bool
    dead: Tensor
    mixed: bool = False
    packed: bool = False

    def of(self, modules: Mapping[nn.Module, nn.Module]) -> AttentionCall:
        """Return the call of the same layer in a copy of its model."""
        return replace(self, module=modules[self.module])


_recorded: ContextVar[list[AttentionCall]] = ContextVar("recorded")


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, and record the call.

    transformers averages over all keys where a query may see none. What padding sees is not the same for all models.
    """
    out, weights = attend(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    (batch, heads, n_q, head_dim), n_k = query.shape, key.shape[2]
    asked = requested(module, attention_mask, query, key, is_causal, options)
    dead, real = (out == 0).flatten(2).all(-1), asked.key_mask(batch)
    if real is not None and n_q == n_k:
        dead = dead | ~real
    if asked.matrix is not None:
        dead = dead | ~seen(asked.matrix).any(1).any(-1)
    received, causal = options.get("whereformer"), asked.hides_later_keys(n_q)
    packed = asked.documents is not None
    _recorded.get().append(AttentionCall(module, n_q, n_k, heads, head_dim, received, causal, dead, packed=packed))
    return out, weights


def find_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Find the attention calls of a model: the calls of a small forward, in order; none if it does not dispatch them.

    Raises:
        InputError: if there is no small input that it runs on.
    """
    with trial(model) as copied:
        own = twins(copied, model)
        serve(copied, [])
        if not (copied._can_set_attn_implementation() or any(map(is_served, copied.modules()))):
            return []
        for config in configs_of(copied):
            setattr(config, IMPLEMENTATION, PROBE)
        return [call.of(own) for call in _record(copied)]


def record_calls(model: PreTrainedModel, found: list[AttentionCall]) -> list[AttentionCall]:
    """Record the attention calls of a small forward of a model with a method, in the parts that had calls."""
    with trial(model) as copied:
        own = twins(model, copied)
        set_implementation(copied, [call.of(own) for call in found], PROBE, [])
        return _record(copied)


def text_separating_layers(model: PreTrainedModel, calls: list[AttentionCall]) -> set[nn.Module]:
    """Return the layers that keep the texts of a row apart where positions begin again, without a mask and a cache."""
    with trial(model) as copied:
        originals, copies = twins(copied, model), twins(model, copied)
        set_implementation(copied, [call.of(copies) for call in calls], PROBE, [])
        with recording() as packed_calls:
            for example in packed_examples(copied.base_model):
                with suppress(Exception):  # a model may take no positions, or only of other axes
                    example.run()
        return {originals[call.module] for call in packed_calls if call.packed}


def _record(model: PreTrainedModel) -> list[AttentionCall]:
    """Record the calls of a forward with a mask of padding, and compare whom they see in one without."""
    with recording() as calls:
        example, _ = run_any(model, rows=1, length=5, before=calls.clear)
    unmasked = example.unmasked()
    if unmasked is None:
        return calls
    causal: dict[nn.Module, bool] = {}
    # A model may need its mask.
    with recording() as unmasked_calls, suppress(Exception):
        unmasked.run()
        for call in unmasked_calls:
            causal[call.module] = call.causal and causal.get(call.module, True)
    pairs = [(call, causal.get(call.module, call.causal)) for call in calls]
    return [replace(call, causal=call.causal and unhidden, mixed=call.causal != unhidden) for call, unhidden in pairs]


@contextmanager
def recording() -> Iterator[list[AttentionCall]]:
    """Return the list that gets the calls of :data:`PROBE`."""
    token = _recorded.set([])
    try:
        yield _recorded.get()
    finally:
        _recorded.reset(token)


def set_implementation(model: PreTrainedModel, calls: list[AttentionCall], name: str, undo: Undo) -> None:
    """Switch the attention implementation of the parts of a model that have these calls.

    Others, such as what reads the images beside a text, ran in no example, so that nothing is known of them.
    """
    configs = [part.config for part in parts_with(model, calls)]
    configs += [call.module.config for call in calls if hasattr(call.module, "config")]
    for config in {id(config): config for config in configs}.values():
        undo.append(partial(setattr, config, IMPLEMENTATION, getattr(config, IMPLEMENTATION)))
        setattr(config, IMPLEMENTATION, name)


def by_stack(model: PreTrainedModel, calls: list[AttentionCall]) -> list[tuple[PreTrainedModel, list[AttentionCall]]]:
    """Group the self-attention calls by the innermost PreTrainedModel around them: an encoder or a decoder."""
    owners = owners_of(model)
    stacks: dict[PreTrainedModel, list[AttentionCall]] = {}
    for call in calls:
        if call.n_q == call.n_k:
            stacks.setdefault(owners[call.module], []).append(call)
    return list(stacks.items())


def parts_with(model: PreTrainedModel, calls: list[AttentionCall]) -> list[PreTrainedModel]:
    """Return a model and the models inside in which there are calls."""
    layers = {call.module for call in calls}
    return [part for part in parts_of(model) if not layers.isdisjoint(part.modules())]


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, mask)
