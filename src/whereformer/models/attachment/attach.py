"""``attach`` gives a transformers model a position method, and ``detach`` takes it away again."""

from __future__ import annotations

import inspect
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
from ..checks import OneDeviceModel, check_devices
from .builtin_positions import disable_positions, has_rotary, pass_bias_tables
from .caches import can_cache_rotated_keys
from .configs import separate_configs
from .find_calls import (
    AttentionCall,
    find_calls,
    group_by_stack,
    record_calls,
    set_implementation,
    submodels_with,
    text_separating_layers,
)
from .hooks import NAME, BeginForwardHook, EnterLayerHook, Undo
from .patched_forward import is_patched
from .patches import patch_layers
from .trial_run import submodels
from .verify import verify_same_outputs

_UNDO = "_whereformer_undo"


def attach(
    model: PreTrainedModel, position: str, *, keep_absolute: bool = True, verify: bool = True, **position_options: Any
) -> PreTrainedModel:
    """Give a transformers model a position method, in place; this library then computes its attention.

    Every self-attention layer gets the method's terms; a layer that runs several times (ALBERT) gets separate terms in
    each pass. Cross-attention has no positions and does not change. In a model with an encoder and a decoder, each gets
    its own method. Positions are 0 .. n - 1 in every row, whatever ``position_ids`` the model gets. In a causal model,
    ``position_ids`` that start again begin another text, as the guide describes.

    Relative positions that a model computes itself become tables over offsets instead of matrices, so ``attach(t5,
    "none")`` is the same model with less memory; the guide lists these models. Sliding windows (ModernBERT, Mistral,
    Gemma), soft caps (Gemma 2), sinks (GPT-OSS, Inkling 2) and grouped heads work as before, without matrices or
    copies. Masks other than padding stay matrices, and so do windows in compiled code. A query that may not attend to
    any key gets zeros; transformers averages all values.

    Args:
        model: any text or audio model that dispatches its attention through transformers' ``AttentionInterface``, or
            a model that the guide lists.
        position: a method that acts in attention, several joined by "+", or a pattern over layers such as
            "rope/rope/rope/none"; "none" adds nothing.
        keep_absolute: False switches the model's own positions off (absolute embeddings, rotary ones, T5's biases) and
            removes their parameters from the state dict.
        verify: whether to compare the model's results with its results under this library's attention first, on tiny
            batches. If they differ, the model is refused. If nothing can be compared, as where the model's own
            attention cannot run on this machine or computes NaN, a warning is logged and the model gets its method
            unverified. A copy of the model runs on tiny batches in any case, to find its calls of attention. Hooks that
            you registered do not run.
        position_options: the method's own options, and ``max_length`` for methods with a fixed number of positions; it
            is the model's ``max_position_embeddings`` by default. ``causal=False`` is for a causal model that gets
            masks that show later tokens.

    Returns:
        The model. Its configuration is now a copy, since other models may share the object; the copy's field
        ``whereformer`` records the arguments. The method is the submodule ``whereformer`` of each encoder or decoder in
        the model. Its parameters are freshly drawn in the model's dtype and on its device. They are part of the state
        dict, and ``save_pretrained`` writes them; :func:`load_attached` loads such a checkpoint.

    Raises:
        TypeError: if ``model`` is not a PreTrainedModel, or for an option that the method does not have.
        ValueError: for an unknown method, or one that does not act in attention; for a model that does not dispatch its
            attention and is not listed in the guide, already has a method, lies on several devices, or has positions
            that cannot be switched off; for "rope" where the model keeps its own rotation; for a model that gives
            different results with this library's attention. If attach raises an error, the model is unchanged.
    """
    return attach_with_settings(model, AttachSettings(position, keep_absolute, position_options), verify)


class AttachSettings(NamedTuple):
    """The arguments of :func:`attach`, which the model's configuration then records."""

    position: str
    keep_absolute: bool
    options: dict[str, Any]


