"""Checks that configurations and models share. Their errors name the field or argument that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..checks import check_choice, check_kind, check_range, kind_error
from ..errors import InputError, short_repr, suggest
from ..kernels.backend_choice import BACKENDS
from ..kernels.tracing import can_read
from ..positions import check_name


def check_tensor(name: str, value: object) -> None:
    """Raise an InputError that names the argument, and says how to make a tensor of the value, unless it is one."""
    if isinstance(value, Tensor):
        return
    text, hint = short_repr(value), ""
    if isinstance(value, Mapping):
        text, hint = type(value).__name__, "; write model(**batch)"
    elif isinstance(value, str) or (isinstance(value, list | tuple) and value and isinstance(value[0], str)):
        hint = "; tokenizer(text, return_tensors='pt') makes tensors of text"
    elif hasattr(value, "__len__"):
        hint = f"; torch.tensor({name}) makes one"
    raise InputError(name, f"expected a tensor, got {text}{hint}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise an InputError that names the argument unless it is a tensor of the expected shape."""
    check_tensor(name, tensor)
    if tensor.shape != expected:
        raise InputError(name, f"expected shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    """Raise an InputError that names the argument unless every token has a position."""
    check_tensor(name, positions)
    shape = positions.shape
    # Comparing shapes of different dimensions would compare unrelated symbolic sizes.
    rows = shape[0] == batch or shape[0] == 1 if positions.dim() in (2, 3) else positions.dim() == 1
    if not rows or shape[min(positions.dim(), 2) - 1] != length:
        raise InputError(name, f"expected shape {(length,)} or {(batch, length)}, got {tuple(positions.shape)}")


def check_integers(name: str, numbers: Tensor) -> Tensor:
    """Return integers as int64; anything else raises an InputError that names the argument."""
    check_tensor(name, numbers)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
        raise InputError(name, f"expected integers, got {numbers.dtype}")
    return numbers.long()


def name_index_error(name: str, ids: Tensor, size: int, look_up: Callable[[], Tensor]) -> Tensor:
    """Return ``look_up()``. If it fails on the CPU because an id is not one of 0 .. size - 1, raise an InputError.

    So no check delays a call with valid ids. Labels of -100 count as valid next to others that are not.
    """
    if not can_read(ids):
        return look_up()
    try:
        return look_up()
    except IndexError:
        wrong = ids[(ids < 0) | (ids >= size)]
        if not wrong.numel():
            raise
        raise InputError(name, f"expected integers from 0 to {size - 1}, got {int(wrong.max())}") from None


def classification_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return torch's cross-entropy of logits (tokens, classes) and labels (tokens,); its errors name the labels."""
    return name_index_error(
        "labels", labels, logits.shape[-1], lambda: functional.cross_entropy(logits, labels, **options)
    )


def to_token_mask(mask: Tensor | None) -> Tensor | None:
    """Return a padding mask (batch, n) as bool, True = a token, False = padding.

    A mask without padding becomes None if it can be read without making a device wait.
    """
    if mask is None:
        return None
    token_mask = mask.bool()
    return None if can_read(token_mask) and bool(token_mask.all()) else token_mask


def embed_tokens(name: str, embeddings: nn.Module, width: int, ids: Tensor | None, embedded: Tensor | None) -> Tensor:
    """Return embedded tokens (batch, n, width).

    Args:
        name: the name of the argument ``ids``.
        embeddings: the table of embeddings, or a module in its place.
        width: the width of an embedding.
        ids: (batch, n).
        embedded: (batch, n, width), instead of the ids.

    Raises:
        ValueError: unless exactly one is passed, in this shape.
    """
    embedded_name = name.replace("input_ids", "inputs_embeds")
    if (ids is None) == (embedded is None):
        raise ValueError(f"{name} and {embedded_name}: pass exactly one of them")
    if embedded is not None:
        check_tensor(embedded_name, embedded)
        if embedded.dim() != 3 or embedded.shape[-1] != width:
            raise InputError(embedded_name, f"expected shape (batch, n, {width}), got {tuple(embedded.shape)}")
        return embedded
    assert ids is not None
    check_tensor(name, ids)
    if ids.dim() != 2:
        raise InputError(name, f"expected shape (batch, n), got {tuple(ids.shape)}")
    # A module in the table's place may have any size.
    return name_index_error(name, ids, getattr(embeddings, "num_embeddings", MAX_IDS), lambda: embeddings(ids))


MAX_WIDTH = 2**20
"""The largest width and number of heads. Above it, torch could not hold the number of a weight's bytes."""
MAX_IDS = 2**31 - 1
"""The largest number of tokens, positions or types that fits in 32 bits."""
MAX_LABELS = 2**16
"""The largest number of labels of a classifier. transformers gives each a name, so a file could need any memory."""

_TRANSFORMERS_NAMES = {
    *("num_labels", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash", "per_layer_config"),
    *("attn_implementation", "experts_implementation", "output_attentions", "use_return_dict", "use_cache"),
    *("bos_token_id", "eos_token_id", "sep_token_id", "num_hidden_layers"),
}
"""Names that transformers accepts besides fields, or reads from any configuration; num_hidden_layers has an error."""


def _known_names(config_class: type[PreTrainedConfig]) -> set[str]:
    return {*(field.name for field in fields(config_class)), *config_class.attribute_map, *_TRANSFORMERS_NAMES}


class StrictConfig(PreTrainedConfig):
    """The fields that all models have, with BERT's defaults; :class:`EncoderConfig` describes them.

    The constructor refuses names that are not fields; in a file, they are ignored. The tables below list the values
    that fields may have.

    Raises:
        InputError: for a value that a field may not have, heads that do not divide ``hidden_size``, unknown methods or
            options, or a name that is not a field.
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "vocab_size": (1, MAX_IDS),
        **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim"), (1, MAX_WIDTH)),
        "intermediate_size": (1, 8 * MAX_WIDTH),
        "max_position_embeddings": (1, MAX_IDS),
        "pad_token_id": (0, MAX_IDS),
        **dict.fromkeys(("hidden_dropout_prob", "activation_dropout_prob"), (0.0, 1.0)),
        "attention_probs_dropout_prob": (0.0, 0.99),
        "initializer_range": (0.0, 1e3),
        "layer_norm_eps": (0.0, 1.0),
    }
    """The minimum and maximum of numeric fields. If both are integers, the value must be one, too."""
    choices: ClassVar[Mapping[str, Collection[str]]] = {"norm": ("post", "pre"), "attention_backend": BACKENDS}
    """The allowed values of fields with a list of choices."""
    activations: ClassVar[tuple[str, ...]] = ("hidden_act",)
    """The fields that name an activation of transformers."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = None  # type: ignore[assignment]  # set below or by classes, like the next one
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
    def from_dict(cls, config_dict: dict[str, object], **kwargs: object) -> Self:
        kind = config_dict.get("model_type") or cls.model_type
        if not str(kind).startswith("whereformer"):
            reason = f"expected a model of this library, got one of transformers, {short_repr(kind)}"
            raise InputError("model_type", f"{reason}; whereformer.load_pretrained(path) reads it")
        known = {name for name in _known_names(cls) if not name.endswith("_implementation")}
        return super().from_dict({name: value for name, value in config_dict.items() if name in known}, **kwargs)

    def __post_init__(self, **kwargs: object) -> None:
        for name in kwargs:
            if name not in _known_names(type(self)):
                names = [field.name for field in fields(type(self)) if not field.name.startswith("_")]
                raise InputError(name, f"not a field of {type(self).__name__}{suggest(name, names)}")
        check_entries(kwargs)
        for field in fields(type(self)):
            name, value, default = field.name, getattr(self, field.name), field.default
            if name in self.bounds and (value is not None or not (default is None or name.endswith("_token_id"))):
                _check_number(name, value, *self.bounds[name])
            if type(default) in (bool, str):
                check_kind(name, value, type(default))
        for name, choices in self.choices.items():
            check_choice(name, getattr(self, name), choices)
        for name in self.activations:
            check_choice(name, getattr(self, name), ACT2FN)
        if not isinstance(self.position_options, dict | None):
            raise InputError("position_options", f"expected a dictionary, got {short_repr(self.position_options)}")
        self.position_options = self.position_options or {}
        check_name(self.position)
        try:
            check_name(self.position, self.position_options)
        except (InputError, TypeError) as error:
            raise InputError("position_options", str(error)) from None
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                reason = f"{self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}"
                raise InputError("num_attention_heads", reason)
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    """Check a number: an integer if both limits are integers. Only Python's numbers can be saved as JSON."""
    kind = int if isinstance(low, int) and isinstance(high, int) else float
    if not isinstance(value, int | float):
        raise kind_error(name, value, kind)
    check_kind(name, value, kind)
    check_range(name, value, low, high)


def check_entries(entries: Mapping[str, object]) -> None:
    """Check the entries that transformers acts on first: it creates a name for each label, and runs Hub kernels."""
    if entries.get("num_labels") is not None:
        _check_number("num_labels", entries["num_labels"], 0, MAX_LABELS)
    for name, value in entries.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise InputError(name, f"code from the Hub is not run, got {short_repr(value)}")
        if name.endswith("_config") and isinstance(value, dict):
            check_entries(value)


class OneDeviceModel(PreTrainedModel):
    """A model that computes attention itself, and on one device, where all layers share a position method's tables."""

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> Any:
        """Load a model as transformers does; a ``device_map`` over several devices is an :class:`InputError`."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_devices(model)
        saved = model.state_dict()
        # Transformers gives no values to buffers that are not saved, which users' position methods may have.
        if unsaved := {name: buffer for name, buffer in model.named_buffers() if name not in saved and buffer.numel()}:
            with torch.random.fork_rng(devices=[]):
                fresh = dict(type(model)(model.config).named_buffers())
            for name, buffer in unsaved.items():
                buffer.copy_(fresh[name])
        return loaded


def check_devices(model: PreTrainedModel) -> None:
    """Raise an InputError if a ``device_map`` spread a model over several devices, or put parts of it on disk."""
    devices = sorted({str(device) for device in getattr(model, "hf_device_map", {}).values()})
    if len(devices) > 1 or devices == ["disk"]:
        raise InputError("device_map", f"expected one device for the whole model, got {', '.join(devices)}")
