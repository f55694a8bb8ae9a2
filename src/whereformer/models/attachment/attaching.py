"""``attach`` gives a transformers model a position method, and ``detach`` takes it away again."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import InputError, short_repr
from ...positions import PositionMethod, build_position, component_names
from ...positions.none import NoPosition
from ..checkpoints.families import FAMILIES
from ..checks import check_devices
from .caches import can_cache_rotated_keys
from .configs import separate_configs
from .found import (
    AttentionCall,
    by_stack,
    find_calls,
    parts_with,
    record_calls,
    set_implementation,
    text_separating_layers,
)
from .hooks import NAME, Enter, Start, Undo
from .kinds import serve
from .own import rotates, serve_tables, switch_off
from .proof import prove as prove_same
from .served import is_served
from .trial import parts_of

_UNDO = "_whereformer_undo"


def attach(
    model: PreTrainedModel, position: str, *, keep_absolute: bool = True, prove: bool = True, **position_options: Any
) -> PreTrainedModel:
    """Give a transformers model a position method, in place; this library then computes its attention.

    Every self-attention layer gets the method's terms; a layer that runs several times (ALBERT) gets its own in each
    pass. Cross-attention has no positions and stays as it is. In a model with an encoder and a decoder, each gets its
    own method. Positions are 0 .. n - 1 in every row, whatever the model's own ``position_ids`` say. In a
    causal model, ``position_ids`` that begin again begin another text, which the guide describes.

    Relative positions that a model computes itself become tables over offsets instead of matrices, so ``attach(t5,
    "none")`` is the same model with less memory; the guide lists these models. Sliding windows (ModernBERT, Mistral,
    Gemma), soft caps (Gemma 2), sinks (GPT-OSS, Inkling 2) and grouped heads stay what they are, without matrices or
    copies. Other masks than padding stay matrices, and so do windows in compiled code. A query that may not attend to
    anything gets zeros; transformers averages all values.

    Args:
        model: any model of text or sound that dispatches its attention through transformers'
            ``AttentionInterface``, and those that the guide lists.
        position: a method that acts in attention, several joined by "+", or a pattern over layers such as
            "rope/rope/rope/none"; "none" adds nothing.
        keep_absolute: False switches the model's own positions off (absolute embeddings, rotary ones, T5's biases) and
            removes their parameters from the state dict.
        prove: whether the model first runs on a tiny batch, as it is and with this library's attention, and is refused
            if it computes something else. Hooks that you registered do not run.
        position_options: the method's own options, and ``max_length`` for methods with a fixed number of positions; it
            is the model's ``max_position_embeddings`` by default. ``causal=False`` is for a causal model that gets
            masks that show later tokens.

    Returns:
        The model. Its configuration is now a copy, since other models may share the object, and its ``whereformer``
        records what was attached. The parameters are freshly drawn in the model's
        dtype and on its device. They are part of its state dict, and ``save_pretrained`` writes them;
        :func:`load_attached` loads such a checkpoint.

    Raises:
        TypeError: if ``model`` is not a PreTrainedModel, or for an option that the method does not have.
        ValueError: for an unknown method, or one that does not act in attention; for a model that does not dispatch its
            attention and is not of a kind that the guide lists, already has a method, lies on several devices, or whose
            positions cannot be switched off; for "rope" where the model keeps a rotation of its own; for a model that
            computes something else when this library attends. A model that is refused is as it was.
    """
    return attach_wanted(model, Wanted(position, keep_absolute, position_options), prove)


class Wanted(NamedTuple):
    """What is to be attached: arguments of :func:`attach`, which the model's configuration then records."""

    position: str
    keep_absolute: bool
    options: dict[str, Any]


