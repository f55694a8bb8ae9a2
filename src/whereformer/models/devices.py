"""Where a model's parts may lie: on one device, or on the CPU and on disk until that device needs them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import InputError

OFFLOADED = {"cpu", "disk"}
"""Places from which accelerate fetches weights, to compute with them on one device."""


class OneDeviceModel(PreTrainedModel):
    """A model that computes on one device: a position's tables are shared by all layers, and do not move with them."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; a ``device_map`` over several devices is an :class:`InputError`."""
        loaded = super().from_pretrained(*args, **kwargs)
        check_devices(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded


def check_devices(model: PreTrainedModel) -> None:
    """Raise an InputError if a ``device_map`` spread a model over several devices."""
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    devices = {str(place) for place in places.values()} - OFFLOADED
    if len(devices) > 1:
        found = ", ".join(sorted(devices))
        raise InputError("device_map", f"expected one device, and parts on the CPU or on disk, got devices {found}")
