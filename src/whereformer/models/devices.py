"""The base class of all models, which lie on one device."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import InputError


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
