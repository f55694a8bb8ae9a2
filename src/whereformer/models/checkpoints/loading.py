"""Loads a checkpoint's tensors into a model, and reports which were kept, dropped and initialized."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from ...errors import InputError
from ..loading_report import LoadingReport

BODY = "encoder."
"""The prefix of the encoder's names in a model with a head."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors, by this library's names.

    Args:
        state: the tensors by their names in a model with a head, so that the encoder's begin with ``BODY``.
        names: the checkpoint's own names for them, including tensors that it should have and does not.
        unused: the checkpoint's names of its tensors without a counterpart.
    """

    state: Mapping[str, Tensor]
    names: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def fill(
    model: PreTrainedModel, checkpoint: Checkpoint, *, fresh: Collection[str], whole: bool, relabeled: bool = False
) -> LoadingReport:
    """Load a checkpoint into an encoder, or a model that has one; tensors that it lacks stay as they are.

    Args:
        model: the model, which is changed in place.
        checkpoint: the checkpoint to load.
        fresh: beginnings of the encoder's names that the checkpoint may lack.
        whole: whether the checkpoint must have the head too.
        relabeled: whether the model has another number of labels, so that the head's tensors with a row per label are
            fresh.

    Raises:
        ValueError: if a tensor is missing, has another shape or is not floating point; the message names it.
    """
    start = BODY if model.base_model is model else ""
    own = {start + name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    state = {name: tensor for name, tensor in checkpoint.state.items() if name in own}
    of_labels = set()
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            if relabeled and not name.startswith(BODY) and own[name].shape[1:] == tensor.shape[1:]:
                of_labels.add(name)
                continue
            raise misfit(checkpoint.names.get(name, name), tensor.shape, own[name].shape)
        check_dtype(checkpoint.names.get(name, name), tensor)
    state = {name: tensor for name, tensor in state.items() if name not in of_labels}
    # A tensor with two names, such as tied embeddings, needs to be there under only one of them.
    given = {id(own[name]) for name in state}
    kept = [name for name in own if id(own[name]) in given]
    missing = [name for name in own if id(own[name]) not in given]
    for name in missing:
        needed = not name.startswith(tuple(fresh)) if name.startswith(BODY) else whole and name not in of_labels
        if needed:
            part = "" if name.startswith(BODY) else "; model_class=Encoder loads the encoder alone"
            raise InputError(
                "checkpoint", f"it has no {checkpoint.names.get(name, name)!r}, which this model needs{part}"
            )
    model.load_state_dict({name.removeprefix(start): tensor for name, tensor in state.items()}, strict=False)
    model.tie_weights()
    dropped = [checkpoint.names.get(name, name) for name in checkpoint.state if name not in state]
    return LoadingReport(
        tuple(name.removeprefix(start) for name in kept),
        (*dropped, *checkpoint.unused),
        tuple(name.removeprefix(start) for name in missing),
    )


def misfit(name: str, found: torch.Size, own: torch.Size) -> InputError:
    """Return the error for a checkpoint's tensor of another shape than the model's."""
    said = f"{name!r} has shape {tuple(found)}, this model {tuple(own)}; options may have changed a size"
    return InputError("checkpoint", said)


def check_header(build: Callable[[], PreTrainedModel], header: Mapping[str, Tensor]) -> None:
    """Build a model without memory, and compare its shapes with a checkpoint's, by transformers' rules for names.

    Args:
        build: builds the model.
        header: the checkpoint's tensors on the meta device, by name.

    Raises:
        InputError: if one has another shape, or the model has far more parameters, before all of them are built.
    """
    # A head that the checkpoint lacks has a few. Some modules replace parameters while they are built.
    limit, thread, count = 1000 + 10 * len(header), get_ident(), itertools.count(1)

    def count_one(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if get_ident() == thread and next(count) > limit:
            reason = f"it has {len(header):,} tensors, and its config.json describes a model of more than {limit:,}"
            raise InputError("checkpoint", reason)

    handle = register_module_parameter_registration_hook(count_one)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    finally:
        handle.remove()
    prefix = f"{model.base_model_prefix}."
    bare = {name.removeprefix(prefix): tensor for name, tensor in header.items()}
    for name, own in model.state_dict().items():
        found = bare.get(name.removeprefix(prefix), own)
        if found.shape != own.shape:
            raise misfit(name, found.shape, own.shape)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Check that a weight is in numbers that a model computes with.

    A copy would lose the imaginary parts of complex numbers and the scales of quantized ones.

    Raises:
        InputError: if not; it names the tensor.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        reason = "expected floating-point numbers of 16 bits or more"
        raise InputError("checkpoint", f"{name!r} is {tensor.dtype}, {reason}")


LARGEST = 1e10
"""No training makes larger weights than this. Their products are no longer numbers in float32."""


def check_weights(weights: Mapping[str, Tensor]) -> None:
    """Check that weights are numbers that a model can compute with.

    Raises:
        InputError: if some are not finite, or too large; it names the tensor.
    """
    for name, tensor in weights.items():
        if tensor.numel() == 0 or not tensor.is_floating_point():
            continue
        largest = float(tensor.abs().max())  # NaN if there is one
        if not largest <= LARGEST:
            what = f"as large as {largest:.3g}" if isfinite(largest) else "that are not finite"
            raise InputError("checkpoint", f"{name!r} has numbers {what}; this checkpoint is broken")
