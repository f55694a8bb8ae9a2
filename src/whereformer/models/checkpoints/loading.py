"""Loads a checkpoint's tensors into a model, and reports which were loaded, dropped and initialized."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from ...errors import InputError, printable

BODY = "encoder."
"""The prefix of the encoder's names in a model with a head."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors, by this library's names.

    Args:
        state: the tensors by their names in a model with a head, where the encoder's begin with ``BODY``.
        names: the checkpoint's names of these tensors, and of tensors that it lacks.
        unused: the checkpoint's names of its tensors without a counterpart.
    """

    state: Mapping[str, Tensor]
    names: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadingReport:
    """The tensors that a model took from a checkpoint, and the others; :func:`str` has a line for each field.

    Args:
        loaded: the model's tensors that come from the checkpoint, by the model's names.
        dropped: the checkpoint's tensors without a place in the model, by the checkpoint's names without the encoder's
            prefix; if several of them would be one tensor here, by this library's name.
        initialized: the model's tensors that are freshly drawn, by the model's names.
    """

    loaded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"loaded: {len(self.loaded)} tensors"]
        for part, names in (("dropped", self.dropped), ("initialized", self.initialized)):
            # A module's weight and bias, and the same module in several layers, are named once.
            modules = (re.sub(r"\.(weight|bias)$", "", name) for name in names)
            groups = dict.fromkeys(re.sub(r"\b(layers?)\.\d+\.", r"\1.*.", name) for name in modules)
            lines += [f"{part}: {printable(', '.join(groups))}"] if names else []
        return "\n".join(lines)


def load_into(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    fresh: Collection[str],
    needs_head: bool,
    is_relabeled: bool = False,
) -> LoadingReport:
    """Load a checkpoint into an encoder, or a model that has one; tensors that it lacks do not change.

    Args:
        model: the model, which is changed in place.
        checkpoint: the checkpoint to load.
        fresh: beginnings of the encoder's names that the checkpoint may lack.
        needs_head: whether the checkpoint must have the head, too.
        is_relabeled: whether the model has a different number of labels, so that the head's tensors with a row per
            label are fresh.

    Raises:
        ValueError: if a tensor is missing, has another shape or is not floating point; the message names it.
    """
    start = BODY if model.base_model is model else ""
    model_state = {start + name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    state = {name: tensor for name, tensor in checkpoint.state.items() if name in model_state}
    label_tensors = set()
    for name, tensor in state.items():
        shape = model_state[name].shape
        if shape != tensor.shape:
            if is_relabeled and not name.startswith(BODY) and shape[1:] == tensor.shape[1:]:
                label_tensors.add(name)
                continue
            raise shape_error(checkpoint.names.get(name, name), tensor.shape, shape)
        check_dtype(checkpoint.names.get(name, name), tensor)
    state = {name: tensor for name, tensor in state.items() if name not in label_tensors}
    # A tensor with two names, such as tied embeddings, needs to be in the checkpoint under only one of them.
    loaded_ids = {id(model_state[name]) for name in state}
    loaded = [name for name in model_state if id(model_state[name]) in loaded_ids]
    missing = [name for name in model_state if id(model_state[name]) not in loaded_ids]
    for name in missing:
        in_encoder = name.startswith(BODY)
        if not name.startswith(tuple(fresh)) if in_encoder else needs_head and name not in label_tensors:
            advice = "" if in_encoder else "; model_class=Encoder loads only the encoder"
            original_name = checkpoint.names.get(name, name)
            raise InputError("checkpoint", f"it has no {original_name!r}, which this model needs{advice}")
    model.load_state_dict({name.removeprefix(start): tensor for name, tensor in state.items()}, strict=False)
    model.tie_weights()
    dropped = [checkpoint.names.get(name, name) for name in checkpoint.state if name not in state]
    return LoadingReport(
        tuple(name.removeprefix(start) for name in loaded),
        (*dropped, *checkpoint.unused),
        tuple(name.removeprefix(start) for name in missing),
    )


def shape_error(name: str, shape: torch.Size, expected: torch.Size) -> InputError:
    """Return the error for a checkpoint's tensor whose shape is not the model's."""
    reason = f"expected {name!r} of shape {tuple(expected)}, got {tuple(shape)}; options may have changed a size"
    return InputError("checkpoint", reason)


def check_header(build: Callable[[], PreTrainedModel], header: Mapping[str, Tensor]) -> None:
    """Build a model without memory, and compare its shapes with a checkpoint's, by transformers' rules for names.

    ``header`` has the checkpoint's tensors on the meta device, by name.

    Raises:
        InputError: if a shape differs, or if the model has far more parameters, before all of them are built.
    """
    # A head that the checkpoint lacks has a few parameters. Some modules replace parameters while they are built.
    limit, thread, count = 1000 + 10 * len(header), get_ident(), itertools.count(1)

    def count_one(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if get_ident() == thread and next(count) > limit:
            reason = f"it has {len(header):,} tensors, but its config.json describes a model with more than {limit:,}"
            raise InputError("checkpoint", reason)

    handle = register_module_parameter_registration_hook(count_one)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    finally:
        handle.remove()
    prefix = f"{model.base_model_prefix}."
    bare = {name.removeprefix(prefix): tensor for name, tensor in header.items()}
    for name, expected in model.state_dict().items():
        tensor = bare.get(name.removeprefix(prefix), expected)
        if tensor.shape != expected.shape:
            raise shape_error(name, tensor.shape, expected.shape)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Check that a weight has a dtype that models compute with.

    Copying would lose the imaginary parts of complex numbers, and the scales of quantized numbers.

    Raises:
        InputError: if not; it names the tensor.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        reason = "expected floating-point numbers of 16 bits or more"
        raise InputError("checkpoint", f"{name!r} is {tensor.dtype}, {reason}")


MAX_WEIGHT = 1e10
"""No training makes larger weights. The products of such weights overflow in float32."""


def check_weights(weights: Mapping[str, Tensor]) -> None:
    """Check that weights are finite and not too large for a model to compute with.

    Raises:
        InputError: if not; it names the tensor.
    """
    for name, tensor in weights.items():
        if tensor.numel() == 0 or not tensor.is_floating_point():
            continue
        largest = float(tensor.abs().max())  # NaN if there is one
        if not largest <= MAX_WEIGHT:
            reason = f"as large as {largest:.3g}" if isfinite(largest) else "that are not finite"
            raise InputError("checkpoint", f"{name!r} has numbers {reason}; this checkpoint is broken")
