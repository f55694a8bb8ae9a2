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
from .loading import BODY, Checkpoint, check_weights, load_into

OURS = (EncoderConfig.model_type, ElectraPretrainingConfig.model_type)

# A child of transformers' logger, so that its handler and verbosity apply.
_log = logging.get_logger("transformers.whereformer")


def load_pretrained(
    path_or_id: str | Path,
    position: str | None = None,
    *,
    model_class: type[EncoderPreTrainedModel] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> EncoderPreTrainedModel:
    """Load a pretrained model as one of this library's, in evaluation mode; weights are read from safetensors only.

    This loads transformers' BERT, ALBERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet, DeBERTa
    (version 3), ModernBERT and Funnel-Transformer, and this library's own models. With the checkpoint's position
    method, the outputs are transformers'. The model's ``loading_report`` lists which tensors were loaded, dropped and
    freshly initialized; a warning is logged if any were dropped or initialized.

    Args:
        path_or_id: a folder, or an id on the Hugging Face Hub.
        position: a position method to use instead of the checkpoint's. Methods that are in both keep their weights,
            such as a BERT's trained position embeddings in "learned+tisa"; the others have fresh parameters.
        model_class: the class to build; by default the one that was saved. Parts that the checkpoint lacks, such as the
            head of another task, are fresh. The pooler of BERT and ALBERT becomes the dense layer of an
            :class:`EncoderForSequenceClassification`.
        dtype: the dtype of the weights, whatever the checkpoint's is.
        options: fields of :class:`EncoderConfig` to change, such as ``mask_pooling="all"`` for the masks of
            transformers' Funnel. Any other name is an option of the position method. If ``num_labels`` changes, the
            classifier's last layer is fresh.

    Some conventions differ from transformers':

    - RoBERTa's and MPNet's positions are counted from 0 here, also in ``position_ids`` that you pass, but from
      ``pad_token_id + 1`` in transformers. In both, padding is not counted (``config.count_padding``).
    - An ELECTRA discriminator's logits are as it was trained, positive for a token that was *replaced*, but positive
      for "original" in our own :class:`EncoderForPreTraining` and in Funnel's. So label replaced tokens 1.
    - Without token types, a Funnel's segments have no effect, as in the authors' code, but transformers uses type 0
      for all tokens, which is not the same. To get its results, pass zeros.
    - In training, transformers' sequence classifiers of RoBERTa, MPNet and ELECTRA have one more dropout: on the first
      token's state. ModernBERT's dropouts become EncoderConfig's, which act at different places if they are not zero.
    - In transformers, ModernBERT rotates in float32 with any dtype.

    Raises:
        ValueError: for an unsupported kind of checkpoint; for tensors that are missing, unexpected, not finite or have
            the wrong size; for an option that neither the configuration nor the position method has. Sizes are compared
            before memory is allocated.
        OSError: if the checkpoint does not exist or has no readable safetensors.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError("dtype", f"expected a floating dtype of torch, got {short_repr(dtype)}")
    layout: dict[str, object] = {name: options[name] for name in ("blocks", "decoder_layers") if name in options}
    source = find_source(find_config(path_or_id), layout)
    build = source.default_class if model_class is None else model_class
    if getattr(build, "base_model_prefix", None) != Encoder.base_model_prefix:
        name = getattr(build, "__name__", short_repr(build))
        raise TypeError(f"model_class: expected Encoder or a model that has one, got {name}")
    config = EncoderConfig.from_dict(_change_fields(source.fields, position, options))
    old_position = source.fields.get("position", "learned")
    is_relabeled = config.num_labels != EncoderConfig.from_dict(dict(source.fields)).num_labels

    def load_weights(model: EncoderPreTrainedModel, weights: Mapping[str, Tensor]) -> EncoderPreTrainedModel:
        checkpoint, fresh = _rename_for_position(source.translate(weights), old_position, config.position)
        needs_head = type(model) is source.default_class
        model.loading_report = load_into(
            model, checkpoint, fresh=fresh, needs_head=needs_head, is_relabeled=is_relabeled
        )
        return model

    files = find_weights(path_or_id)
    header = read_header(files)
    # First without memory: an untrusted configuration could ask for any amount.
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            load_weights(build(config), header)
    except (RuntimeError, ArithmeticError, TypeError, IndexError) as error:
        raise InputError("config", f"a model with these sizes cannot be built ({one_line(str(error))})") from None
    weights = read_tensors(files)
    check_weights(weights)
    model = load_weights(build(config).to(dtype), weights)
    assert model.loading_report is not None
    if model.loading_report.dropped or model.loading_report.initialized:
        _log.warning(f"{path_or_id} as {type(model).__name__}\n{model.loading_report}")
    return model.eval()


def _change_fields(fields: Mapping[str, Any], position: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the position method and options in a configuration's fields."""
    config_names = {*EncoderConfig().to_dict(), "num_labels"}
    config_options = {name: value for name, value in options.items() if name in config_names}
    # The dtype belongs to the model, and label names fit only one number of labels.
    dropped = {"dtype", "torch_dtype"} | ({"id2label", "label2id"} if "num_labels" in config_options else set())
    changed = {name: value for name, value in fields.items() if name not in dropped} | config_options
    carried_options = fields.get("position_options") or {}
    if position is not None:
        old_methods = component_names(fields.get("position", "learned"))
        shared_methods = [method for method in old_methods if method in component_names(position)]
        known = {*shared_methods}.union(*(describe(method)[1] for method in shared_methods))
        changed["position"] = position
        carried_options = {name: value for name, value in carried_options.items() if name in known}
    method_options = {name: value for name, value in options.items() if name not in config_options}
    changed["position_options"] = carried_options | (config_options.get("position_options") or {}) | method_options
    return changed


def _tensor_prefixes(position: str) -> dict[str, str]:
    """Return the beginning of the names of each method's tensors, for a composition or a single method.

    A pattern over layers counts as a separate method, since its tensors do not fit any other.
    """
    pattern = layer_pattern(position)
    parts = pattern[0] if len(pattern) == 1 else [canonical_name(position)]
    if len(parts) == 1:
        return {parts[0]: f"{BODY}position."}
    return {part: f"{BODY}position.parts.{index}." for index, part in enumerate(parts)}


def _rename_for_position(checkpoint: Checkpoint, old_position: str, position: str) -> tuple[Checkpoint, list[str]]:
    """Rename a checkpoint's tensors for a different position method; also return the beginnings of fresh names."""
    if canonical_name(old_position) == canonical_name(position):
        return checkpoint, []
    old, new = _tensor_prefixes(old_position), _tensor_prefixes(position)
    state, names, unused = {}, dict(checkpoint.names), list(checkpoint.unused)
    for name, tensor in checkpoint.state.items():
        method = next((method for method, prefix in old.items() if name.startswith(prefix)), None)
        if method is None:
            state[name] = tensor
        elif method in new:
            new_name = new[method] + name.removeprefix(old[method])
            state[new_name], names[new_name] = tensor, checkpoint.names.get(name, name)
        else:
            unused.append(checkpoint.names.get(name, name))
    renamed = replace(checkpoint, state=state, names=names, unused=tuple(unused))
    return renamed, [prefix for method, prefix in new.items() if method not in old]


class CheckpointSource(NamedTuple):
    """Our class for a checkpoint's class, the fields of our configuration, and a function that renames the tensors."""

    default_class: type[EncoderPreTrainedModel]
    fields: Mapping[str, Any]
    translate: Callable[[Mapping[str, Tensor]], Checkpoint]


@contextmanager
def report_bad_config() -> Iterator[None]:
    """Turn any error into an InputError: in an untrusted config.json, any field can have any value."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise InputError("path_or_id", f"its config.json does not describe a model ({reason})") from error


@report_bad_config()
def find_source(config_json: Mapping[str, Any], layout: Mapping[str, object]) -> CheckpointSource:
    """Return how to load a checkpoint, by the contents of its config.json.

    ``layout`` holds the fields of :class:`EncoderConfig` about layers that the model to build changes.

    Raises:
        InputError: if its kind is not supported, or its configuration does not describe a model.
    """
    kind = config_json.get("model_type")
    if kind in OURS:
        return _find_own_source(config_json)
    if config_json.get("whereformer"):
        reason = "expected a model without an attached position method; whereformer.load_attached loads models with one"
        raise InputError("path_or_id", reason)
    if kind not in FAMILIES:
        kinds = ", ".join((*OURS, *FAMILIES))
        raise InputError("path_or_id", f"expected a checkpoint of model_type {kinds}; got {kind!r}")
    family = FAMILIES[kind]
    known = {family.name + suffix: task for suffix, task in family.tasks.items()}
    name = (config_json.get("architectures") or list(known))[0]
    if name not in known:
        raise InputError("path_or_id", f"expected one of {', '.join(known)}, got {name}")
    fields = bert_config(config_json, family)
    saved_config, config = EncoderConfig.from_dict(dict(fields)), EncoderConfig.from_dict({**fields, **layout})
    translate = partial(from_bert, family=family, saved_config=saved_config, config=config, task=known[name])
    return CheckpointSource(known[name].model, fields, translate)


def _find_own_source(config_json: Mapping[str, Any]) -> CheckpointSource:
    names = config_json.get("architectures") or []
    EncoderConfig.from_dict(dict(config_json))  # for its errors
    classes = {task.model.__name__: task.model for task in FAMILIES["funnel"].tasks.values()}
    classes |= {"EncoderForCausalLM": EncoderForCausalLM, "Electra": EncoderForPreTraining}  # Electra's part to keep
    default_class = next((classes[name] for name in names if name in classes), Encoder)
    return CheckpointSource(default_class, config_json, _translate_own)


def _translate_own(state: Mapping[str, Tensor]) -> Checkpoint:
    """Rename the tensors of this library's checkpoint to their names in a model with a head."""
    prefix = "discriminator."
    if any(name.startswith(prefix) for name in state):
        discriminator = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        return Checkpoint(discriminator, unused=tuple(name for name in state if not name.startswith(prefix)))
    if any(name.startswith(BODY) for name in state):
        return Checkpoint(state)
    return Checkpoint({BODY + name: state[name] for name in state}, {BODY + name: name for name in state})
