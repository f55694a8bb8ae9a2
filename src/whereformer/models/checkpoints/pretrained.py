"""``load_pretrained``: loads a pretrained model as one of this library's, also with a different position method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from ...errors import InputError, one_line, short_repr
from ...positions import canonical_name, component_names, describe, layer_pattern
from ..config import EncoderConfig
from ..electra import ElectraPretrainingConfig
from ..encoder import Encoder, EncoderPreTrainedModel
from ..heads import EncoderForCausalLM, EncoderForPreTraining
from .bert import bert_config, from_bert
from .families import FAMILIES
from .files import find_config, find_weights, read_header, read_tensors
from .loading import BODY, Checkpoint, check_weights, fill

OURS = (EncoderConfig.model_type, ElectraPretrainingConfig.model_type)

# A child of transformers' logger, so that its handler and verbosity apply.
_log = logging.get_logger("transformers.whereformer")


def load_pretrained(
    path_or_id: str | Path,
    position: str | None = None,
    *,
    model_class: type[EncoderPreTrainedModel] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> EncoderPreTrainedModel:
    """Load a pretrained model as one of this library's, in evaluation mode; weights are read from safetensors only.

    This takes transformers' BERT, ALBERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet, DeBERTa
    (version 3), ModernBERT and Funnel-Transformer, and this library's own models. With the checkpoint's own
    method, the outputs are transformers'. The model's ``loading_report`` says which tensors were kept, dropped and
    freshly initialized; a warning is logged if any were dropped or initialized.

    Args:
        path_or_id: a folder, or an id on the Hugging Face Hub.
        position: a position method to use in place of the checkpoint's. Methods that are in both keep their weights,
            such as a BERT's trained position embeddings in "learned+tisa"; the others have fresh parameters.
        model_class: the class to build; by default the one that was saved. Parts that the checkpoint lacks, such as the
            head of another task, are fresh. The pooler of BERT and ALBERT becomes the dense layer of an
            :class:`EncoderForSequenceClassification`.
        dtype: the dtype of the weights, whatever the checkpoint's is.
        options: fields of :class:`EncoderConfig` to change, such as ``mask_pooling="all"`` for the masks of
            transformers' Funnel. Any other name is an option of the position method. If ``num_labels`` changes, the
            classifier's last layer is fresh.

    Where transformers goes by other conventions:

    - RoBERTa's and MPNet's positions are counted from 0 here, also in given ``position_ids``, and there from
      ``pad_token_id + 1``. In both, padding is not counted (``config.count_padding``).
    - An ELECTRA discriminator's logits are as it was trained, positive for a token that was *replaced*, where our own
      :class:`EncoderForPreTraining` and Funnel's say "original": label replaced tokens 1.
    - Without token types a Funnel's segments say nothing, as in the authors' code; transformers takes them to be 0,
      which is not the same: give zeros for its numbers.
    - RoBERTa's, MPNet's and ELECTRA's classifiers of sequences have, in training, one dropout more: on the
      first token's state. ModernBERT's dropouts become those of EncoderConfig, which act at other places where they are
      not zero.
    - A ModernBERT rotates in float32 in transformers, whatever its dtype.

    Raises:
        ValueError: for an unsupported kind of checkpoint, or one whose tensors are missing, unexpected, of another
            size or not finite, or an option that neither the configuration nor the position method has. Sizes are
            compared before any memory is taken.
        OSError: if there is no such checkpoint, or it has no readable safetensors.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError("dtype", f"expected a floating dtype of torch, got {short_repr(dtype)}")
    layout: dict[str, Any] = {name: options[name] for name in ("blocks", "decoder_layers") if name in options}
    source = source_of(find_config(path_or_id), layout)
    build = source.built_as if model_class is None else model_class
    if getattr(build, "base_model_prefix", None) != Encoder.base_model_prefix:
        name = getattr(build, "__name__", short_repr(build))
        raise TypeError(f"model_class: expected Encoder or a model that has one, got {name}")
    config = EncoderConfig.from_dict(_changed(source.fields, position, options))
    before = source.fields.get("position", "learned")
    relabeled = config.num_labels != EncoderConfig.from_dict(dict(source.fields)).num_labels

    def filled(model: EncoderPreTrainedModel, weights: Mapping[str, Tensor]) -> EncoderPreTrainedModel:
        checkpoint, fresh = _recomposed(source.translate(weights), before, config.position)
        whole = type(model) is source.built_as
        model.loading_report = fill(model, checkpoint, fresh=fresh, whole=whole, relabeled=relabeled)
        return model

    files = find_weights(path_or_id)
    header = read_header(files)
    # First without memory: an untrusted configuration could ask for any amount.
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            filled(build(config), header)
    except (RuntimeError, ArithmeticError, TypeError, IndexError) as error:
        raise InputError("config", f"no model has these sizes ({one_line(str(error))})") from None
    weights = read_tensors(files)
    check_weights(weights)
    model = filled(build(config).to(dtype), weights)
    assert model.loading_report is not None
    if model.loading_report.dropped or model.loading_report.initialized:
        _log.warning(f"{path_or_id} as {type(model).__name__}\n{model.loading_report}")
    return model.eval()