def attach_wanted(model: PreTrainedModel, wanted: Wanted, prove: bool, most: int | None = None) -> PreTrainedModel:
    """Do what :func:`attach` does; ``most`` is how many numbers the method may have, as in a checkpoint; None: any.

    Raises:
        InputError: for ``path_or_id``, before memory is taken, if the method has more numbers than it may.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    if not isinstance(wanted.position, str):
        raise TypeError(f"position: expected the name of a method, got {short_repr(wanted.position)}")
    for name, choice in (("keep_absolute", wanted.keep_absolute), ("prove", prove)):
        if not isinstance(choice, bool):
            raise InputError(name, f"expected True or False, got {short_repr(choice)}")
    if any(hasattr(part, NAME) for part in parts_of(model)):
        raise InputError("model", "a position method is attached already; call whereformer.detach(model) first")
    check_devices(model)
    if any(part.config.output_attentions for part in parts_of(model)):
        # transformers neither takes it later nor saves a configuration with it, which a training would find at its end.
        raise InputError(
            "config.output_attentions",
            "transformers has it with its own 'eager' attention only; set it to False, and give output_attentions=True "
            "in the call",
        )
    calls = prove_same(model) if prove else find_calls(model)
    if not calls:
        loads = model.config.model_type in FAMILIES
        instead = "; whereformer.load_pretrained makes an encoder of it that takes any method" if loads else ""
        kind = type(model).__name__
        raise InputError("model", f"{kind} does not dispatch attention through AttentionInterface{instead}")
    undo: Undo = []
    try:
        separate_configs(model, undo)
        serve(model, undo, parts_with(model, calls))
        _attach(model, calls, wanted, most, undo)
    except Exception:
        _take_back(undo)
        raise
    set_implementation(model, calls, NAME, undo)
    model.config.whereformer = wanted._asdict()
    undo.append(partial(delattr, model.config, NAME))
    setattr(model, _UNDO, undo)
    return model


def _attach(model: PreTrainedModel, calls: list[AttentionCall], wanted: Wanted, most: int | None, undo: Undo) -> None:
    """Do what :func:`attach` says to a model with these calls; ``undo`` gets what takes it back, as far as it got."""
    stacks = [(stack, _of_tokens(own)) for stack, own in by_stack(model, calls)]
    if not stacks:
        raise InputError("model", f"{type(model).__name__} has no layer in which tokens attend to one another alone")
    position, keep_absolute = wanted.position, wanted.keep_absolute
    methods = [_build(stack, own, wanted, most) for stack, own in stacks]
    beside = "True keeps those it has, beside the method's"
    if not keep_absolute and any(map(is_served, model.modules())):
        raise InputError("keep_absolute", f"{type(model).__name__} computes positions in its attention; {beside}")
    if not (keep_absolute or switch_off(model, undo)):
        kind = f"{type(model).__name__} has no positions of a kind that can be switched off"
        raise InputError("keep_absolute", f"{kind}; {beside}")
    if "rope" in component_names(position) and rotates(model):
        way = "'none' keeps its rotation" + (", keep_absolute=False replaces it" if keep_absolute else "")
        raise InputError("position", f"the model rotates queries and keys itself, and {position!r} would again; {way}")
    separating = text_separating_layers(model, calls)
    for (stack, own), method in zip(stacks, methods, strict=True):
        _hook(stack, own, method, separating, undo)
    serve_tables(dict.fromkeys(call.module for call in calls), undo)
    try:
        arrived = [call for call in record_calls(model, calls) if call.received is not None]
    except InputError as error:
        if keep_absolute:
            raise
        reason = f"{type(model).__name__} does not run without its own positions; {beside}"
        raise InputError("keep_absolute", reason) from error
    if len(arrived) < sum(len(own) for _, own in stacks):
        raise InputError("model", f"{type(model).__name__} does not hand keyword arguments to its attention function")


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`attach` and remove the method's parameters; the model is then bit for bit what it was.

    It gets its old configuration back. What you changed in the copy since is then changed there.

    Raises:
        ValueError: if nothing is attached to it.
    """
    undo = getattr(model, _UNDO, None)
    if undo is None:
        raise InputError("model", f"no position method is attached to this {type(model).__name__}")
    _take_back(undo)
    delattr(model, _UNDO)
    return model


def _take_back(undo: Undo) -> None:
    """Take everything back, the last change first."""
    while undo:
        undo.pop()()