def attach_with_settings(
    model: PreTrainedModel, settings: AttachSettings, verify: bool, max_values: int | None = None
) -> PreTrainedModel:
    """Attach a method, as :func:`attach` does, but with at most ``max_values`` in its tensors, as in a checkpoint.

    Raises:
        InputError: for ``path_or_id``, before memory is allocated, if the method has more values.
    """
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        if isinstance(model, str):
            kind = f"a name; AutoModel.from_pretrained({short_repr(model)}) of transformers loads the model"
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {kind}")
    if isinstance(model, OneDeviceModel):
        reason = (
            f"{type(model).__name__} is built with its method: set position={settings.position!r} in its configuration"
        )
        raise InputError("model", reason)
    if not isinstance(settings.position, str):
        raise TypeError(f"position: expected the name of a method, got {short_repr(settings.position)}")
    for name, choice in (("keep_absolute", settings.keep_absolute), ("verify", verify)):
        if not isinstance(choice, bool):
            raise InputError(name, f"expected True or False, got {short_repr(choice)}")
    if any(hasattr(part, NAME) for part in submodels(model)):
        raise InputError("model", "a position method is attached already; call whereformer.detach(model) first")
    check_devices(model)
    if any(part.config.output_attentions for part in submodels(model)):
        # transformers neither accepts it later nor saves a configuration with it, which would fail a training at its
        # end.
        reason = "only transformers' own 'eager' attention supports it there"
        advice = "set it to False and pass output_attentions=True in the call"
        raise InputError("config.output_attentions", f"{reason}; {advice}")
    calls = verify_same_outputs(model) if verify else find_calls(model)
    if not calls:
        loads = model.config.model_type in FAMILIES
        instead = "; whereformer.load_pretrained converts it to an encoder that accepts any method" if loads else ""
        if model.config.model_type == "longt5":
            window = f"T5's bias with window={model.config.local_radius}"
            advice = f"; its local attention is {window}, see the guide 'Coming from SDPA'"
            instead = advice if model.config.encoder_attention_type == "local" else "; global tokens are not supported"
        kind = type(model).__name__
        raise InputError("model", f"{kind} does not dispatch attention through AttentionInterface{instead}")
    undo: Undo = []
    try:
        separate_configs(model, undo)
        patch_layers(model, undo, submodels_with(model, calls))
        _apply_method(model, calls, settings, max_values, undo)
        set_implementation(model, calls, NAME, undo)
        model.config.whereformer = settings._asdict()
        undo.append(partial(delattr, model.config, NAME))
    except Exception:
        _undo_all(undo)
        raise
    setattr(model, _UNDO, undo)
    return model


def _apply_method(
    model: PreTrainedModel, calls: list[AttentionCall], settings: AttachSettings, max_values: int | None, undo: Undo
) -> None:
    """Hook a method into a model with these calls; each change appends its reversal to ``undo``, also before errors."""
    kind = type(model).__name__
    stacks = [(stack, _self_attention_calls(stack_calls)) for stack, stack_calls in group_by_stack(model, calls)]
    if not stacks:
        raise InputError("model", f"{kind} has no self-attention layer")
    position, keep_absolute = settings.position, settings.keep_absolute
    methods = [_build_method(stack, stack_calls, settings, max_values) for stack, stack_calls in stacks]
    alternative = "keep_absolute=True keeps them alongside the method's"
    if not keep_absolute and any(map(is_patched, model.modules())):
        raise InputError("keep_absolute", f"{kind} computes positions inside its attention; {alternative}")
    if not (keep_absolute or disable_positions(model, undo)):
        raise InputError("keep_absolute", f"{kind} has no positions that attach can switch off; {alternative}")
    if "rope" in component_names(position) and has_rotary(model):
        advice = "'none' keeps its rotation" + (", keep_absolute=False replaces it" if keep_absolute else "")
        reason = f"the model already rotates queries and keys, and {position!r} would rotate them again; {advice}"
        raise InputError("position", reason)
    separating = text_separating_layers(model, calls)
    for (stack, stack_calls), method in zip(stacks, methods, strict=True):
        _hook(stack, stack_calls, method, separating, undo)
    pass_bias_tables(dict.fromkeys(call.module for call in calls), undo)
    try:
        hooked_calls = [call for call in record_calls(model, calls) if call.received is not None]
    except InputError as error:
        if keep_absolute:
            raise
        raise InputError("keep_absolute", f"{kind} does not run without its positions; {alternative}") from error
    if len(hooked_calls) < sum(len(stack_calls) for _, stack_calls in stacks):
        raise InputError("model", f"{kind} does not pass keyword arguments on to its attention function")


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`attach` and remove the method's parameters; then every bit of the model is as before.

    It gets its old configuration back, with the changes that you made to the copy since.

    Raises:
        ValueError: if nothing is attached to it.
    """
    undo = getattr(model, _UNDO, None)
    if undo is None:
        raise InputError("model", f"no position method is attached to this {type(model).__name__}")
    _undo_all(undo)
    delattr(model, _UNDO)
    return model


def _undo_all(undo: Undo) -> None:
    """Reverse all changes, the last one first."""
    while undo:
        undo.pop()()


def _accepts_keywords(module: nn.Module) -> bool:
    """Whether the module's forward accepts arbitrary keyword arguments."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _self_attention_calls(calls: list[AttentionCall]) -> list[AttentionCall]:
    """Return the calls where tokens attend to each other, in layers that pass on the keyword arguments of a hook.

    Residuals that attend to earlier layers (Inkling 2) are excluded: they do not have one query per token.
    """
    token_calls = [call for call in calls if is_patched(call.module) or _accepts_keywords(call.module)]
    lengths, modules = {call.n_q for call in token_calls}, {call.module for call in token_calls}
    for call in calls:
        if call.module not in modules and (not lengths or call.n_q in lengths):
            kind = type(call.module).__name__
            raise InputError("model", f"{kind} does not pass keyword arguments on to its attention function")
    return token_calls


