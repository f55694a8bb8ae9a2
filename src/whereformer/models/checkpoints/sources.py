"""Reads from a checkpoint's config.json which of our models it is, and how to read its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import InputError, one_line
from ..config import EncoderConfig
from ..electra import ElectraPretrainingConfig, discriminator_fields
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import EncoderForCausalLM, EncoderForPreTraining
from .bert import bert_config, from_bert
from .families import FAMILIES
from .loading import BODY, Checkpoint

OURS = (EncoderConfig.model_type, ElectraPretrainingConfig.model_type)


class CheckpointSource(NamedTuple):
    """What a checkpoint is: our class, the fields of its configuration, and how to read the tensors."""

    built_as: type[EncoderPreTrainedModel]
    fields: Mapping[str, Any]
    translate: Callable[[Mapping[str, Tensor]], Checkpoint]


@contextmanager
def read_as_a_model() -> Iterator[None]:
    """Turn what goes wrong with an untrusted config.json, where anything can stand anywhere, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise InputError("path_or_id", f"its config.json describes no model ({reason})") from error


@read_as_a_model()
def source_of(found: Mapping[str, Any], layout: Mapping[str, Any]) -> CheckpointSource:
    """Return how to read a checkpoint, given the contents of its config.json and the model's fields of other layers.

    Raises:
        InputError: if it is of another kind, or its configuration fits no model.
    """
    kind = found.get("model_type")
    if kind in OURS:
        return _of_ours(found)
    if found.get("whereformer"):
        told = "expected a model without an attached position method, got one with it; whereformer.load_attached reads"
        raise InputError("path_or_id", f"{told} such models")
    if kind not in FAMILIES:
        kinds = ", ".join((*OURS, *FAMILIES))
        raise InputError("path_or_id", f"expected a checkpoint of model_type {kinds}; got {kind!r}")
    family = FAMILIES[kind]
    known = {family.name + suffix: task for suffix, task in family.tasks.items()}
    name = (found.get("architectures") or list(known))[0]
    if name not in known:
        raise InputError("path_or_id", f"expected one of {', '.join(known)}, got {name}")
    fields = bert_config(found, family)
    own, config = EncoderConfig.from_dict(dict(fields)), EncoderConfig.from_dict({**fields, **layout})
    translate = partial(from_bert, family=family, own=own, config=config, task=known[name])
    return CheckpointSource(known[name].model, fields, translate)


def _of_ours(found: Mapping[str, Any]) -> CheckpointSource:
    names = found.get("architectures") or []
    # The discriminator is the part of ELECTRA to use.
    if found.get("model_type") == ElectraPretrainingConfig.model_type:
        found = discriminator_fields(found)
    EncoderConfig.from_dict(dict(found))  # for its errors
    own = {task.model.__name__: task.model for task in FAMILIES["funnel"].tasks.values()}
    own |= {"EncoderForCausalLM": EncoderForCausalLM, "Electra": EncoderForPreTraining}
    return CheckpointSource(next((own[name] for name in names if name in own), Encoder), found, _from_own)


def _from_own(state: Mapping[str, Tensor]) -> Checkpoint:
    """Rename the tensors of this library's checkpoint to those of a model with a head."""
    part = "discriminator."
    if any(name.startswith(part) for name in state):
        own = {name.removeprefix(part): tensor for name, tensor in state.items() if name.startswith(part)}
        return Checkpoint(own, unused=tuple(name for name in state if not name.startswith(part)))
    if not any(name.startswith(BODY) for name in state):
        return Checkpoint(
            {BODY + name: tensor for name, tensor in state.items()}, {BODY + name: name for name in state}
        )
    return Checkpoint(state)
