"""Finds a model's attention calls by running one small forward, and groups them by encoder and decoder."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .examples import run_any
from .hooks import LayerInput
from .implementations import NAME, register, with_masks
from .interface import check_options, requested
from .kinds import serve
from .masks import mask
from .served import is_served
from .undisturbed import configs_of, owners_of, parts_of, undisturbed
from .undo import Undo

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
        causal: whether no query sees a later key.
    """

    module: nn.Module
    n_q: int
    n_k: int
    num_heads: int
    head_dim: int
    received: LayerInput | None
    causal: bool


_calls: ContextVar[list[AttentionCall]] = ContextVar("calls")


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    whereformer: LayerInput | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function that records its calls and returns an output of the right shape."""
    check_options(module, options)
    (batch, num_heads, n_q, head_dim), n_k = query.shape, key.shape[2]
    causal = requested(module, attention_mask, query, key, is_causal, options).hides_later_keys(n_q)
    _calls.get().append(AttentionCall(module, n_q, n_k, num_heads, head_dim, whereformer, causal))
    return value.new_zeros(batch, n_q, num_heads, value.shape[3]), None


def find_calls(model: PreTrainedModel, own_masks: str | None = None) -> list[AttentionCall]:
    """Find the attention calls of a model: those of one small forward, in order; none if it does not dispatch them.

    Args:
        model: the model, which stays as it is.
        own_masks: whose masks it gets, "eager" or "sdpa" for transformers' own; None: ours.

    Raises:
        InputError: if there is no small input that it runs on.
    """
    with undisturbed(model):
        serve(model, Undo())
        if not (model._can_set_attn_implementation() or any(map(is_served, model.modules()))):
            return []
        for config in configs_of(model):
            setattr(config, IMPLEMENTATION, with_masks(PROBE, own_masks))
        return _record(model)


def record_calls(model: PreTrainedModel, found: list[AttentionCall], own_masks: str | None) -> list[AttentionCall]:
    """Record the attention calls of one small forward of a model with a method, in the parts in which calls were."""
    with undisturbed(model):
        set_implementation(model, found, with_masks(PROBE, own_masks), Undo())
        return _record(model)


def _record(model: PreTrainedModel) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    try:
        run_any(model, rows=1, length=5, before=calls.clear)
    finally:
        _calls.reset(token)
    return calls


def set_implementation(model: PreTrainedModel, calls: list[AttentionCall], name: str, undo: Undo) -> None:
    """Switch the attention implementation of the parts of a model that have these calls.

    Others, such as what reads the images beside a text, ran in no example, so that nothing is known of them.
    """
    configs = [part.config for part in parts_with(model, calls)]
    configs += [call.module.config for call in calls if hasattr(call.module, "config")]
    for config in {id(config): config for config in configs}.values():
        undo.add(setattr, config, IMPLEMENTATION, getattr(config, IMPLEMENTATION))
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


register(PROBE, _probe, mask)
