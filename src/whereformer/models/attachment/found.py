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
from .interface import asks_causal, check_options, mask
from .served import is_served
from .undisturbed import undisturbed
from .undo import Undo

PROBE = f"{NAME}_probe"
"""The name of the attention implementation that records its calls."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        module: the layer that calls it.
        n_q, n_k: the numbers of queries and keys.
        num_heads, head_dim: the number of heads, and the width of one.
        received: what the hooks of an attached method passed on; None without a method.
    """

    module: nn.Module
    n_q: int
    n_k: int
    num_heads: int
    head_dim: int
    received: LayerInput | None
    causal: bool = False


_calls: ContextVar[list[AttentionCall]] = ContextVar("calls")


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *_: Any,
    whereformer: LayerInput | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function that records its calls and returns an output of the right shape."""
    check_options(options)
    batch, num_heads, n_q, head_dim = query.shape
    _calls.get().append(
        AttentionCall(
            module,
            n_q,
            key.shape[2],
            num_heads,
            head_dim,
            whereformer,
            asks_causal(module, attention_mask, options.get("is_causal")),
        )
    )
    return value.new_zeros(batch, n_q, num_heads, value.shape[3]), None


def record_calls(model: PreTrainedModel, own_masks: str | None = None) -> list[AttentionCall]:
    """Record the attention calls of one small forward, in order; none if the model does not dispatch them.

    Args:
        model: the model, whose own layers are served.
        own_masks: whose masks it gets, "eager" or "sdpa" for transformers' own; None: ours.

    Raises:
        InputError: if there is no small input that it runs on.
    """
    if not dispatches(model):
        return []
    calls = _calls.set([])
    try:
        with undisturbed(model):
            set_implementation(model, with_masks(PROBE, own_masks), Undo())
            run_any(model, rows=1, length=5, before=_calls.get().clear)
        return _calls.get()
    finally:
        _calls.reset(calls)


def dispatches(model: PreTrainedModel) -> bool:
    """Whether a model calls its attention through transformers, or has layers that are served."""
    return model._can_set_attn_implementation() or any(map(is_served, model.modules()))


def set_implementation(model: PreTrainedModel, name: str, undo: Undo) -> None:
    """Switch the attention implementation."""
    parts = parts_of(model)
    # Set the internal field, because the public one also changes the configs inside this one.
    field = "_attn_implementation_internal"
    for config in {id(part.config): part.config for part in parts}.values():
        undo.add(setattr, config, field, getattr(config, field))
    # Before some version of transformers, a model leaves the configs of its encoder and decoder alone.
    for part in parts:
        if part.config._attn_implementation == name:
            continue
        if part._can_set_attn_implementation():
            part.set_attn_implementation(name)
        else:
            setattr(part.config, field, name)  # for its layers that are served


def by_stack(model: PreTrainedModel, calls: list[AttentionCall]) -> list[tuple[PreTrainedModel, list[AttentionCall]]]:
    """Group the self-attention calls by the innermost PreTrainedModel around them: an encoder or a decoder."""
    owner: dict[int, PreTrainedModel] = {}

    def visit(module: nn.Module, stack: PreTrainedModel) -> None:
        stack = module if isinstance(module, PreTrainedModel) else stack
        owner[id(module)] = stack
        for child in module.children():
            visit(child, stack)

    visit(model, model)
    stacks: dict[int, tuple[PreTrainedModel, list[AttentionCall]]] = {}
    for call in calls:
        if call.n_q == call.n_k:
            stack = owner[id(call.module)]
            stacks.setdefault(id(stack), (stack, []))[1].append(call)
    return list(stacks.values())


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return a model and the models inside, such as its encoder."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def around(model: PreTrainedModel, stack: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models that a stack is part of, the outermost first and the stack itself last."""
    return [part for part in parts_of(model) if any(module is stack for module in part.modules())]


register(PROBE, _probe, mask)
