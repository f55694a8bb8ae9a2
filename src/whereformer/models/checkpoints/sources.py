"""Reads from a checkpoint's config.json which of our models it is, and how to read its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from ...errors import InputError, one_line
from ..config import EncoderConfig
from ..electra import ElectraPretrainingConfig, discriminator_fields
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import EncoderForCausalLM, EncoderForMaskedLM, EncoderForPreTraining, EncoderWithLMHead
from .bert import bert_config, from_bert
from .families import FAMILIES, Family
from .funnel import FUNNELS, WITHOUT_DECODER, from_funnel_model, funnel_config
from .loading import BODY, Checkpoint

OURS = (EncoderConfig.model_type, ElectraPretrainingConfig.model_type)

KINDS = (EncoderConfig.model_type, "funnel", *FAMILIES, ElectraPretrainingConfig.model_type)
"""The values of a checkpoint's model_type that :func:`load_pretrained` takes."""


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
    except (
        StrictDataclassError,
        TypeError,
        AttributeError,
        LookupError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise InputError("path_or_id", f"its config.json describes no model ({reason})") from None


@read_as_a_model()
def source_of(
    found: Mapping[str, Any], model_class: type[EncoderPreTrainedModel] | None, options: Mapping[str, Any]
) -> CheckpointSource:
    """Return how to read a checkpoint, given the contents of its config.json.

    Raises:
        InputError: if it is of another kind, or its configuration fits no model.
    """
    kind = found.get("model_type")
    attached = found.get("whereformer")
    if attached and kind not in OURS:
        method = attached.get("position") if isinstance(attached, dict) else attached
        raise InputError(
            "path_or_id",
            f"expected a model without an attached position method, got one with {method!r}; "
            "whereformer.load_attached reads it",
        )
    if kind in FAMILIES:
        return _of_family(found, FAMILIES[kind], model_class)
    if kind == "funnel":
        return _of_funnel(found, options)
    if kind in OURS:
        return _of_ours(found)
    if kind == "deberta":
        raise InputError("path_or_id", "of DeBERTa's checkpoints, those of versions 2 and 3 can be read, got version 1")
    kinds = ", ".join(KINDS)
    raise InputError("path_or_id", f"expected a checkpoint of model_type {kinds}; got {kind!r}")


def _of_family(
    found: Mapping[str, Any], family: Family, model_class: type[EncoderPreTrainedModel] | None
) -> CheckpointSource:
    known = {family.name + suffix: model for suffix, model in family.models.items()}
    built_as, head = _saved_as(found, known)
    # A causal model has the same head.
    masked_lm = built_as is EncoderForMaskedLM and issubclass(model_class or built_as, EncoderWithLMHead)
    fields = bert_config(found, family, masked_lm=masked_lm)
    config, original = EncoderConfig.from_dict(fields), AutoConfig.for_model(**found)
    return CheckpointSource(
        built_as,
        fields,
        partial(
            from_bert,
            family=family,
            config=config,
            original=original,
            head=head,
            tied=masked_lm,
        ),
    )


def _of_funnel(found: Mapping[str, Any], options: Mapping[str, Any]) -> CheckpointSource:
    built_as, head = _saved_as(found, FUNNELS)
    if built_as is EncoderForMaskedLM and not found.get("tie_word_embeddings", True):
        raise InputError(
            "path_or_id", "expected a masked-LM head tied to the embeddings, got tie_word_embeddings False"
        )
    saved_as = (found.get("architectures") or [""])[0]
    # The file may omit transformers' defaults.
    fields = funnel_config(AutoConfig.for_model(**found), decoder=saved_as not in WITHOUT_DECODER)
    own = EncoderConfig.from_dict(dict(fields))
    # The position method's tensors are stacked over the layers of this configuration.
    config = EncoderConfig.from_dict({**fields, **config_options(options)})
    return CheckpointSource(built_as, fields, partial(from_funnel_model, own=own, config=config, head=head))


def _of_ours(found: Mapping[str, Any]) -> CheckpointSource:
    names = found.get("architectures") or []
    # The discriminator is the part of ELECTRA to use.
    if found.get("model_type") == ElectraPretrainingConfig.model_type:
        found = discriminator_fields(found)
    EncoderConfig.from_dict(dict(found))  # for its errors
    own = {model.__name__: model for model, _ in FUNNELS.values()}
    own |= {"EncoderForCausalLM": EncoderForCausalLM, "Electra": EncoderForPreTraining}
    return CheckpointSource(next((own[name] for name in names if name in own), Encoder), found, _from_own)


def _saved_as(
    found: Mapping[str, Any], known: Mapping[str, tuple[type[EncoderPreTrainedModel], Mapping[str, str]]]
) -> tuple[type[EncoderPreTrainedModel], Mapping[str, str]]:
    """Return our class and names for the class that was saved; the first known one if the checkpoint does not say."""
    name = (found.get("architectures") or list(known))[0]
    if name not in known:
        raise InputError("path_or_id", f"expected one of {', '.join(known)}, got {name}")
    return known[name]


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


def config_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of the configuration."""
    known = {*EncoderConfig().to_dict(), "num_labels"}
    return {name: value for name, value in options.items() if name in known}
