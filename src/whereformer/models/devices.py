"""The base class of all models: where their parts may lie, and whose attention they do not use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import InputError
from .checks import check_attention

OFFLOADED = {"cpu", "disk"}
"""Places from which accelerate fetches weights, to compute with them on one device."""


class OneDeviceModel(PreTrainedModel):
    """A model that computes attention itself, and on one device: all layers share the tables of a position there.

    Its parts may wait on the CPU or on disk until the device needs them.
    """

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
    """Raise an InputError if a ``device_map`` spread a model over several devices."""
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    devices = {str(place) for place in places.values()} - OFFLOADED
    if len(devices) > 1:
        found = ", ".join(sorted(devices))
        raise InputError("device_map", f"expected one device, and parts on the CPU or on disk, got devices {found}")


@contextmanager
def fetched(position: nn.Module) -> Iterator[None]:
    """Have a method's weights on the device that computes, if accelerate keeps them elsewhere between calls.

    It fetches them when it sees a module's forward, and a method has hooks instead.
    """
    waiting: list[tuple[nn.Module, Any]] = [
        (part, part._hf_hook) for part in position.modules() if hasattr(part, "_hf_hook")
    ]
    for part, hook in waiting:
        hook.pre_forward(part)
    try:
        yield
    finally:
        for part, hook in waiting:
            hook.post_forward(part, None)
