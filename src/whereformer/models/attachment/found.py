"""Finds a model's attention calls by running one small forward, and groups them by encoder and decoder."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...errors import InputError
from .hooks import PROBE, LayerInput
from .interface import check_options, requested
from .masks import mask
from .served import is_served
from .undo import Undo


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
    causal = requested(module, attention_mask, query, key, is_causal, options).hides_later_keys()
    _calls.get().append(AttentionCall(module, n_q, n_k, num_heads, head_dim, whereformer, causal))
    return value.new_zeros(batch, n_q, num_heads, value.shape[3]), None


@torch.no_grad()
def record_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Record the attention calls of one small forward, in order; none if the model does not dispatch them."""
    if not (model._can_set_attn_implementation() or any(map(is_served, model.modules()))):
        return []
    training = [module for module in model.modules() if module.training]
    undo = Undo()
    set_implementation(model, PROBE, undo)
    calls = _calls.set([])
    model.eval()
    try:
        inputs = _example(model)
        try:
            _run(model, inputs)
        except Exception as error:
            raise InputError("model", f"{type(model).__name__} did not run on {', '.join(inputs)}: {error}") from error
        return _calls.get()
    finally:
        for module in training:
            module.training = True
        _calls.reset(calls)
        undo.run()


def _run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Run a model or, if its head takes inputs of another form (multiple choice, T5's classifiers), its base."""
    try:
        model(**inputs)
    except Exception:
        if model.base_model is model:
            raise
        _calls.get().clear()
        model.base_model(**inputs)


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Build a small input. Encoder and decoder get different lengths, which identify cross-attention."""
    config, name = model.config, model.main_input_name
    token = 1 if getattr(config, "pad_token_id", None) == 0 else 0
    if name == "input_ids":
        inputs = {name: torch.full((1, 5), token, device=model.device)}
    else:
        inputs = {name: torch.zeros(1, *_example_shape(name, config), device=model.device, dtype=model.dtype)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.full((1, 3), token, device=model.device)
    return inputs


def _example_shape(name: str, config: Any) -> tuple[int, ...]:
    """Return the shape of a small image or sound, without the batch."""
    if name == "pixel_values":
        size = config.image_size
        return (config.num_channels, *(size if isinstance(size, list | tuple) else (size, size)))
    config = getattr(config, "encoder_config", config)
    bins = getattr(config, "num_mel_bins", None)
    if name == "input_values" and hasattr(config, "conv_stride"):
        samples = 5  # what convolutions make this number of
        for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
            samples = (samples - 1) * stride + kernel
        return (samples,)
    if name == "input_values" and bins and hasattr(config, "max_length"):
        return config.max_length, bins
    if name == "input_features" and bins and hasattr(config, "max_source_positions"):
        return bins, 2 * config.max_source_positions
    if name == "input_features":
        width = getattr(config, "feature_projection_input_dim", bins)
        if width is None and hasattr(config, "input_feat_per_channel"):
            width = config.input_feat_per_channel * config.input_channels
        if width is not None:
            return 40, width  # enough for convolutions that make one of eight
    raise InputError("model", f"expected one of text, images or sound of a known form, got one of {name}")


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


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, mask)
