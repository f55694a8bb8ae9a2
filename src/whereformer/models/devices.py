"""The base class of all models: where their parts may lie, and whose attention they do not use."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import InputError
from .checks import check_attention


class OneDeviceModel(PreTrainedModel):
    """A model that computes attention itself, and on one device: all layers share the tables of a position there."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; a ``device_map`` over several devices is an :class:`InputError`."""
        loaded = super().from_pretrained(*args, **kwargs)
        check_devices(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Raise an InputError for anything but "eager", transformers' name for a model's own attention."""
        check_attention(attn_implementation)

    # Private in transformers, which would guess from the source that it may, and ask to request support for others.
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Refuse transformers' attention functions when the model is built."""
        check_attention(attn_implementation)
        return "eager"


def check_devices(model: PreTrainedModel) -> None:
    """Raise an InputError if a ``device_map`` spread a model over several devices, or put parts of it on disk."""
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    devices = sorted({str(place) for place in places.values()})
    if len(devices) > 1 or devices == ["disk"]:
        raise InputError("device_map", f"expected one device for the whole model, got {', '.join(devices)}")
