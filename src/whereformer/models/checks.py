"""Checks that configurations and models share. Their errors name the field or argument that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..errors import InputError, short_repr, suggest
from ..kernels.backend_choice import BACKENDS
from ..kernels.tracing import can_read
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


def real_tokens(mask: Tensor | None) -> Tensor | None:
    """Return which tokens a mask of padding, (batch, n), calls real.

    A mask that hides nothing is None, as if there were none, where looking at it would not stall a device.
    """
    if mask is None:
        return None
    real = mask.bool()
    return None if can_read(real) and bool(real.all()) else real


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

_KINDS = {bool: "True or False", str: "text"}

_OF_TRANSFORMERS = {
    *("num_labels", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash", "per_layer_config"),
    *("attn_implementation", "experts_implementation", "output_attentions", "use_return_dict", "use_cache"),
    *("bos_token_id", "eos_token_id", "sep_token_id", "num_hidden_layers"),
}
"""What transformers takes besides fields, or reads from any configuration. ``num_hidden_layers`` has its own error."""


def _known(config_class: Any) -> set[str]:
    return {*(field.name for field in fields(config_class)), *config_class.attribute_map, *_OF_TRANSFORMERS}


class StrictConfig(PreTrainedConfig):
    """The fields that all models have, with BERT's defaults; :class:`EncoderConfig` describes them.

    The constructor refuses what is no field; where it stands in a file, it is left out. The tables below say what
    values fields may have.

    Raises:
        InputError: for a value that a field may not have, heads that do not divide ``hidden_size``, methods or options
            that there are not, or an entry that is no field.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "vocab_size": (1, MOST_IDS),
        **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim"), (1, MOST_WIDTH)),
        "intermediate_size": (1, 8 * MOST_WIDTH),
        "max_position_embeddings": (1, MOST_IDS),
        "pad_token_id": (0, MOST_IDS),
        **dict.fromkeys(("hidden_dropout_prob", "activation_dropout_prob"), (0.0, 1.0)),
        "attention_probs_dropout_prob": (0.0, 0.99),
        "initializer_range": (0.0, 1e3),
        "layer_norm_eps": (0.0, 1.0),
    }
    """The least and the greatest value of numeric fields. Where both are whole numbers, so is the value."""
    choices: ClassVar[Mapping[str, Collection[str]]] = {"norm": ("post", "pre"), "attention_backend": BACKENDS}
    """The allowed values of fields that take one of a few."""
    activations: ClassVar[tuple[str, ...]] = ("hidden_act",)
    """The fields that name an activation of transformers."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = None  # type: ignore[assignment]  # filled in below or by classes, as the next one
    head_dim: int = None  # type: ignore[assignment]
    position: str = "learned"
    position_options: dict[str, Any] | None = None
    max_position_embeddings: int = 512
    norm: str = "post"
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    activation_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    attention_backend: str = "auto"
    tie_word_embeddings: bool = True

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        known = {name for name in _known(cls) if not name.endswith("_implementation")}
        return super().from_dict({name: value for name, value in config_dict.items() if name in known}, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in _known(type(self)):
                names = [field.name for field in fields(type(self)) if not field.name.startswith("_")]
                raise InputError(name, f"{type(self).__name__} has no such field{suggest(name, names)}")
        check_entries(kwargs)
        for field in fields(type(self)):
            name, value, usual = field.name, getattr(self, field.name), field.default
            if name in self.bounds and (value is not None or not (usual is None or name.endswith("_token_id"))):
                _check_number(name, value, *self.bounds[name])
            if type(usual) in _KINDS and type(value) is not type(usual):
                raise InputError(name, f"expected {_KINDS[type(usual)]}, got {short_repr(value)}")
        for name, known in self.choices.items():
            if getattr(self, name) not in known:
                expected = " or ".join(repr(choice) for choice in known)
                raise InputError(name, f"expected {expected}, got {short_repr(getattr(self, name))}")
        for name in self.activations:
            if getattr(self, name) not in ACT2FN:
                raise InputError(name, f"expected one of {', '.join(ACT2FN)}, got {short_repr(getattr(self, name))}")
        self._check_position()
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                told = f"{self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}"
                raise InputError("num_attention_heads", told)
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    def _check_position(self) -> None:
        """Check that position methods exist, each with its options."""
        if not isinstance(self.position_options, dict | None):
            raise InputError("position_options", f"expected a dictionary, got {short_repr(self.position_options)}")
        self.position_options = self.position_options or {}
        check_name(self.position)
        try:
            check_name(self.position, self.position_options)
        except (InputError, TypeError) as error:
            raise InputError("position_options", str(error)) from None


def _check_number(name: str, value: object, least: float, most: float) -> None:
    whole = isinstance(least, int) and isinstance(most, int)
    if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
        raise InputError(name, f"expected {'a whole number' if whole else 'a number'}, got {short_repr(value)}")
    # "value < least" would let NaN pass.
    if not value >= least:
        raise InputError(name, f"expected at least {least}, got {short_repr(value)}")
    if not value <= most:
        raise InputError(name, f"expected at most {most}, got {short_repr(value)}")


def check_entries(entries: Mapping[str, Any]) -> None:
    """Raise an InputError for what transformers acts on first: it names all labels, and runs the Hub's kernels."""
    if entries.get("num_labels") is not None:
        _check_number("num_labels", entries["num_labels"], 0, MOST_LABELS)
    for name, value in entries.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise InputError(name, f"code from the Hub is not run, got {short_repr(value)}")
        if name.endswith("_config") and isinstance(value, dict):
            check_entries(value)


class OneDeviceModel(PreTrainedModel):
    """A model that computes attention itself, and on one device: all layers share the tables of a position there."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; a ``device_map`` over several devices is an :class:`InputError`."""
        loaded = super().from_pretrained(*args, **kwargs)
        check_devices(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded


def check_devices(model: PreTrainedModel) -> None:
    """Raise an InputError if a ``device_map`` spread a model over several devices, or put parts of it on disk."""
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    devices = sorted({str(place) for place in places.values()})
    if len(devices) > 1 or devices == ["disk"]:
        raise InputError("device_map", f"expected one device for the whole model, got {', '.join(devices)}")