def _build_method(
    stack: PreTrainedModel, calls: list[AttentionCall], settings: AttachSettings, max_values: int | None
) -> PositionMethod:
    """Build the method of an encoder or decoder: the innermost PreTrainedModel around the layers with these calls."""
    name, options, config = settings.position, settings.options, stack.config
    kind = type(stack).__name__
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise InputError("model", f"{kind} needs one integer config.hidden_size for all its layers")
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
            raise InputError(option, f"the model fixes this at {sizes[option]}; leave the option out")
    build = partial(build_position, name, **{**sizes, **options})
    if max_values is not None:
        try:
            with torch.device("meta"):
                count = sum(tensor.numel() for tensor in build().state_dict().values())
        except RuntimeError as error:  # the number is too large for torch
            reason = f"its config.json describes a method that is too large to build: {error}"
            raise InputError("path_or_id", reason) from None
        if count > max_values:
            raise InputError("path_or_id", f"expected {count:,} values for {name!r}, got {max_values:,}")
    position = build()
    methods = position.components()
    if len({(call.num_heads, call.head_dim) for call in calls}) > 1 and not all(
        isinstance(method, NoPosition) for method in methods
    ):
        reason = f"the layers of {kind} differ in the number or width of heads; expected 'none', got {name!r}"
        raise InputError("position", reason)
    is_mixed = any(call.mask_decides_causality for call in calls)
    for method in methods:
        if is_mixed and method.scales_query:
            reason = f"{kind} is causal only with an attention_mask, but {type(method).__name__} is built either for"
            raise InputError("position", f"{reason} causal attention or for both sides; choose another method")
        if type(method).embed is not PositionMethod.embed:
            reason = f"{type(method).__name__} acts on the embeddings, which attach does not change"
            advice = "choose a method that acts in attention, such as t5, tisa, shaw, rope or alibi"
            raise InputError("position", f"{reason}; {advice}")
    if not position.uses_query_key:
        raise InputError("position", "it replaces query . key, so the model's query and key weights would go unused")
    return position


def _hook(
    stack: PreTrainedModel, calls: list[AttentionCall], position: PositionMethod, separating: set[nn.Module], undo: Undo
) -> None:
    """Give a stack its method as the submodule ``whereformer``, and hook it and its attention layers.

    ``separating`` holds the layers that keep texts apart by positions.
    """
    setattr(stack, NAME, position.to(stack.device, stack.dtype).train(stack.training))
    undo.append(partial(delattr, stack, NAME))
    layers: dict[nn.Module, list[int]] = {}
    for layer, call in enumerate(calls):
        layers.setdefault(call.module, []).append(layer)
    # Programs that run ``model.forward(...)`` skip the model's hooks, but not the hooks of the child with all layers.
    children = [child for child in stack.children() if _accepts_keywords(child) and {*layers} < {*child.modules()}]
    first_module = children[0] if children else stack
    checkpointed = [layer for layer in stack.modules() if isinstance(layer, GradientCheckpointingLayer)]
    separates_texts = not separating.isdisjoint(layers)
    for module in filter(_accepts_keywords, dict.fromkeys((stack, first_module))):
        names = tuple(inspect.signature(module.forward).parameters)
        begin = BeginForwardHook(stack, checkpointed, names, separates_texts, is_outer=module is not first_module)
        undo.append(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
    for module, numbers in layers.items():
        enter = EnterLayerHook(stack, tuple(numbers), len(layers) < len(calls), can_cache_rotated_keys(position))
        undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