def _changed(fields: Mapping[str, Any], position: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the position method and the given options in a configuration's fields."""
    own = {name: value for name, value in options.items() if name in {*EncoderConfig().to_dict(), "num_labels"}}
    # The dtype belongs to the model, and label names fit only one number of labels.
    gone = {"dtype", "torch_dtype"} | ({"id2label", "label2id"} if "num_labels" in own else set())
    changed = {name: value for name, value in fields.items() if name not in gone} | own
    kept = fields.get("position_options") or {}
    if position is not None:
        stay = [
            part for part in component_names(fields.get("position", "learned")) if part in component_names(position)
        ]
        known = {option for part in stay for option in describe(part)[1]}
        changed["position"] = position
        kept = {name: value for name, value in kept.items() if name in known or name in stay}
    others = {name: value for name, value in options.items() if name not in own}
    changed["position_options"] = kept | (own.get("position_options") or {}) | others
    return changed


def _places(position: str) -> dict[str, str]:
    """Return the beginning of the names of each method's tensors, for a composition or a single method.

    A pattern over layers counts as a method of its own: its tensors fit no other method.
    """
    pattern = layer_pattern(position)
    parts = pattern[0] if len(pattern) == 1 else [canonical_name(position)]
    if len(parts) == 1:
        return {parts[0]: f"{BODY}position."}
    return {part: f"{BODY}position.parts.{index}." for index, part in enumerate(parts)}


def _recomposed(checkpoint: Checkpoint, before: str, after: str) -> tuple[Checkpoint, list[str]]:
    """Rename a checkpoint's tensors for another position method; return it with the beginnings of fresh names."""
    if canonical_name(before) == canonical_name(after):
        return checkpoint, []
    old, new = _places(before), _places(after)
    state, names, unused = {}, dict(checkpoint.names), list(checkpoint.unused)
    for name, tensor in checkpoint.state.items():
        part = next((part for part, place in old.items() if name.startswith(place)), None)
        if part is None:
            state[name] = tensor
        elif part in new:
            moved = new[part] + name.removeprefix(old[part])
            state[moved], names[moved] = tensor, checkpoint.names.get(name, name)
        else:
            unused.append(checkpoint.names.get(name, name))
    recomposed = replace(checkpoint, state=state, names=names, unused=tuple(unused))
    return recomposed, [place for part, place in new.items() if part not in old]


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
    EncoderConfig.from_dict(dict(found))  # for its errors
    own = {task.model.__name__: task.model for task in FAMILIES["funnel"].tasks.values()}
    own |= {"EncoderForCausalLM": EncoderForCausalLM, "Electra": EncoderForPreTraining}  # the part to use
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
