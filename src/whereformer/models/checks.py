"""Checks that configurations and models share. Their errors name the field or argument that does not fit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from ..errors import InputError, shown
from ..kernels.choose import BACKENDS
from ..positions import check_name


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise an InputError that names the argument unless the tensor has the expected shape."""
    if tensor.shape != expected:
        raise InputError(name, f"expected shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    """Raise an InputError that names the argument unless every token has a position."""
    shape = positions.shape
    # Comparing shapes of different dimensions would compare symbolic sizes that have nothing to do with one another.
    rows = shape[0] == batch or shape[0] == 1 if positions.dim() in (2, 3) else positions.dim() == 1
    if not rows or shape[min(positions.dim(), 2) - 1] != length:
        raise InputError(name, f"expected shape {(length,)} or {(batch, length)}, got {tuple(positions.shape)}")


def whole_numbers(name: str, numbers: Tensor) -> Tensor:
    """Return whole numbers as int64; others raise an InputError that names the argument."""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
        raise InputError(name, f"expected whole numbers, got {numbers.dtype}")
    return numbers.long()


def embedded_tokens(
    name: str, embeddings: nn.Module, width: int, ids: Tensor | None, embedded: Tensor | None
) -> Tensor:
    """Return embedded tokens (batch, n, width).

    Args:
        name: the argument that has the ids.
        embeddings: the table of embeddings, or what stands for it.
        width: that of an embedding.
        ids: (batch, n).
        embedded: (batch, n, width), in place of the ids.

    Raises:
        ValueError: unless exactly one is given, of this shape.
    """
    other = name.replace("input_ids", "inputs_embeds")
    if (ids is None) == (embedded is None):
        raise ValueError(f"{name} and {other}: give exactly one of them")
    if embedded is not None:
        if embedded.dim() != 3 or embedded.shape[-1] != width:
            raise InputError(other, f"expected shape (batch, n, {width}), got {tuple(embedded.shape)}")
        return embedded
    assert ids is not None
    if ids.dim() != 2:
        raise InputError(name, f"expected shape (batch, n), got {tuple(ids.shape)}")
    found: Tensor = embeddings(ids)
    return found


MOST_WIDTH = 2**20
"""The largest width and number of heads. Beyond it, torch could not hold the number of a weight's bytes."""
MOST_IDS = 2**31 - 1
"""The largest number of tokens, positions or types, which 32 bits still count."""

MOST_LABELS = 2**16
"""The most labels of a classifier. transformers gives each a name, so a file could take any amount of memory."""

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", dict: "a dictionary"}


def check_kinds(config: Any, extra: Mapping[str, Any]) -> None:
    """Raise an InputError for a field of one of our configurations whose value is of another kind than declared.

    A configuration may come from an untrusted config.json, where anything can stand anywhere.

    Args:
        config: the configuration. A field that may be None, or is by default, passes.
        extra: entries that are no fields. transformers makes them attributes, so they must not hide a method.
    """
    own = [each for each in type(config).__mro__ if each.__module__.partition(".")[0] == __name__.partition(".")[0]]
    for base in own:
        for name, hint in get_annotations(base, eval_str=True).items():
            declared = get_args(hint)[0] if isinstance(hint, UnionType) else hint
            kind = get_origin(declared) or declared
            value = getattr(config, name)
            if kind not in _KINDS or (value is None and (vars(base)[name] is None or NoneType in get_args(hint))):
                continue
            if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (
                kind is bool
            ):
                raise InputError(name, f"expected {_KINDS[kind]}, got {shown(value)}")
            if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
                raise InputError(name, f"expected text as keys, got {shown(value)}")
    for name in extra:
        hides = name == "attribute_map" or callable(getattr(type(config), name, None))
        if hides or not name.isidentifier():
            raise InputError("config", f"it has no field {shown(name)}")


LOADED = "_loaded"
"""The argument by which :class:`StrictConfig` hands its constructor the entries of a file that are no fields."""

_OF_TRANSFORMERS = {
    *("num_labels", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash", "per_layer_config"),
    *("attn_implementation", "experts_implementation", "output_attentions", "use_return_dict", "use_cache"),
    *("bos_token_id", "eos_token_id", "sep_token_id", "num_hidden_layers"),
}
"""What transformers takes besides fields, or reads from any configuration. ``num_hidden_layers`` has its own error."""


@cache
def _of_generation() -> frozenset[str]:
    """The fields of generation, which any file of transformers may have, but for one that may be meant for ours."""
    return frozenset(GenerationConfig().to_dict().keys() - {"max_length"})


def _known(config_class: Any) -> set[str]:
    own = {*(field.name for field in fields(config_class)), *config_class.attribute_map, *_OF_TRANSFORMERS, LOADED}
    return own | _of_generation()


class StrictConfig(PreTrainedConfig):
    """A configuration whose constructor refuses what is no field, where entries of a file become attributes.

    A config.json of other hands may say more than a model needs. The tables below say what values fields may have.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The least and the greatest value of numeric fields that are not None."""
    shares: ClassVar[tuple[str, ...]] = ("attention_probs_dropout_prob",)
    """The fields that are at least 0 and below 1."""
    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    """The allowed values of fields that take one of a few."""
    activations: ClassVar[tuple[str, ...]] = ("hidden_act",)
    """The fields that name an activation of transformers."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        known = _known(cls)
        unknown = {name: value for name, value in config_dict.items() if name not in known}
        own = {name: value for name, value in config_dict.items() if name in known}
        return super().from_dict(own | ({LOADED: unknown} if unknown else {}), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: Any) -> Any:
        return cls.from_dict(json.loads(Path(json_file).read_text(encoding="utf-8")))

    def checked(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Check each field by itself, and other entries, which are returned; fill in the width of a head.

        Raises:
            InputError: for a value that a field may not have, heads that do not divide ``hidden_size``, or an entry
                that is no field.
        """
        loaded = extra.pop(LOADED, {})
        for name in extra:
            if name not in _known(type(self)):
                names = [field.name for field in fields(type(self)) if not field.name.startswith("_")]
                close = get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise InputError(name, f"{type(self).__name__} has no such field{hint}")
        extra |= loaded
        check_kinds(self, extra)
        check_inherited(self, extra)
        for name, (least, most) in self.bounds.items():
            value = getattr(self, name)
            # "value < least" would let NaN pass.
            if value is not None and not value >= least:
                raise InputError(name, f"expected at least {least}, got {shown(value)}")
            if value is not None and not value <= most:
                raise InputError(name, f"expected at most {most}, got {shown(value)}")
        for name in self.shares:
            if not 0 <= getattr(self, name) < 1:
                raise InputError(name, f"expected a number in [0, 1), got {shown(getattr(self, name))}")
        for name, known in self.choices.items():
            if getattr(self, name) not in known:
                expected = " or ".join(repr(choice) for choice in known)
                raise InputError(name, f"expected {expected}, got {shown(getattr(self, name))}")
        for name in self.activations:
            if getattr(self, name) not in ACT2FN:
                raise InputError(name, f"expected one of {', '.join(ACT2FN)}, got {shown(getattr(self, name))}")
        own: Any = self  # the fields that both configurations have
        if own.head_dim is None:
            heads, width = own.num_attention_heads, own.hidden_size
            if width % heads:
                raise InputError("num_attention_heads", f"{heads} heads do not divide hidden_size {width}")
            own.head_dim = width // heads
        return extra


def check_position(config: Any, *layers: int) -> None:
    """Raise an InputError unless a configuration names position methods for so many layers, each with its options.

    ``layers`` are the numbers of layers of the stacks that have these methods.
    """
    for num_layers in layers:
        check_name(config.position, num_layers)
        try:
            check_name(config.position, num_layers, config.position_options)
        except (InputError, TypeError) as error:
            raise InputError("position_options", str(error)) from None


def check_labels(entries: Mapping[str, Any]) -> None:
    """Raise an InputError unless the number of labels among a configuration's entries is one that a model can have.

    transformers calls a method of the number, or makes as many names, before it looks at anything else.
    """
    count = entries.get("num_labels")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise InputError("num_labels", f"expected a whole number, got {shown(count)}")
    if count is not None and not 0 <= count <= MOST_LABELS:
        raise InputError("num_labels", f"expected a number from 0 to {MOST_LABELS}, got {shown(count)}")
    names = entries.get("id2label")
    if names is not None and not (isinstance(names, Mapping) and all(str(key).isdecimal() for key in names)):
        raise InputError("id2label", f"expected a name for each of 0, 1, 2..., got {shown(names)}")


def check_inherited(config: Any, extra: Mapping[str, Any]) -> None:
    """Raise an InputError for a bad value of a field of transformers' configurations: labels, dtype, attention."""
    check_labels({**extra, "id2label": config.id2label})
    dtype = getattr(torch, config.dtype, None) if isinstance(config.dtype, str) else config.dtype
    if config.dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError("dtype", f"expected a dtype of torch, or the name of one, got {shown(config.dtype)}")
    check_attention(extra.get("attn_implementation"))


def check_attention(asked: object) -> None:
    """Raise an InputError if one of transformers' attention functions is asked for, which our models do not call.

    A dictionary has the choice for each part of a model, and for the model itself under "".
    """
    if isinstance(asked, dict):
        asked = asked.get("")
    if asked not in (None, "eager"):
        raise InputError(
            "attn_implementation",
            f"these models compute attention themselves, got {shown(asked)}; "
            f"say attention_backend= with one of {', '.join(BACKENDS)}",
        )
