"""Translates state dicts and configurations of BERT and its kin, up to Funnel, into this library's.

Nothing here reads or writes files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PreTrainedConfig

from ...errors import InputError
from ..checks import StrictConfig
from ..config import EncoderConfig
from .families import DISTANCES, POSITIONS, QKV, RELATIVE, WORDS, Family, Task
from .loading import BODY, Checkpoint, shape_error

_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Fields of all our models that others lack.
_OURS = {"head_dim", "position", "position_options", "norm", "activation_dropout_prob", "attention_backend"}
# Fields that most families have under the same name.
_FIELDS = (
    *({field.name for field in fields(StrictConfig)} - {field.name for field in fields(PreTrainedConfig)} - _OURS),
    *("classifier_dropout", "type_vocab_size", "id2label", "label2id", "problem_type"),
)
# Options without a counterpart here, each with the value that it must have.
_WITHOUT = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "pruned_heads": {},
}


def bert_config(config_json: Mapping[str, object], family: Family) -> dict[str, Any]:
    """Translate the configuration of a family's checkpoint into arguments of :class:`EncoderConfig`.

    Raises:
        ValueError: for an option that has no counterpart; the message names it.
    """
    for name, expected in {**_WITHOUT, **family.without}.items():
        if config_json.get(name) not in (None, expected):
            reason = f"expected {expected!r}, got {config_json[name]!r} in the checkpoint's configuration"
            raise InputError(name, reason)
    config = AutoConfig.for_model(**config_json)
    embedding_size = getattr(config, "embedding_size", config.hidden_size)
    family_fields = {**family.fixed, **({} if family.options is None else family.options(config))}
    layers = config.num_hidden_layers
    ours: dict[str, Any] = {
        **{
            name: getattr(config, family.renamed.get(name, name))
            for name in (*_FIELDS, *family.renamed)
            if name not in family_fields
        },
        "embedding_size": embedding_size,
        "blocks": f"1x{layers}" if hasattr(config, "num_hidden_groups") else str(layers),
        "position": "learned",
        "count_padding": not family.skips_padding,
        **family_fields,
    }
    ours["max_position_embeddings"] -= _count_padding_rows(family, config.pad_token_id)
    if ours["hidden_act"] == "gelu_new":
        # This is the same function, fused.
        ours["hidden_act"] = "gelu_pytorch_tanh"
    return ours


def from_bert(
    state: Mapping[str, Tensor], family: Family, saved_config: EncoderConfig, config: EncoderConfig, task: Task
) -> Checkpoint:
    """Rename the tensors of a family's checkpoint to this library's names.

    Args:
        state: the checkpoint's tensors; the names of the first releases (LayerNorm.gamma) are accepted.
        family: the checkpoint's family.
        saved_config: the configuration from :func:`bert_config`.
        config: the configuration of the model to build; it may differ, for example in the number of layers.
        task: the task of the checkpoint's head.

    Raises:
        ValueError: for a tensor that no model of the family has, or tied ones that differ; the message names it.
    """
    state = {_rename_old(name).removeprefix(family.prefix): tensor for name, tensor in state.items()}
    names = {BODY + ours: theirs for ours, theirs in family.encoder_names(config).items()}
    names |= family.head_names(task)
    for part, name in (("weight", family.embeddings[WORDS]), ("bias", family.heads["head.decoder.bias"])):
        copy = f"{family.decoder}.{part}"
        if not config.tie_word_embeddings:
            names[f"head.decoder.{part}"] = (copy,)
        elif copy != name and copy in state:
            original, duplicate = state.setdefault(name, state[copy]), state.pop(copy)
            # On the meta device, tensors have no values.
            if original.shape != duplicate.shape or not (original.is_meta or torch.equal(original, duplicate)):
                reason = f"expected {copy!r} to equal {name!r}, since heads here are tied; they differ"
                raise InputError("checkpoint", reason)
    translated, original_names = {}, {}
    for ours, theirs in names.items():
        missing = [name for name in theirs if name not in state]
        stacked = family.stacked.get(ours.removeprefix(BODY), theirs[0])
        is_copied = stacked.rpartition(".")[0] in family.qkv  # the layers have this tensor, too
        original_names[ours] = [*missing, ours.removeprefix(BODY) if is_copied else stacked][0]
        if not missing:
            translated[ours] = _build_tensor(ours, {name: state[name] for name in theirs}, family, saved_config)
    used = set().union(*names.values())
    known = {*_BUFFERS}.union(*family.encoder_names(saved_config).values(), *family.head_names().values())
    unused = [name for name in state if name not in used]
    for name in sorted(unused):
        if name not in known and not name.startswith(family.unused):
            raise InputError("checkpoint", f"it has {name!r}, but a model with its configuration has no such tensor")
    return Checkpoint(translated, original_names, tuple(unused))


def _build_tensor(ours: str, parts: Mapping[str, Tensor], family: Family, config: EncoderConfig) -> Tensor:
    """Build our tensor from theirs."""
    (name, tensor), *_ = parts.items()
    if ours.removeprefix(BODY) in family.stacked:
        return _stack_layers(parts)
    if tuple(parts) == DISTANCES:
        # All layers read the used part of the table, normalized.
        (table, weight, bias), options = parts.values(), config.position_options or {}
        rows = options["num_buckets"] or options["max_distance"]
        return functional.layer_norm(table, table.shape[1:], weight, bias, config.layer_norm_eps)[: 2 * rows]
    if name == POSITIONS:
        return tensor[_count_padding_rows(family, config.pad_token_id) :]
    if name == RELATIVE:
        return tensor.mT
    part = ours.split(".")[-2]
    inner = config.num_attention_heads * config.head_dim
    # If it has another size, the error reports its own shape.
    if len({*family.qkv}) == 1 and part in QKV and tensor.shape[:1] == (3 * inner,):
        return tensor.chunk(3)[QKV.index(part)]
    return tensor


def _stack_layers(parts: Mapping[str, Tensor]) -> Tensor:
    """Join the tensors of all layers; heads that are an axis of a matrix become part of its rows.

    Raises:
        InputError: for a tensor whose shape is not the most common one.
    """
    common_shape, _ = Counter(part.shape for part in parts.values()).most_common(1)[0]
    for name, part in parts.items():
        if part.shape != common_shape:
            raise shape_error(name, part.shape, common_shape)
    return torch.stack([part.flatten(1) if part.dim() == 3 else part for part in parts.values()])


def _rename_old(name: str) -> str:
    """Return a tensor's current name: the norms' gamma and beta have become weight and bias."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{'weight' if m[1] == 'gamma' else 'bias'}", name)


def _count_padding_rows(family: Family, pad_token_id: int | None) -> int:
    """Return the number of rows in the position table before the row of the first position."""
    if not family.skips_padding:
        return 0
    if pad_token_id is None:
        raise InputError("pad_token_id", f"{family.name} counts positions from it, got None in the configuration")
    return pad_token_id + 1