def _takes_keywords(module: nn.Module) -> bool:
    """Whether the module's forward accepts arbitrary keyword arguments."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _takes_position(module: nn.Module) -> bool:
    """Whether what a hook passes to an attention layer arrives in its attention function."""
    return is_served(module) or _takes_keywords(module)


def _of_tokens(calls: list[AttentionCall]) -> list[AttentionCall]:
    """Return the calls in which tokens attend to one another.

    Residuals that attend to the layers before (Inkling 2) have another number of queries than there are tokens.
    """
    lengths = {call.n_q for call in calls if _takes_position(call.module)}
    own = [call for call in calls if _takes_position(call.module) or not lengths or call.n_q in lengths]
    for call in own:
        if not _takes_position(call.module):
            kind = type(call.module).__name__
            raise InputError("model", f"{kind} does not hand keyword arguments to its attention function")
    return own


def _build(stack: PreTrainedModel, calls: list[AttentionCall], wanted: Wanted, most: int | None) -> PositionMethod:
    """Build the method of an encoder or decoder: the innermost PreTrainedModel around the layers with these calls."""
    name, options, config = wanted.position, wanted.options, stack.config
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise InputError("model", f"{type(stack).__name__} has no one hidden_size for all its layers")
    modules = list(dict.fromkeys(call.module for call in calls))
    sizes = {
        **dict.fromkeys(("hidden_size", "embedding_size"), config.hidden_size),
        "num_heads": calls[0].num_heads,
        "head_dim": calls[0].head_dim,
        "num_layers": len(calls),
        "max_length": getattr(config, "max_position_embeddings", None) or max(512, calls[0].n_q),
        "causal": all(call.causal for call in calls),
        "initializer_range": getattr(config, "initializer_range", None) or 0.02,
        "layer_of_pass": [modules.index(call.module) for call in calls],
    }
    for option in sizes.keys() & options.keys() - {"max_length", "initializer_range"}:
        if option != "causal" or options[option] is not False:
            raise InputError(option, f"the model decides on it, and has {sizes[option]}; leave it out")
    build = partial(build_position, name, **{**sizes, **options})
    if most is not None:
        try:
            with torch.device("meta"):
                count = sum(tensor.numel() for tensor in build().state_dict().values())
        except RuntimeError as error:  # torch cannot count so far
            raise InputError("path_or_id", f"its config.json asks for too much: {error}") from None
        if count > most:
            raise InputError("path_or_id", f"the checkpoint has {most:,} numbers of {name!r}, expected {count:,}")
    position = build()
    methods = position.components()
    if len({(call.num_heads, call.head_dim) for call in calls}) > 1 and not all(
        isinstance(method, NoPosition) for method in methods
    ):
        told = f"the layers of {type(stack).__name__} differ in their heads; expected 'none', got {name!r}"
        raise InputError("position", told)
    mixed = any(call.mixed for call in calls)
    for method in methods:
        if mixed and method.scales_query:
            reason = (
                f"{type(stack).__name__} is causal only with an attention_mask, and {type(method).__name__} is built"
            )
            raise InputError("position", f"{reason} for one of both; choose another method")
        if type(method).embed is not PositionMethod.embed:
            raise InputError(
                "position",
                f"{type(method).__name__} acts on the embeddings, which attach leaves as they are; "
                "choose a method that acts in attention, as t5, tisa, shaw, rope or alibi",
            )
    if not position.uses_query_key:
        raise InputError("position", "it replaces query . key, whose weights would be left without use")
    return position


def _beginning(stack: PreTrainedModel, layers: Collection[nn.Module]) -> nn.Module:
    """Return the module whose call begins a forward: the child that has all the layers, or else the stack itself.

    Programs that run ``model.forward(...)`` skip the hooks of a model, but not those of the modules inside.
    """
    children = [child for child in stack.children() if _takes_keywords(child) and {*layers} < {*child.modules()}]
    return children[0] if children else stack


def _hook(
    stack: PreTrainedModel, calls: list[AttentionCall], position: PositionMethod, separating: set[nn.Module], undo: Undo
) -> None:
    """Give a stack its method as the submodule ``whereformer``, and hook it and its attention layers.

    ``separating`` are the layers that keep texts apart by positions.
    """
    setattr(stack, NAME, position.to(stack.device, stack.dtype).train(stack.training))
    undo.append(partial(delattr, stack, NAME))
    layers: dict[nn.Module, list[int]] = {}
    for layer, call in enumerate(calls):
        layers.setdefault(call.module, []).append(layer)
    begins = _beginning(stack, layers)
    checkpointed = [part for part in stack.modules() if isinstance(part, GradientCheckpointingLayer)]
    for module in filter(_takes_keywords, dict.fromkeys((stack, begins))):
        names = tuple(inspect.signature(module.forward).parameters)
        start = Start(stack, checkpointed, names, not separating.isdisjoint(layers), around=module is not begins)
        undo.append(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    for module, own in layers.items():
        enter = Enter(stack, tuple(own), len(layers) < len(calls), can_cache_rotated_keys(position))
        undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
