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
from .loading import BODY, Checkpoint, misfit

_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Fields of all our models that others lack.
_OURS = {"head_dim", "position", "position_options", "norm", "activation_dropout_prob", "attention_backend"}
# Fields that most families have under the same name.
_FIELDS = (
    *({each.name for each in fields(StrictConfig)} - {each.name for each in fields(PreTrainedConfig)} - _OURS),
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


def bert_config(found: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Translate the configuration of a family's checkpoint into arguments of :class:`EncoderConfig`.

    Raises:
        ValueError: for an option that has no counterpart; the message names it.
    """
    for name, wanted in {**_WITHOUT, **family.without}.items():
        if found.get(name) not in (None, wanted):
            raise InputError(name, f"expected {wanted!r}, got {found[name]!r} in the checkpoint's configuration")
    config = AutoConfig.for_model(**found)
    embedding_size = getattr(config, "embedding_size", config.hidden_size)
    own = {**family.fixed, **({} if family.options is None else family.options(config))}
    layers = config.num_hidden_layers
    ours = {
        **{
            name: getattr(config, family.renamed.get(name, name))
            for name in (*_FIELDS, *family.renamed)
            if name not in own
        },
        "embedding_size": embedding_size,
        "blocks": f"1x{layers}" if hasattr(config, "num_hidden_groups") else str(layers),
        "position": "learned",
        "count_padding": not family.skips_padding,
        **own,
    }
    ours["max_position_embeddings"] -= _skipped(family, config.pad_token_id)
    if ours["hidden_act"] == "gelu_new":
        # This is the same function, fused.
        ours["hidden_act"] = "gelu_pytorch_tanh"
    return ours


def from_bert(
    state: Mapping[str, Tensor], family: Family, own: EncoderConfig, config: EncoderConfig, task: Task
) -> Checkpoint:
    """Rename the tensors of a family's checkpoint to this library's names.

    Args:
        state: the checkpoint's tensors; the names of the first releases (LayerNorm.gamma) are understood.
        family: the checkpoint's family.
        own: the configuration from :func:`bert_config`.
        config: the same, but for what the model to build has otherwise, such as fewer layers.
        task: what the checkpoint's head is for.

    Raises:
        ValueError: for a tensor that no model of the family has, or tied ones that differ; the message names it.
    """
    state = {_modern(name).removeprefix(family.prefix): tensor for name, tensor in state.items()}
    names = {BODY + ours: theirs for ours, theirs in family.encoder_names(config).items()}
    names |= family.head_names(task)
    for part, name in (("weight", family.embeddings[WORDS]), ("bias", family.heads["head.decoder.bias"])):
        copy = f"{family.decoder}.{part}"
        if not config.tie_word_embeddings:
            names[f"head.decoder.{part}"] = (copy,)
        elif copy != name and copy in state:
            if not _same(state.setdefault(name, state[copy]), state[copy]):
                raise InputError("checkpoint", f"expected {copy!r} to equal {name!r}, got others; heads here are tied")
            del state[copy]
    translated, called = {}, {}
    for ours, theirs in names.items():
        missing = [name for name in theirs if name not in state]
        stacked = family.stacked.get(ours.removeprefix(BODY), theirs[0])
        copied = stacked.rpartition(".")[0] in family.qkv  # the layers keep theirs
        called[ours] = [*missing, ours.removeprefix(BODY) if copied else stacked][0]
        if not missing:
            translated[ours] = _made(ours, {name: state[name] for name in theirs}, family, own)
    used = set().union(*names.values())
    known = {*_BUFFERS}.union(*family.encoder_names(own).values(), *family.head_names().values())
    unused = [name for name in state if name not in used]
    for name in sorted(unused):
        if name not in known and not name.startswith(family.unused):
            told = f"it has {name!r}, for which there is no place in a model of its configuration"
            raise InputError("checkpoint", told)
    return Checkpoint(translated, called, tuple(unused))


def _made(ours: str, parts: Mapping[str, Tensor], family: Family, config: EncoderConfig) -> Tensor:
    """Return our tensor, made of theirs."""
    (name, tensor), *_ = parts.items()
    if ours.removeprefix(BODY) in family.stacked:
        return _stacked(parts)
    if tuple(parts) == DISTANCES:
        return _normalized(parts, config)
    if name == POSITIONS:
        return tensor[_skipped(family, config.pad_token_id) :]
    if name == RELATIVE:
        return tensor.mT
    part = ours.split(".")[-2]
    inner = config.num_attention_heads * config.head_dim
    # Of another size, it is reported as it is.
    if len({*family.qkv}) == 1 and part in QKV and tensor.shape[:1] == (3 * inner,):
        return tensor.chunk(3)[QKV.index(part)]
    return tensor


def _stacked(parts: Mapping[str, Tensor]) -> Tensor:
    """Join the tensors of all layers; heads that are an axis of a matrix become part of its rows.

    Raises:
        InputError: for a tensor of another shape than most.
    """
    usual, _ = Counter(part.shape for part in parts.values()).most_common(1)[0]
    for name, part in parts.items():
        if part.shape != usual:
            raise misfit(name, part.shape, usual)
    return torch.stack([part.flatten(1) if part.dim() == 3 else part for part in parts.values()])


def _normalized(parts: Mapping[str, Tensor], config: EncoderConfig) -> Tensor:
    """Return the table of distances that all layers read: theirs, normalized, as far as it is used."""
    (table, weight, bias), options = parts.values(), config.position_options or {}
    rows = options["num_buckets"] or options["max_distance"]
    return functional.layer_norm(table, table.shape[1:], weight, bias, config.layer_norm_eps)[: 2 * rows]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; on the meta device, which has none, the same shape."""
    return one.shape == other.shape and (one.is_meta or torch.equal(one, other))


def _modern(name: str) -> str:
    """Return a tensor's current name: the norms' gamma and beta have become weight and bias."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{'weight' if m[1] == 'gamma' else 'bias'}", name)


def _skipped(family: Family, pad_token_id: int | None) -> int:
    """Return the number of rows in the position table before that of the first position."""
    if not family.skips_padding:
        return 0
    if pad_token_id is None:
        raise InputError("pad_token_id", f"{family.name} counts positions from it, got None in the configuration")
    return pad_token_id + 1
