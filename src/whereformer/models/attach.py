"""Position methods for transformers' own models: whatever dispatches its attention takes any that acts in attention."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from ..kernels import DenseBias, OffsetBias, Positions, Term, attention, attention_weights
from ..positions import Place, Position, Sum, build_position
from .checkpoints.pretrained import read_weights

Undo = list[Callable[[], None]]
"""What takes back what was done, in the order in which it was done."""

NAME = "whereformer"
"""The attention implementation, each stack's position method and the field of the config are all called so."""

_PROBE = "whereformer_probe"
_UNDO = "_whereformer_undo"


def attach(
    model: PreTrainedModel, position: str, *, keep_absolute: bool = True, **position_options: Any
) -> PreTrainedModel:
    """Give a transformers model a position method, in place; its attention then goes through this library's.

    Every self-attention layer has the method's terms, a layer that runs several times (ALBERT) in each pass its own.
    Cross-attention has no positions and stays as it is. A model with an encoder and a decoder has a method for each.
    Positions are 0 .. n - 1 in every row, whatever the model's own ``position_ids`` say.

    T5's own relative biases are given as a table over offsets instead of a matrix, so ``attach(t5, "none")`` is the
    same model with less memory. Masks that are no padding, as ModernBERT's windows, stay matrices. A query that may
    attend to nothing gets zeros, where transformers averages all values.

    Args:
        model: any that dispatches its attention through transformers' ``AttentionInterface``, of text or of images.
        position: a method that acts in attention, or several joined by "+"; "none" adds nothing.
        keep_absolute: False switches the model's own positions off: absolute embeddings, rotary ones, T5's biases.
            Their parameters are then not in the state dict.
        position_options: the method's own, and ``max_length`` for methods with a fixed number of positions; by default
            the model's ``max_position_embeddings``.

    Returns:
        The model. ``config.whereformer`` says what was attached; the parameters, freshly drawn in the model's dtype and
        on its device, are in its state dict, and in what ``save_pretrained`` writes. :func:`load_attached` loads that.

    Raises:
        TypeError: if ``model`` is no PreTrainedModel, or for an option that the method does not have.
        ValueError: for an unknown method or one that does not act in attention, a model that does not dispatch, one
            that has a method already, or one whose positions can't be switched off.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    if not isinstance(position, str):
        raise TypeError(f"position: expected the name of a method, got {type(position).__name__}")
    if any(hasattr(module, NAME) for module in model.modules() if isinstance(module, PreTrainedModel)):
        raise ValueError("model: a position method is attached already; call whereformer.detach(model) first")
    calls = _record(model)
    if not calls:
        raise ValueError(f"model: {type(model).__name__} does not dispatch attention through AttentionInterface")
    parts = [part.strip() for part in position.split("+")]
    if keep_absolute and "t5" in parts and any(_own_table(call.module) for call in calls):
        raise ValueError(
            "position: the model has T5's biases of its own; 'none' keeps them, keep_absolute=False draws new ones"
        )
    stacks = [_Stack(model, stack, own, position, position_options) for stack, own in _by_stack(model, calls)]
    switches = [] if keep_absolute else _switches(model)
    if not (keep_absolute or switches):
        raise ValueError(f"keep_absolute: {type(model).__name__} has no positions of a kind that can be switched off")

    undo: Undo = []
    try:
        for switch in switches:
            switch(undo)
        for stack in stacks:
            stack.attach(undo)
        for module in {id(call.module): call.module for call in calls}.values():
            if _takes_bias(module):
                hook = module.register_forward_pre_hook(_OwnBias(module), with_kwargs=True)
                undo.append(hook.remove)
        arrived = [call for call in _record(model) if call.received is not None]
        if len(arrived) < sum(len(stack.calls) for stack in stacks):
            raise ValueError(f"model: {type(model).__name__} does not hand keyword arguments to its attention function")
    except Exception:
        for action in reversed(undo):
            action()
        raise
    undo += _set_implementation(model, NAME)
    model.config.whereformer = {
        "position": position,
        "keep_absolute": keep_absolute,
        "options": position_options,
    }
    undo.append(partial(delattr, model.config, NAME))
    setattr(model, _UNDO, undo)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Take away what :func:`attach` gave, parameters included: the model is again what it was, to the bit.

    Raises:
        TypeError: if ``model`` is no PreTrainedModel.
        ValueError: if nothing is attached to it.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    undo = vars(model).get(_UNDO)
    if undo is None:
        raise ValueError(f"model: no position method is attached to this {type(model).__name__}")
    for action in reversed(undo):
        action()
    delattr(model, _UNDO)
    return model


def load_attached(path_or_id: str | Path, model_class: Any, **options: Any) -> PreTrainedModel:
    """A model that was saved with a position method attached.

    transformers' own ``from_pretrained`` does not know the method: it reports its parameters as unexpected and loads
    the model without. Positions of the model's own that were off are not in the checkpoint: detached, it has untrained
    ones.

    Args:
        path_or_id: a folder that ``save_pretrained`` wrote, or an id on the Hugging Face Hub.
        model_class: a class of transformers, or an auto class as ``AutoModelForMaskedLM``.
        options: of ``from_pretrained``.

    Raises:
        ValueError: if nothing was attached when the model was saved, or a parameter of the method is missing.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report would list what is put in place below
    try:
        model, found = model_class.from_pretrained(path_or_id, output_loading_info=True, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
    settings = getattr(model.config, NAME, None)
    if settings is None:
        raise ValueError(f"path_or_id: nothing was attached to the model in {path_or_id}; use from_pretrained")
    attach(model, settings["position"], keep_absolute=settings["keep_absolute"], **settings["options"])
    hub = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    hub_options = {name: options[name] for name in hub if name in options}
    saved = read_weights(path_or_id, part=f"{NAME}.", **hub_options)
    # The base model's own checkpoint and that of the base model with a head differ by a prefix.
    prefix = f"{model.base_model_prefix}."
    saved = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if f"{NAME}." in name:
                found_here = saved.get(name.removeprefix(prefix))
                if found_here is None or found_here.shape != tensor.shape:
                    shape = tuple(tensor.shape)
                    raise ValueError(f"path_or_id: the checkpoint has no {name!r} of shape {shape}")
                tensor.copy_(found_here)
    if fresh := sorted(name for name in found["missing_keys"] if name in state):
        logging.getLogger(__name__).warning("not in the checkpoint, so freshly drawn: %s", ", ".join(fresh))
    return model


# What is found out about a model: the calls of its attention in one forward.


@dataclass(frozen=True)
class _Call:
    """One call of the attention function in the order of a forward."""

    module: nn.Module
    n_q: int
    n_k: int
    num_heads: int
    head_dim: int
    received: _LayerInput | None


_calls: ContextVar[list[_Call]] = ContextVar("calls")


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    whereformer: _LayerInput | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function that notes who calls it; its output has the right shape."""
    _check_options(options)
    batch, num_heads, n_q, head_dim = query.shape
    _calls.get().append(_Call(module, n_q, key.shape[2], num_heads, head_dim, whereformer))
    return value.new_zeros(batch, n_q, num_heads, value.shape[3]), None


@torch.no_grad()
def _record(model: PreTrainedModel) -> list[_Call]:
    """The attention calls of one small forward; none if the model does not dispatch them."""
    if not model._can_set_attn_implementation():
        return []
    training = [module for module in model.modules() if module.training]
    restore = _set_implementation(model, _PROBE)
    calls = _calls.set([])
    model.eval()
    try:
        inputs = _example(model)
        try:
            model(**inputs)
        except Exception as error:
            raise ValueError(f"model: {type(model).__name__} did not run on {', '.join(inputs)}: {error}") from error
        return _calls.get()
    finally:
        for module in training:
            module.training = True
        _calls.reset(calls)
        for action in restore:
            action()


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """The smallest input; lengths differ between encoder and decoder, which tells cross-attention apart."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (1, config.num_channels, height, width)
        return {"pixel_values": torch.zeros(shape, device=model.device, dtype=model.dtype)}
    if model.main_input_name != "input_ids":
        raise ValueError(f"model: expected one of text or images, got one of {model.main_input_name}")
    token = 1 if getattr(config, "pad_token_id", None) == 0 else 0
    inputs = {"input_ids": torch.full((1, 5), token, device=model.device)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.full((1, 3), token, device=model.device)
    return inputs


def _set_implementation(model: PreTrainedModel, name: str) -> Undo:
    """Switch the attention implementation; returns what switches it back."""
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    # The internal field, because the public one also sets configs inside this one.
    field = "_attn_implementation_internal"
    restore: Undo = [partial(setattr, config, field, getattr(config, field)) for config in configs.values()]
    model.set_attn_implementation(name)
    return restore


def _by_stack(model: PreTrainedModel, calls: list[_Call]) -> list[tuple[PreTrainedModel, list[_Call]]]:
    """Self-attention calls by the innermost PreTrainedModel they are in: an encoder, a decoder."""
    owner: dict[int, PreTrainedModel] = {}

    def visit(module: nn.Module, stack: PreTrainedModel) -> None:
        stack = module if isinstance(module, PreTrainedModel) else stack
        owner[id(module)] = stack
        for child in module.children():
            visit(child, stack)

    visit(model, model)
    stacks: dict[int, tuple[PreTrainedModel, list[_Call]]] = {}
    for call in calls:
        if call.n_q == call.n_k:
            stack = owner[id(call.module)]
            stacks.setdefault(id(stack), (stack, []))[1].append(call)
    return list(stacks.values())


# What is put into a model. Everything travels as keyword arguments of one forward, so that nothing is kept between
# forwards, and a layer that is run again for its gradient sees what it saw before.


class _Forward:
    """One forward of a stack: its method, what the method shares, and how many layers ran."""

    def __init__(self, position: Position, share: bool) -> None:
        self.position = position
        self.share = share
        self.calls = 0
        self.kept: tuple[Any, ...] | None = None

    def shared(self, query_positions: Positions, key_positions: Positions) -> Any:
        """What the method computes once for all layers, made when the first asks."""
        # Reentrant checkpointing runs layers first without gradients and later again with them.
        wanted = (query_positions, key_positions, torch.is_grad_enabled())
        if self.kept is not None and self.kept[:-1] == wanted:
            return self.kept[-1]
        if self.kept is not None:
            return self.position.shared_elsewhere(self.kept[-1], query_positions, key_positions)
        shared = self.position.shared(query_positions, key_positions)
        if self.share:
            self.kept = (*wanted, shared)
        return shared


@dataclass(frozen=True)
class _LayerInput:
    """What a self-attention layer's call gets: which layer it is, and its input (batch, n, hidden_size)."""

    forward: _Forward
    layer: int
    hidden: Tensor


class _Start:
    """Before a stack runs: begin a :class:`_Forward`."""

    def __init__(self, layers: list[GradientCheckpointingLayer]) -> None:
        self.layers = layers

    def __call__(
        self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A checkpointed layer must not find something that another made: run again alone, it could not make it.
        share = not (stack.training and any(layer.gradient_checkpointing for layer in self.layers))
        return args, {**kwargs, "whereformer_forward": _Forward(getattr(stack, NAME), share)}


class _Enter:
    """Before a self-attention layer runs: say which one it is."""

    def __init__(self, layers: tuple[int, ...], counted: bool) -> None:
        self.layers = layers
        self.counted = counted

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        forward = kwargs.get("whereformer_forward")
        if forward is None:
            raise RuntimeError(f"whereformer: {type(module).__name__} ran outside of the model it was attached to")
        if module.config._attn_implementation not in (NAME, _PROBE):
            # Another attention function would leave positions out without a word.
            raise RuntimeError(
                f"attn_implementation: a position method is attached, so it must be {NAME!r}, "
                f"got {module.config._attn_implementation!r}; set it back or call whereformer.detach(model)"
            )
        layer = self.layers[0]
        if self.counted:
            # Layers that run several times are told apart by how many ran before.
            layer = forward.calls
            forward.calls += 1
            if layer not in self.layers:
                raise RuntimeError("whereformer: layers that share weights ran in another order than when attached")
        hidden = args[0] if args else kwargs["hidden_states"]
        return args, {**kwargs, "whereformer": _LayerInput(forward, layer, hidden)}


def _takes_any(module: nn.Module) -> bool:
    """Whether a forward takes any keyword argument."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


class _Stack:
    """One encoder or decoder of a model, and the method it will have."""

    def __init__(
        self, model: PreTrainedModel, stack: PreTrainedModel, calls: list[_Call], name: str, options: dict[str, Any]
    ) -> None:
        self.stack = stack
        self.calls = calls
        config = stack.config
        if not (_takes_any(stack) and all(_takes_any(call.module) for call in calls)):
            raise ValueError(f"model: {type(stack).__name__} does not hand keyword arguments to its attention function")
        if len({(call.num_heads, call.head_dim) for call in calls}) > 1:
            raise ValueError(f"model: the layers of {type(stack).__name__} differ in their heads")
        modules = list({id(call.module): call.module for call in calls}.values())
        sizes = {
            "hidden_size": config.hidden_size,
            "num_heads": calls[0].num_heads,
            "head_dim": calls[0].head_dim,
            "num_layers": len(calls),
            "max_length": getattr(config, "max_position_embeddings", None) or max(512, calls[0].n_q),
            "causal": all(_is_causal(module) for module in modules),
            "initializer_range": getattr(config, "initializer_range", None) or 0.02,
            "passes": [next(i for i, module in enumerate(modules) if module is call.module) for call in calls],
        }
        self.position = build_position(name, **{**sizes, **options})
        for part in self.position if isinstance(self.position, Sum) else [self.position]:
            if type(part).embed is not Position.embed:
                raise ValueError(
                    f"position: {type(part).__name__} acts on the embeddings, which attach leaves as they are; "
                    "choose a method that acts in attention, as t5, tisa, shaw, rope or alibi"
                )
        if not self.position.content:
            raise ValueError("position: it replaces query . key, whose weights would be left without use")

    def attach(self, undo: Undo) -> None:
        stack = self.stack
        self.position.to(stack.device, stack.dtype).train(stack.training)
        setattr(stack, NAME, self.position)
        undo.append(partial(delattr, stack, NAME))
        layers: dict[int, list[int]] = {}
        for layer, call in enumerate(self.calls):
            layers.setdefault(id(call.module), []).append(layer)
        counted = len(layers) < len(self.calls)
        start = _Start([part for part in stack.modules() if isinstance(part, GradientCheckpointingLayer)])
        undo.append(stack.register_forward_pre_hook(start, with_kwargs=True).remove)
        for call in self.calls:
            if (own := layers.pop(id(call.module), None)) is not None:
                enter = _Enter(tuple(own), counted)
                undo.append(call.module.register_forward_pre_hook(enter, with_kwargs=True).remove)


# T5's own biases.


def _takes_bias(module: nn.Module) -> bool:
    """Whether a layer takes T5's biases as an argument, and hands them on."""
    return hasattr(module, "relative_attention_num_buckets") and (
        "position_bias" in inspect.signature(type(module).forward).parameters
    )


def _own_table(module: nn.Module) -> bool:
    return getattr(module, "has_relative_attention_bias", False)


class _OwnBias:
    """Before a T5 attention layer runs: the biases as a table over offsets, where it would make a matrix."""

    def __init__(self, module: Any) -> None:
        furthest = module.relative_attention_max_distance
        buckets = module._relative_position_bucket(
            torch.arange(-furthest, furthest + 1),
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=furthest,
        ).tolist()
        self.first = -furthest
        self.buckets = tuple(buckets)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bias = kwargs.get("position_bias")
        if bias is None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if _own_table(module) and module.relative_attention_bias is not None:
                rows = module.relative_attention_bias(torch.tensor(self.buckets, device=hidden.device))
                bias = rows.mT[None, :, None]  # (1, heads, 1, offsets)
            else:
                bias = hidden.new_zeros(1, module.n_heads, 1, 1)
        return args, {**kwargs, "position_bias": bias, "whereformer_first": self.first}


# The model's own positions.


class _NoEmbedding(nn.Module):
    """Adds nothing, whatever the position."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class _NoRotation(nn.Module):
    """Turns nothing, whatever the position: cosine 1 and sine 0."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return hidden.new_ones(1, 1, 1), hidden.new_zeros(1, 1, 1)


def _switches(model: PreTrainedModel) -> list[Callable[[Undo], None]]:
    """What switches the model's own positions off, each given the list of what undoes it."""
    switches: list[Callable[[Undo], None]] = []
    for module in model.modules():
        for name in ("position_embeddings", "wpe"):
            own = getattr(module, name, None)
            if isinstance(own, nn.Embedding):
                switches.append(partial(_replace, model, module, name, _NoEmbedding()))
                if "token_type_ids" in module._buffers:
                    # As long as the table of positions; without it types are zeros for any length.
                    switches.append(partial(_replace, model, module, "token_type_ids", None))
            elif isinstance(own, nn.Parameter):
                switches.append(partial(_replace, model, module, name, torch.zeros_like(own)))
        if isinstance(getattr(module, "rotary_emb", None), nn.Module):
            switches.append(partial(_replace, model, module, "rotary_emb", _NoRotation()))
        if _own_table(module) and _takes_bias(module):
            switches.append(partial(_replace, model, module, "relative_attention_bias", None))
    return switches


def _replace(model: PreTrainedModel, owner: nn.Module, name: str, by: nn.Module | Tensor | None, undo: Undo) -> None:
    """Put something else under a name; a tensor becomes a buffer that is not saved, None takes a buffer away."""
    own = getattr(owner, name)
    undo.append(partial(_put_back, model, owner, name, own))
    if isinstance(own, nn.Module):
        setattr(owner, name, by)
        return
    delattr(owner, name)
    if isinstance(by, Tensor):
        owner.register_buffer(name, by, persistent=False)


def _put_back(model: PreTrainedModel, owner: nn.Module, name: str, own: nn.Module | Tensor) -> None:
    # The model may have moved since.
    if isinstance(own, nn.Module):
        own.to(model.device)
        for parameter in own.parameters():
            parameter.data = parameter.data.to(model.dtype)
        setattr(owner, name, own)
        return
    if hasattr(owner, name):
        delattr(owner, name)
    if isinstance(own, nn.Parameter):
        own.data = own.data.to(model.device, model.dtype)
        owner.register_parameter(name, own)
    else:
        owner.register_buffer(name, own.to(model.device), persistent=False)


# What transformers calls.


def _is_causal(module: nn.Module, is_causal: bool | None = None) -> bool:
    """As transformers decides: what the call says, else what the layer says."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    whereformer: _LayerInput | None = None,
    whereformer_first: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers, from (batch, heads, n_q, head_dim) to (batch, n_q, heads, head_dim)."""
    _check_options(kwargs)
    num_heads, n_q, n_k = query.shape[1], query.shape[2], key.shape[2]
    if key.shape[1] != num_heads:
        groups = num_heads // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    terms: list[Term] = []
    if whereformer is not None:
        position = whereformer.forward.position
        keys = Positions(0, 1, n_k)
        # A cache holds the keys before: queries are the last.
        queries = keys if n_q == n_k else Positions(n_k - n_q, 1, n_q)
        place = Place(queries, keys, whereformer.layer, whereformer.forward.shared(queries, keys))
        terms += position.terms(whereformer.hidden, place)
        terms += position.query_terms(query, place)
        query, key, value = position.rotate(query, key, value, place)
    if position_bias is not None and whereformer_first is not None:
        if position_bias.shape[3] > 1:  # else the layer has none
            terms.append(OffsetBias(position_bias[0, :, 0], whereformer_first))
    elif position_bias is not None:
        terms.append(DenseBias(position_bias))
    causal, key_mask = _is_causal(module, is_causal), None
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1):
            key_mask = attention_mask[:, 0, 0].expand(len(query), n_k)
        else:
            # One number or answer for every pair, and what is causal is in it.
            causal = False
            terms.append(_mask_term(attention_mask, query, n_k))
    options: dict[str, Any] = {"key_mask": key_mask, "causal": causal, "scale": scaling}
    out = attention(query, key, value, terms, dropout_p=dropout, **options)
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    weights = attention_weights(query, key, value, terms, **options) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def _check_options(options: dict[str, Any]) -> None:
    """Raise for what some models' attention does to the scores besides."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: whereformer's attention has none, got {options[name]!r}")


def _mask_term(mask: Tensor, query: Tensor, n_k: int) -> DenseBias:
    """A mask (1 or batch, 1 or heads, n_q, n_k), bool or added to scores, as a term."""
    if mask.dim() != 4:
        raise ValueError(f"attention_mask: expected (batch, 1, n_q, n_k), got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return DenseBias(mask.expand(-1, query.shape[1], query.shape[2], n_k))


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """A mask function of transformers: (batch, 1, 1, n_k) where padding is all there is, else (batch, 1, n_q, n_k).

    What is causal is left to the attention function, which so needs no matrix for it.
    """
    if isinstance(q_offset, Tensor):
        raise ValueError("past_key_values: whereformer's attention needs a cache that grows, got a static one")
    if mask_function not in (bidirectional_mask_function, causal_mask_function):
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        return sdpa_mask(*sizes, mask_function, attention_mask, **options)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length]
    # A mask that masks nothing costs time; only on the CPU does looking cost none.
    if padding.device.type == "cpu" and not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding[:, None, None]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
AttentionInterface.register(_PROBE, _probe)
